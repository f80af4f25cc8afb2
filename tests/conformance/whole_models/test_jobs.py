"""Models of several patterns: a fault in one kernel is found, and the first pattern that shows it is named."""

from __future__ import annotations

import math
import operator
import re
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fx_quant_conformance.backends import base
from fx_quant_conformance.backends.base import Execution
from fx_quant_conformance.backends.reference import ReferenceBackend
from fx_quant_conformance.backends.torch_engines.fbgemm import FbgemmBackend
from fx_quant_conformance.backends.torch_engines.onednn import OnednnBackend
from fx_quant_conformance.backends.torch_engines.tables import native_config
from fx_quant_conformance.conformance.claims.claim import enumerate_claims
from fx_quant_conformance.conformance.ops.op_model import Input
from fx_quant_conformance.conformance.oracle.evaluate import Walk
from fx_quant_conformance.conformance.pipeline.job import Job
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.vectors.graph_data import describe_model
from fx_quant_conformance.conformance.whole_models import jobs as model_jobs
from fx_quant_conformance.conformance.whole_models import judging
from fx_quant_conformance.conformance.whole_models.architectures import ARCHITECTURES, Architecture
from fx_quant_conformance.conformance.whole_models.jobs import unit_of
from fx_quant_conformance.conformance.whole_models.judging import (
    LEAST_DECIDED,
    draw_reference,
    judge_model,
    judge_run,
    verify_model,
)
from fx_quant_conformance.conformance.whole_models.setups import EXTENTS, setups_of
from fx_quant_conformance.conformance.whole_models.subgraphs import Subgraph, cut_in_half, cut_subgraphs
from fx_quant_conformance.refimpl import BackendConfig
from fx_quant_conformance.refimpl.config.patterns import leaves, pattern_name
from fx_quant_conformance.reports.schema import Check, Measurement, ModelResult
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.told import name_ops
from tests.mutants.integer_faults import SecondCall
from tests.mutants.integer_kernels import IntegerBackend, Integers, Kernels, Make, Sum, small_config, varied

IN_INTEGERS = (
    "residual",
    "branches",
    "cat_of_ranges",
    "shared_relu",
    "shared_conv",
    "shared_linear",
    "read_inside",
    "lenet",
    "many_rows",
    "large",
    "two_inputs",
    "resnet",
)
"""The models that the integer kernels run."""


FURTHER = frozenset(
    {
        "nn.Identity",
        "nni.ConvBn2d",
        "nnqat.Linear",
        "nnqat.Conv2d",
        "nniqat.ConvBn2d",
        "nniqat.ConvReLU2d",
        "nniqat.LinearReLU",
    }
)


class Backend(IntegerBackend):
    """Claims, beside what the integer kernels know, what the flow makes of it in training."""

    def backend_config(self) -> BackendConfig:
        entries = [each for each in native_config("qnnpack").configs if pattern_name(each.normal_pattern) in FURTHER]
        return BackendConfig("small").set_backend_pattern_configs([*small_config().configs, *entries])


@cache
def all_jobs() -> dict[str, Job]:
    backend = Backend()
    return {job.id: job for job in model_jobs.jobs(backend.backend_config(), backend.capabilities(), "full")}


def result_of(job: Job, bench: Bench) -> ModelResult:
    """What a job says of its model."""
    [result] = [row for row in job.run(bench) if isinstance(row, ModelResult)]
    return result


def run(name: str, backend: base.Backend, flow: str = "ptq", dtype: str = "quint8", seed: int = 0) -> ModelResult:
    """The result of one model."""
    bench = Bench(backend, seed=seed, profile="full")
    return result_of(all_jobs()[f"model/{name}/{flow}/{dtype}/per_channel_symmetric"], bench)


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize(("flow", "dtype"), (("ptq", "qint8"), ("qat", "quint8")))
@pytest.mark.parametrize("name", IN_INTEGERS)
def test_honest_kernels_are_verified(name: str, flow: str, dtype: str) -> None:
    result = run(name, Backend(), flow, dtype)
    assert result.verdict is Verdict.VERIFIED, result
    assert (result.kind, result.waived) == ("model", False)
    holds = r"end to end [\d.]+% .* all \d+ patterns hold(, and in context, on the values that it gives)?$"
    assert result.reason == "" or re.match(holds, result.reason)
    assert result.cases is not None and result.cases > 3


