"""A vendor's own observers and custom modules: what claims and models are prepared with, exercised and certified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.ao.quantization as torch_quantization
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.backends.base import Capabilities, Representation
from fx_quant_conformance.backends.reference import ReferenceBackend
from fx_quant_conformance.conformance.claims.claim import Claim, enumerate_claims
from fx_quant_conformance.conformance.claims.preparation import Preparation
from fx_quant_conformance.conformance.claims.qconfigs import format_misfit, qconfig_for, wide_qconfig_for
from fx_quant_conformance.conformance.machine.release import ROOT
from fx_quant_conformance.conformance.pipeline.claim_run import ClaimRun, run_claim
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.whole_models.architectures import ARCHITECTURES
from fx_quant_conformance.refimpl import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    FakeQuantize,
    FixedQParamsObserver,
    HistogramObserver,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    QConfig,
    QConfigError,
    qint8,
)
from fx_quant_conformance.refimpl.config.patterns import pattern_name
from fx_quant_conformance.reports.schema import Check
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.fake_backends.reporting import ReportingReference
from tests.mutants.custom_modules import CustomModules, QuantizedBend
from tests.mutants.fixed_grids import MEASURED, FixedGridBackend, Fixing, OwnFixedObserver
from tests.mutants.power_of_two import (
    PowerOfTwoBackend,
    PowerOfTwoObserver,
    require_powers_of_two,
)
from tests.mutants.reference_kernels import SmallReference
from tests.mutants.table_kernels import TableBackend
from tests.mutation.gate import MutantRun, Task, run_mutant
from tests.mutation.mutant import Mutant

WEIGHT = MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
CHANNEL = PerChannelMinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_channel_symmetric)
U8 = DTypeConfig(torch.quint8, torch.quint8)
SOME = ("nn.Linear/static:*", "operator.add/static:*", "torch.cat/static:*")


def run(make: Any, profile: str = "quick", claims: tuple[str, ...] = ()) -> MutantRun:
    """Run all claims and small models of a backend as the command line does."""
    mutant = Mutant(name="own", group="own", make=make, claims=claims)
    return run_mutant(mutant, Task(mutant="own", profile=profile))


# -- powers of two ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.rule("QCM-01")
@pytest.mark.rule("NUM-03")
def test_a_machine_of_powers_of_two_certifies_its_claims() -> None:
    found = run(PowerOfTwoBackend, claims=SOME)
    assert (found.failures, found.open) == ((), ())
    assert found.units > len(SOME)


class PowerOfTwoReference(SmallReference):
    """Runs the reference model, and takes it only on grids of powers of two."""

    qconfigs = PowerOfTwoBackend.qconfigs

    def lower(self, reference_model: Any, example_inputs: tuple[Any, ...]) -> Any:
        require_powers_of_two(reference_model)
        return super().lower(reference_model, example_inputs)


@pytest.mark.slow
@pytest.mark.rule("QCM-01")
def test_whole_models_are_prepared_with_the_same_observers() -> None:
    found = run(PowerOfTwoReference, claims=("model/*",))
    assert (found.failures, found.open) == ((), ())
    assert found.units == sum(each.is_small for each in ARCHITECTURES)


@pytest.mark.slow
@pytest.mark.rule("QCM-01")
def test_the_observer_of_the_vendor_guide_does_as_it_says() -> None:
    guide = (ROOT / "docs" / "vendor-guide.md").read_text(encoding="utf-8")
    code = next(block for block in guide.split("```python")[1:] if "class PowerOfTwoObserver" in block)

    class Signed(ReportingReference):
        name = "signed"

        def backend_config(self) -> BackendConfig:
            known = super().backend_config().configs
            linear = next(each for each in known if each.normal_pattern is nn.Linear)
            linear.set_dtype_configs([DTypeConfig(torch.qint8, torch.qint8, torch.qint8, torch.float)])
            return BackendConfig("signed").set_backend_pattern_config(linear.set_qat_module(None))  # type: ignore[arg-type]

        def capabilities(self) -> Capabilities:
            return Capabilities(float_accumulation=True)

        def lower(self, reference_model: Any, example_inputs: tuple[Any, ...]) -> Any:
            require_powers_of_two(reference_model)
            return super().lower(reference_model, example_inputs)

    names: dict[str, Any] = {"torch": torch, "MinMaxObserver": MinMaxObserver, "QConfig": QConfig, "Backend": Signed}
    names["qint8"] = qint8
    exec(code.partition("```")[0], names)
    found = run(names["MyNpu"], claims=("nn.Linear/*",))
    assert (found.failures, found.open, found.units) == ((), (), 1)


# -- which QConfig a claim takes ---------------------------------------------------------------------------------------


class Observed(ReportingReference):
    """The reference backend with QConfigs of its own, for a linear layer and a relu."""

    def __init__(self, *given: Any, pattern: Any = nn.Linear) -> None:
        self.name, self._given, self._pattern = "observed", given, pattern

    def backend_config(self) -> BackendConfig:
        weighted = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)
        known = ReferenceBackend().backend_config().configs
        linear = next(each for each in known if each.normal_pattern is self._pattern)
        relu = BackendPatternConfig(nn.ReLU).set_dtype_configs([U8])
        return BackendConfig("observed").set_backend_pattern_configs([linear.set_dtype_configs([weighted]), relu])

    def qconfigs(self) -> Sequence[Any]:
        return self._given


def claims_of(backend: ReferenceBackend) -> dict[str, Claim]:
    bench = Bench(backend, seed=0, profile="quick")
    return {each.id: ClaimRun(bench, each).claim for each in enumerate_claims(bench.config, bench.capabilities)}


def claim_on(backend: ReferenceBackend, pattern: str, scheme: str, flow: str = "ptq") -> Claim:
    claims = claims_of(backend).values()
    return next(each for each in claims if (each.pattern, each.scheme, each.flow) == (pattern, scheme, flow))


@pytest.mark.rule("DTY-02")
def test_a_claim_takes_the_first_qconfig_that_fits_its_dtypes_and_its_scheme() -> None:
    signed, unsigned = (HistogramObserver.with_args(dtype=dtype) for dtype in (torch.qint8, torch.quint8))
    backend = Observed(QConfig(signed, CHANNEL), QConfig(unsigned, CHANNEL), QConfig(unsigned, WEIGHT))
    assert qconfig_for(claim_on(backend, "nn.Linear", "per_channel_symmetric")) == QConfig(unsigned, CHANNEL)
    assert qconfig_for(claim_on(backend, "nn.Linear", "per_tensor_symmetric")) == QConfig(unsigned, WEIGHT)
    assert qconfig_for(claim_on(backend, "nn.ReLU", "no_weight")).activation == unsigned


@pytest.mark.rule("QAT-01")
def test_in_training_the_observers_are_those_of_fake_quantizes() -> None:
    made = qconfig_for(
        claim_on(Observed(QConfig(HistogramObserver, WEIGHT)), "nn.Linear", "per_tensor_symmetric", "qat")
    )
    for make, kind in zip(made, (HistogramObserver, MinMaxObserver), strict=True):
        fake: Any = make()
        assert type(fake) is FakeQuantize and type(fake.activation_post_process) is kind
    own = QConfig(
        FakeQuantize.with_args(observer=HistogramObserver),
        FakeQuantize.with_args(observer=MinMaxObserver, dtype=torch.qint8, qscheme=torch.per_tensor_symmetric),
    )
    claim = claim_on(Observed(own), "nn.Linear", "per_tensor_symmetric", "qat")
    assert qconfig_for(claim) == own, "one that is a fake quantize stays"


@pytest.mark.rule("CFG-14")
def test_torchs_qconfigs_and_partials_are_taken() -> None:
    theirs = torch_quantization.QConfig(  # type: ignore[no-untyped-call]
        activation=torch_quantization.MinMaxObserver.with_args(dtype=torch.quint8),
        weight=partial(torch_quantization.MinMaxObserver, dtype=torch.qint8, qscheme=torch.per_tensor_symmetric),
    )
    made = qconfig_for(claim_on(Observed(theirs), "nn.Linear", "per_tensor_symmetric"))
    assert [type(make()) for make in made] == [torch_quantization.MinMaxObserver] * 2
    with pytest.raises(QConfigError, match=r"Backend.qconfigs\(\)"):
        Preparation.of(Observed(MinMaxObserver))


@pytest.mark.rule("DTY-02")
def test_a_claim_that_no_qconfig_fits_is_unexercised_and_says_why() -> None:
    backend = Observed(QConfig(MinMaxObserver.with_args(dtype=torch.qint8), WEIGHT), QConfig(MinMaxObserver, CHANNEL))
    bench = Bench(backend, seed=0, profile="quick")
    claim = claim_on(backend, "nn.Linear", "per_tensor_symmetric")
    checks = [each for each in run_claim(bench, claim) if isinstance(each, Check)]
    assert {each.verdict for each in checks} == {Verdict.UNEXERCISED}
    message = checks[0].message
    assert "[0]: dtype config 0: DTY-01: input dtype is torch.qint8, must be torch.quint8" in message
    assert "[1]: the weight's qscheme is torch.per_channel_symmetric, must be torch.per_tensor_symmetric" in message


@pytest.mark.slow
@pytest.mark.rule("OBS-14")
def test_what_stands_before_fixed_qparams_is_measured_by_the_vendors_observer() -> None:
    class Tables(TableBackend):
        def qconfigs(self) -> Sequence[Any]:
            return [QConfig(PowerOfTwoObserver.with_args(dtype=torch.quint8), WEIGHT)]

    bench = Bench(Tables(), seed=0, profile="quick")
    claims = enumerate_claims(bench.config, bench.capabilities)
    for claim in claims:
        own = ClaimRun(bench, claim).claim
        made: Any = wide_qconfig_for(own, bench.config).activation()
        assert type(getattr(made, "activation_post_process", made)) is PowerOfTwoObserver
    verdicts = {each.verdict for each in run_claim(bench, claims[0]) if isinstance(each, Check)}
    assert verdicts == {Verdict.VERIFIED}


ONE_GRID = Fixing()
"""Of layers and sums; by a vendor's own observer, if it gives one."""