def _swapped(honest: Any, x: Integers, y: Integers) -> Sum:
    result: Sum = honest(y, Integers(q=x.q, scale=y.scale, zero_point=x.zero_point, low=x.low, high=x.high))
    return result


def _rolled(honest: Any, values: list[Integers], dim: int) -> Integers:
    joined: Integers = honest(values, dim)
    return Integers(
        q=joined.q.roll(1, dim), scale=joined.scale, zero_point=joined.zero_point, low=joined.low, high=joined.high
    )


ONE_WRONG: list[tuple[str, str, Make, str, str]] = [
    ("residual", "bias", varied("with_bias", lambda honest, total, bias: total), "relu", "nn.Conv2d+nn.ReLU"),
    ("residual", "add", varied("add", _swapped), "relu_1", "operator.add+nn.ReLU"),
    ("branches", "max_pool", varied("maximum", lambda honest, pool, x: x.q), "pool", "nn.MaxPool2d"),
    ("cat_of_ranges", "cat", varied("cat", _rolled), "cat", "torch.cat"),
    ("cat_of_ranges", "mul", varied("mul", _swapped), "mul", "operator.mul"),
    ("shared_relu", "bias", varied("with_bias", lambda honest, total, bias: total), "first", "nni.LinearReLU"),
    (
        "resnet",
        "average",
        varied("average", lambda honest, pool, x: 2 * honest(pool, x)),
        "average",
        "nn.AdaptiveAvgPool2d",
    ),
]


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize(("name", "what", "kernels", "node", "pattern"), ONE_WRONG, ids=lambda each: str(each)[:20])
def test_the_first_pattern_that_differs_is_named(name: str, what: str, kernels: Make, node: str, pattern: str) -> None:
    result = run(name, Backend(kernels))
    evidence: Any = result.evidence
    assert result.verdict is Verdict.REFUTED, result
    assert (evidence["node"], evidence["pattern"]) == (node, pattern), result
    assert f"the first to differ is {node} ({pattern})" in result.reason
    assert evidence["expected"] != evidence["found"]


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize("flow", ("ptq", "qat"))
@pytest.mark.parametrize("name", [each.name for each in ARCHITECTURES if each.name not in IN_INTEGERS])
def test_the_reference_backend_holds(name: str, flow: str) -> None:
    bench = Bench(ReferenceBackend(), seed=0, profile="full")
    jobs = model_jobs.jobs(bench.config, bench.capabilities, "full")
    result = result_of(next(each for each in jobs if each.id.startswith(f"model/{name}/{flow}/quint8/")), bench)
    assert (result.verdict, result.rule, result.execution) == (Verdict.UNSHOWN, "LOW-04", "none"), result
    evidence: Any = result.evidence
    assert evidence["otherwise"] == "VERIFIED", result


@pytest.mark.rule("CVT-03")
@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="fbgemm's kernel saturates without VNNI (finding 14)")
def test_a_dynamic_input_is_quantized_as_the_qconfig_asks() -> None:
    """torch's LSTM takes 7 bits under fbgemm; lowered by refimpl it takes the 8 that the QConfig asks for."""
    bench = Bench(FbgemmBackend(), seed=0, profile="full")
    jobs = model_jobs.jobs(bench.config, bench.capabilities, "full")
    result = result_of(next(each for each in jobs if each.id.startswith("model/lstm_tagger/ptq/")), bench)
    assert result.verdict is Verdict.VERIFIED, result


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
def test_the_outputs_of_two_heads_are_compared_one_by_one() -> None:
    bench = Bench(ReferenceBackend(), seed=0, profile="full")
    jobs = model_jobs.jobs(bench.config, bench.capabilities, "full")
    job = next(each for each in jobs if each.id.startswith("model/two_outputs/ptq/quint8/"))
    right = result_of(job, bench)
    assert (right.verdict, right.cases) == (Verdict.UNSHOWN, 11)
    wrong = result_of(job, Bench(SecondOff(), seed=0, profile="full"))
    assert wrong.verdict is Verdict.REFUTED
    assert ", output 1: " in wrong.reason
    assert wrong.reason.endswith("hold: it goes wrong in context")