def fixed_claim(pattern: str, *observers: Any, flow: str = "ptq") -> tuple[Claim, BackendConfig]:
    backend = FixedGridBackend(ONE_GRID, observers=observers)
    return claim_on(backend, pattern, "no_weight" if "operator" in pattern else "per_channel_symmetric", flow), (
        backend.backend_config()
    )


@pytest.mark.rule("DTY-05")
@pytest.mark.parametrize("flow", ["ptq", "qat"])
def test_fixed_qparams_are_given_by_the_vendors_own_observer(flow: str) -> None:
    pattern = "nn.Linear" if flow == "ptq" else "nnqat.Linear"
    claim, config = fixed_claim(pattern, MEASURED, ONE_GRID.observer(), flow=flow)
    fixed, wide = (make.activation() for make in (qconfig_for(claim), wide_qconfig_for(claim, config)))
    found = [getattr(each, "activation_post_process", each) for each in (fixed, wide)]
    assert [type(each) for each in found] == [OwnFixedObserver, MinMaxObserver]
    assert isinstance(fixed, FakeQuantize) == isinstance(wide, FakeQuantize) == (flow == "qat")


@pytest.mark.rule("DTY-05")
def test_a_vendor_without_such_an_observer_has_the_suites_and_its_own_weights() -> None:
    made: Any = qconfig_for(fixed_claim("nn.Linear", MEASURED)[0])
    assert type(made.activation()) is FixedQParamsObserver
    assert (made.weight().quant_min, made.weight().quant_max) == (-127, 127)
    with pytest.raises(QConfigError, match=r"the weight's qscheme is torch\.per_channel_symmetric"):
        qconfig_for(replace(fixed_claim("nn.Linear", MEASURED)[0], scheme="per_tensor_symmetric"))