class SecondOff(ReferenceBackend):
    """Gives a second output that is three steps too large; what has one output is right."""

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Any:
        honest = super().lower(reference_model, example_inputs)

        def run(*inputs: Tensor) -> Any:
            output = honest(*inputs)
            if isinstance(output, Tensor):
                return output
            steps = output[1].unique().diff().min()
            return output[0], output[1] + 3 * steps

        return run


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
def test_a_model_that_is_judged_by_patterns_has_the_ratio_of_each() -> None:
    wrong = Backend(varied("maximum", lambda honest, pool, x: x.q))
    bench = Bench(wrong, seed=0, profile="full")
    found: list[tuple[GraphModule, list[Any]]] = []

    def keep(bench: Bench, name: str, reference: GraphModule, batches: Any, **given: Any) -> Check:
        found.append((reference, batches))
        return verify_model(bench, name, reference, batches, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judging, "verify_model", keep)
        result = result_of(all_jobs()["model/branches/ptq/quint8/per_channel_symmetric"], bench)
    assert result.statistics is not None
    assert result.statistics.distances and isinstance(result.statistics.sqnr_db, float)
    [(reference, batches)] = found
    parts = list(cut_subgraphs(reference, batches))
    layers = result.statistics.layers
    assert [(each.node, each.pattern) for each in layers] == [(part.node, part.pattern) for part in parts]
    assert [each.node for each in layers if each.verdict is not Verdict.VERIFIED] == ["pool"]
    for layer, part in zip(layers, parts, strict=True):
        expected = ratio_of(part, bench)
        assert layer.sqnr_db == (expected if isinstance(expected, str) else pytest.approx(expected, abs=0.002)), layer
    assert min((float(str(each.sqnr_db)), each.node) for each in layers)[1] == "pool"
    assert "layers" not in result.evidence


def ratio_of(part: Subgraph, bench: Bench) -> float | str:
    """The power of a pattern's exact results to that of its errors, in dB, over all batches."""
    walk, lowered = Walk(part.model, bench.capabilities), bench.backend.lower(part.model, part.batches[0])
    signal = noise = 0.0
    for batch in part.batches:
        [exact] = walk.exact(batch)
        assert exact.grid is not None
        signal += float((exact.integers - exact.grid.zero_point).square().sum())
        noise += float((exact.grid.integers(lowered(*batch)).round() - exact.integers).square().sum())
    return 10 * math.log10(signal / noise) if noise else "inf"


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
def test_a_kernel_that_rounds_down_is_refuted_by_the_first_pattern_that_does() -> None:
    result = run("residual", Backend(varied("rounded", lambda honest, value: value.floor())))
    evidence: Any = result.evidence
    assert (result.verdict, result.execution) == (Verdict.REFUTED, "reported")
    assert isinstance(result.max_lsb, float) and result.max_lsb > 1 > evidence["node_lsb"]
    assert "looks like truncation (floor)" in result.reason
    assert evidence["node"] == "relu"
    assert result.statistics is not None
    refuted = [each.node for each in result.statistics.layers if each.verdict is Verdict.REFUTED]
    assert refuted == list(evidence["alone"])


class NoSums(Backend):
    """Claims no sum of two tensors, and declines models that have one; of the others its kernels are those given."""

    def backend_config(self) -> BackendConfig:
        entries = super().backend_config().configs
        claimed = [each for each in entries if operator.add not in leaves(each.normal_pattern)]
        return BackendConfig("no sums").set_backend_pattern_configs(claimed)

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Any:
        if any(node.target is operator.add for node in reference_model.graph.nodes):
            raise base.UnsupportedPattern("operator.add has no kernel")
        return super().lower(reference_model, example_inputs)


class LayersInFloat(ReferenceBackend):
    """Claims linear layers alone, so that convolutions run in float."""

    def backend_config(self) -> BackendConfig:
        entries = super().backend_config().configs
        claimed = [each for each in entries if nn.Linear in leaves(each.normal_pattern)]
        return BackendConfig("linear").set_backend_pattern_configs(claimed)


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
def test_a_deep_float_region_is_judged_by_pieces() -> None:
    """Of seven convolutions in a row an eighth was decided, so that a shipped model was UNEXERCISED."""
    bench = Bench(LayersInFloat(), seed=0, profile="full")
    claims = enumerate_claims(bench.config, bench.capabilities)
    setups = {str(setup): setup for setup in setups_of(claims, bench.capabilities, EXTENTS["full"])}
    case = next(each for each in ARCHITECTURES if each.name == "resnet").case()
    unit = unit_of("model/x", case.build(), case, claims, setups["ptq/quint8/per_channel_affine"])
    reference, batches = draw_reference(bench, unit)
    [region] = [each for each in cut_subgraphs(reference, batches, with_regions=True) if each.is_region]
    alone = judge_run(bench, "model/x", region.model, region.batches, is_float=True)
    check = verify_model(bench, "model/x", reference, batches)
    assert dict[str, Any](alone.evidence)["decided"] < LEAST_DECIDED
    evidence: Any = check.evidence
    assert (check.verdict, evidence["otherwise"]) == (Verdict.UNSHOWN, "VERIFIED"), "it does not say what ran"
    assert evidence["patterns"] == 1 and evidence["decided_alone"] > LEAST_DECIDED
    halves = list(cut_in_half(reference, batches, region))
    assert [op for half in halves for op in half.float_ops] == list(region.float_ops)


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize("is_right", (True, False))
def test_a_model_with_unclaimed_ops_may_be_declined_and_is_judged_by_its_patterns(is_right: bool) -> None:
    """It was REFUTED: the backend declined what its config did not claim."""
    bias = varied("with_bias", lambda honest, total, bias: total)
    bench = Bench(NoSums(Kernels if is_right else bias), seed=0, profile="full")
    claims = enumerate_claims(bench.config, bench.capabilities)
    setups = {str(setup): setup for setup in setups_of(claims, bench.capabilities, EXTENTS["full"])}
    case = next(each for each in ARCHITECTURES if each.name == "residual").case()
    unit = unit_of("model/x", case.build(), case, claims, setups["ptq/quint8/per_channel_symmetric"])
    marked = [
        node["name"] for node in describe_model(draw_reference(bench, unit)[0]).graph["nodes"] if "unclaimed" in node
    ]
    assert marked == ["add"], "a device is told so in model.json"
    work = judge_model(bench, unit)
    while True:
        try:
            next(work)
        except StopIteration as end:
            result = end.value.make_row(1.0)
            break
    evidence: Any = result.evidence
    assert result.verdict is (Verdict.VERIFIED if is_right else Verdict.REFUTED), result
    assert "operator.add has no kernel; the config does not claim add" in result.reason
    assert (evidence["unclaimed ops"], result.execution) == (["add"], "reported")
    assert result.statistics is not None and len(result.statistics.layers) > 1
    if not is_right:
        assert "the first to differ is" in result.reason and evidence["pattern"].startswith("nn.Conv2d")


def test_a_declined_model_of_claimed_ops_alone_is_refuted() -> None:
    class Picky(Backend):
        def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Any:
            raise base.UnsupportedPattern("not today")

    result = run("residual", Picky())
    assert result.verdict is Verdict.REFUTED and "declines what its config claims" in result.reason


class Telling(ReferenceBackend):
    """Tells that an op runs in float, of the models that have it."""

    def __init__(self, node: str, kind: str) -> None:
        self.node, self.kind = node, kind

    def backend_config(self) -> BackendConfig:
        return Backend().backend_config()

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Any:
        self.present = {node.name for node in reference_model.graph.nodes}
        return super().lower(reference_model, example_inputs)

    def execution(self, lowered: Any) -> Execution:
        floating = (f"{self.node} ({self.kind}): no kernel",) if self.node in self.present else ()
        return Execution(quantized_ops=name_ops(lowered), float_fallbacks=floating)


@pytest.mark.slow
@pytest.mark.rule("LOW-04")
def test_a_quantized_node_that_runs_in_float_is_a_fallback() -> None:
    result = run("residual", Telling("after", "Conv2d"))
    assert result.verdict is Verdict.FALLBACK
    assert result.evidence["float_ops"] == ["nn.Conv2d at after: no kernel"]
    assert result.reason.startswith("runs in float: nn.Conv2d at after: no kernel")


@pytest.mark.slow
@pytest.mark.rule("LOW-04")
def test_an_op_that_the_decision_log_left_in_float_is_no_fallback() -> None:
    """F.relu is not claimed here."""
    assert run("two_outputs", Telling("relu", "relu")).verdict is Verdict.VERIFIED