@pytest.mark.rule("OBS-14")
def test_a_vendor_whose_observers_are_all_of_fixed_qparams_leaves_the_input_to_the_flow() -> None:
    claim, config = fixed_claim("operator.add", ONE_GRID.observer())
    assert type(wide_qconfig_for(claim, config).activation()) is OwnFixedObserver
    assert format_misfit(claim) is None
    signed = MinMaxObserver.with_args(dtype=torch.qint8)
    assert format_misfit(fixed_claim("operator.add", signed)[0]) == (
        "no QConfig of Backend.qconfigs() measures values of torch.quint8 from 0 to 255"
    )


# -- ranges of a vendor's own -----------------------------------------------------------------------------------------


class MiddleObserver(MinMaxObserver):
    """Leaves the outer eighths of what it saw to saturation."""

    def _choose_range(self) -> tuple[Tensor, Tensor]:
        return self.min_val * 0.75, self.max_val * 0.75


@pytest.mark.rule("CVT-01")
@pytest.mark.parametrize("kind", [MiddleObserver, HistogramObserver])
def test_own_ranges_are_held_to_what_their_observers_give(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Observed(QConfig(kind.with_args(dtype=torch.quint8), WEIGHT), QConfig(kind, CHANNEL))
    bench = Bench(backend, seed=0, profile="quick")
    claim = claim_on(backend, "nn.Linear", "per_tensor_symmetric")

    def verdicts() -> set[tuple[str, Verdict]]:
        checks = (each for each in run_claim(bench, claim) if isinstance(each, Check))
        return {(each.rule, each.verdict) for each in checks if each.outcome == "fail"}

    assert verdicts() == set()
    honest: Any = bench.convert

    def other(prepared: Any) -> Any:
        for module in prepared.modules():
            if isinstance(module, kind):
                module.max_val.mul_(1.1)
        return honest(prepared)

    monkeypatch.setattr(bench, "convert", other)
    assert verdicts() == {("CVT-01", Verdict.REFUTED)}


@pytest.mark.rule("CVT-02")
@pytest.mark.parametrize("pattern", [nn.Linear, F.linear], ids=["module", "function"])
def test_weights_that_an_own_observer_leaves_to_saturation_are_no_fault(pattern: Any) -> None:
    weight = MiddleObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
    backend = Observed(QConfig(MinMaxObserver, weight), pattern=pattern)
    bench = Bench(backend, seed=0, profile="quick")
    checks = run_claim(bench, claim_on(backend, pattern_name(pattern), "per_tensor_symmetric"))
    failed = [(each.rule, each.message) for each in checks if isinstance(each, Check) and each.outcome != "pass"]
    assert failed == []


@pytest.mark.rule("QCM-01")
def test_what_is_no_qconfig_ends_the_run_with_one_line() -> None:
    found = run(lambda: Observed(MinMaxObserver))
    (reason,) = found.open
    assert "UsageError: backend observed: qconfigs() or a custom config: QConfig of Backend.qconfigs()" in reason


# -- custom modules ---------------------------------------------------------------------------------------------------

both_kinds = pytest.mark.parametrize(
    ("representation", "is_weighted"), [(Representation.QUANTIZED, False), (Representation.DECOMPOSED, True)]
)
"""Each form in which a custom module stays a module; those here make quantized tensors, which no program holds."""


@pytest.mark.slow
@pytest.mark.rule("CUS-01")
def test_a_custom_module_that_torch_does_not_export_is_said_to_have_no_program() -> None:
    found = run(lambda: CustomModules(Representation.EXPORTED))
    assert [(each.verdict, each.rule) for each in found.failures] == [(Verdict.REFUTED, "LOW-01")] * 2
    assert found.failures[0].message == (
        "the backend declines what its config claims: it takes exported programs, and the reference model "
        "(_0: QuantizedBend) has no exported program: torch says UnsupportedOperatorException: aten.dequantize.self"
    )


@pytest.mark.slow
@pytest.mark.rule("CUS-01")
@both_kinds
def test_a_custom_module_is_certified(representation: Representation, is_weighted: bool) -> None:
    """A weight is held as that of a reference module: what is exact is known, and what its rounding explains."""
    found = run(lambda: CustomModules(representation, is_weighted=is_weighted))
    assert (found.failures, found.open, found.units) == ((), (), 2)


@pytest.mark.slow
@pytest.mark.rule("CUS-01")
@pytest.mark.rule("NUM-03")
@both_kinds
def test_a_custom_module_that_computes_something_else_is_refuted(
    representation: Representation, is_weighted: bool
) -> None:
    found = run(lambda: CustomModules(representation, lambda x: x * 1.25, is_weighted=is_weighted))
    assert [(each.verdict, each.rule) for each in found.failures] == [(Verdict.REFUTED, "NUM-03")] * 2


@pytest.mark.slow
@pytest.mark.rule("CUS-01")
def test_a_float_function_that_is_not_the_float_modules_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vendor says what is exact; that it is the function of the float module, the suite checks."""
    monkeypatch.setattr(QuantizedBend, "float_function", lambda self, x: self.inner(x) * 1.5)
    found = run(CustomModules)
    assert [(each.verdict, each.rule, each.stage) for each in found.failures] == [
        (Verdict.REFUTED, "CVT-02", "convert")
    ] * 2