@pytest.mark.slow
@pytest.mark.rule("LOW-04")
def test_where_nothing_was_left_in_float_every_fallback_counts() -> None:
    """A backend may have names of its own for the ops that it runs."""

    class Own(Telling):
        def execution(self, lowered: Any) -> Execution:
            return Execution(quantized_ops=name_ops(lowered), float_fallbacks=("aten::convolution",))

    assert run("residual", Own("", "")).verdict is Verdict.FALLBACK


class Says(Telling):
    """Says the same of every model: what runs on integers, and what in float."""

    def __init__(self, quantized: str, *floats: str) -> None:
        self.said = Execution(quantized_ops=(quantized,), float_fallbacks=floats)

    def execution(self, lowered: Any) -> Execution:
        return self.said


@pytest.mark.slow
@pytest.mark.rule("LOW-04")
@pytest.mark.parametrize("text", ["head", "head (Conv2d)", "head: no kernel"])
def test_beside_ops_that_stay_float_a_fallback_counts_however_it_is_spelled(text: str) -> None:
    assert run("two_outputs", Says("stem", text)).verdict is Verdict.FALLBACK


@pytest.mark.slow
@pytest.mark.rule("LOW-04")
def test_a_report_that_names_no_op_of_a_model_shows_nothing_of_it() -> None:
    result = run("residual", Says("conv2d"))
    assert (result.verdict, result.execution) == (Verdict.UNSHOWN, "none")
    assert "found 'conv2d'" in result.reason and result.sureness in result.reason


class Raises(Kernels):
    """Has no kernel for one op."""

    def add(self, x: Integers, y: Integers) -> Sum:
        raise RuntimeError("no kernel for add")


@pytest.mark.rule("LOW-01")
def test_a_model_that_raises_is_refuted_and_the_pattern_named() -> None:
    result = run("residual", Backend(Raises))
    evidence: Any = result.evidence
    assert (result.verdict, evidence["node"]) == (Verdict.REFUTED, "relu_1")
    assert "running batch 0, raised RuntimeError: no kernel for add" in result.reason


@pytest.mark.rule("NUM-07")
def test_a_second_run_that_differs_is_refuted() -> None:
    result = run("shared_linear", Backend(SecondCall))
    assert (result.verdict, result.rule) == (Verdict.REFUTED, "NUM-07")


class Unknown(nn.Module):
    """Ends in an op that the oracle has no rule for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return torch.special.bessel_j0(self.linear(x))


@pytest.mark.parametrize(
    ("kernels", "verdict"),
    [
        (Kernels, Verdict.UNEXERCISED),
        (varied("with_bias", lambda honest, total, bias: total), Verdict.REFUTED),
    ],
)
def test_where_no_bound_is_known_the_patterns_are_judged_alone_and_the_rest_is_open(
    monkeypatch: pytest.MonkeyPatch, kernels: Make, verdict: Verdict
) -> None:
    architecture = Architecture(name="unknown", build=Unknown, inputs=(Input(shape=(2, 4)),), needs=())
    monkeypatch.setattr(model_jobs, "ARCHITECTURES", (architecture,))
    backend = Backend(kernels)
    job = model_jobs.jobs(backend.backend_config(), backend.capabilities(), "quick")[0]
    result = result_of(job, Bench(backend, seed=0, profile="quick"))
    assert result.verdict is verdict, result
    if verdict is Verdict.UNEXERCISED:
        assert result.reason.startswith("end to end 0.0% of the outputs are decided, which says nothing; ")
        assert "but of what is float at special_bessel_j0" in result.reason
        assert result.evidence["decided"] == 0


def test_a_model_of_which_nothing_is_quantized_is_unexercised(monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = Architecture(name="float", build=nn.Softsign, inputs=(Input(shape=(2, 4)),), needs=())
    monkeypatch.setattr(model_jobs, "ARCHITECTURES", (architecture,))
    backend = Backend()
    job = model_jobs.jobs(backend.backend_config(), backend.capabilities(), "quick")[0]
    result = result_of(job, Bench(backend, seed=0, profile="quick"))
    assert result.verdict is Verdict.UNEXERCISED
    assert result.reason == "the config quantizes nothing of this model"


def test_the_profiles_run_more_and_more() -> None:
    backend = Backend()
    ids = {p: [job.id for job in model_jobs.jobs(small_config(), backend.capabilities(), p)] for p in EXTENTS}
    assert set(ids["quick"]) < set(ids["full"]) < set(ids["stress"])
    assert all(len(set(found)) == len(found) for found in ids.values())
    assert not any("/resnet/" in name or "/digits/" in name for name in ids["quick"])
    assert not any("/unet/" in name or "/lstm_tagger/" in name for name in ids["stress"])  # needs are not claimed


@pytest.mark.rule("FUS-02")
def test_a_fuser_method_that_fails_on_a_model_refutes_it() -> None:
    bench = Bench(OnednnBackend(), seed=0, profile="full")
    [job] = [each for each in model_jobs.jobs(bench.config, bench.capabilities, "full") if "/resnet/qat" in each.id]
    result = result_of(job, bench)
    assert (result.verdict, result.cases) == (Verdict.REFUTED, None)
    assert "cannot fuse Conv2d + BatchNorm2d with an addition for QAT" in result.reason


# -- digits -----------------------------------------------------------------------------------------------------------


def digits_rows(flow: str, backend: base.Backend | None = None) -> list[ModelResult | Measurement]:
    bench = Bench(backend or Backend(), seed=0, profile="full")
    rows = all_jobs()[f"model/digits/{flow}/quint8/per_channel_symmetric"].run(bench)
    return [row for row in rows if isinstance(row, ModelResult | Measurement)]


def test_digits_without_scikit_learn_is_a_fact_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    [measurement] = digits_rows("ptq")
    assert isinstance(measurement, Measurement)
    assert (measurement.kind, measurement.topic) == ("measurement", "accuracy")
    assert measurement.values == {
        "missing": "scikit-learn is not installed: pip install 'fx-quant-conformance[digits]'"
    }


@pytest.mark.slow
@pytest.mark.parametrize("flow", ("ptq", "qat"))
def test_digits_are_learnt_and_kept_by_quantization(flow: str) -> None:
    pytest.importorskip("sklearn")
    measurement, model = digits_rows(flow)
    assert isinstance(measurement, Measurement) and isinstance(model, ModelResult)
    assert model.verdict is Verdict.VERIFIED, model
    values: Any = measurement.values
    assert values["images"] == 360
    assert values["float"] > 0.9 and abs(values["reference"] - values["float"]) < 0.05
    assert abs(values["backend"] - values["reference"]) <= values["undecided"]
    if flow == "ptq":  # further training ends elsewhere on each kind of processor, and the bound of one output with it
        assert values["undecided"] < 0.1


class OneBatch(ReferenceBackend):
    """Takes batches of the size of its example."""

    def capabilities(self) -> base.Capabilities:
        return replace(super().capabilities(), dynamic_batch=False)

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Any:
        honest, rows = super().lower(reference_model, example_inputs), len(example_inputs[0])

        def run(x: Tensor) -> Any:
            assert len(x) == rows, f"{len(x)} rows, not {rows}"
            return honest(x)

        return run


@pytest.mark.slow
def test_digits_are_given_in_batches_of_one_size_to_a_backend_that_takes_no_other() -> None:
    """The last 40 of 360 images are left out."""
    pytest.importorskip("sklearn")
    _, model = digits_rows("ptq", OneBatch())
    assert isinstance(model, ModelResult) and model.verdict is Verdict.UNSHOWN, model


class NoAverages(Backend):
    """Claims no adaptive average, and declines models that have one."""

    def backend_config(self) -> BackendConfig:
        entries = [
            each for each in super().backend_config().configs if nn.AdaptiveAvgPool2d not in leaves(each.normal_pattern)
        ]
        return BackendConfig("no averages").set_backend_pattern_configs(entries)

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Any:
        called = [node.target for node in reference_model.graph.nodes if node.op == "call_module"]
        if any(isinstance(reference_model.get_submodule(target), nn.AdaptiveAvgPool2d) for target in called):
            raise base.UnsupportedPattern("no average")
        return super().lower(reference_model, example_inputs)


@pytest.mark.slow
def test_digits_that_a_backend_declines_for_an_op_it_does_not_claim_are_judged_by_their_patterns() -> None:
    """They were REFUTED when their accuracy was to be measured."""
    pytest.importorskip("sklearn")
    measurement, model = digits_rows("ptq", NoAverages(Kernels))
    assert isinstance(measurement, Measurement) and {*measurement.values} == {"images", "float", "reference"}
    assert isinstance(model, ModelResult) and model.verdict is Verdict.VERIFIED, model
    assert "claimed patterns were judged alone" in model.reason
