"""The annotate stage: faulty Quantizers are found and blamed on it, the honest one passes, others are refused."""

# ruff: noqa: E402
from __future__ import annotations

import json
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic as nni
from torch import nn

from tests.support.torchao import require_torchao

require_torchao()

from fx_quant_conformance.backends.base import QuantizerRequest, Representation
from fx_quant_conformance.backends.exporting import owner_of
from fx_quant_conformance.conformance.claims.claim import Claim, enumerate_claims
from fx_quant_conformance.conformance.machine.fault import Fault, FaultFound
from fx_quant_conformance.conformance.machine.frames import WireError
from fx_quant_conformance.conformance.pipeline.claim_run import rebuild
from fx_quant_conformance.conformance.pt2e import asking
from fx_quant_conformance.conformance.pt2e.candidates import copy_entry, list_entries
from fx_quant_conformance.conformance.pt2e.probe import Probe, Prober
from fx_quant_conformance.conformance.pt2e.programs import make_program
from fx_quant_conformance.conformance.pt2e.spelling import describe_places, read_places
from fx_quant_conformance.conformance.pt2e.stage import check_annotations, lower_as_annotated
from fx_quant_conformance.conformance.remote.executor import LocalExecutor
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.config import plan_claim
from fx_quant_conformance.conformance.stages.state import STAGES, ClaimState, make_check, stages_of
from fx_quant_conformance.refimpl import BackendConfig
from fx_quant_conformance.refimpl.config.native import U8_S8
from fx_quant_conformance.reports.schema import Where
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.quantizers import ByTarget, StaticLinear, aten, derived_bias, weighted
from tests.mutants.quantizer_faults import MUTANTS, Quantized, Unlicensed
from tests.mutants.reference_kernels import SmallReference
from tests.mutation.gate import Task, run_mutant
from tests.mutation.mutant import Mutant

FAULTY = {
    mutant.name: mutant
    for mutant in MUTANTS
    if not mutant.is_honest and "NUM-03" not in mutant.rules and mutant.make is not Unlicensed
}
"""Those that the annotations show; one has its fault in the program that comes of them, one has no Quantizer."""
UNCLAIMED = FAULTY.pop("annotates what no entry claims")


def state_of(bench: Bench, claim: Claim) -> ClaimState:
    """A claim as the stage finds it."""
    return ClaimState(bench=bench, claim=claim, cases=plan_claim(bench, claim))


def annotations_of(mutant: Mutant, glob: str = "*") -> list[tuple[str, Verdict]]:
    """The rule and the verdict of the stage for each claim that a glob names."""
    bench, found = Bench(mutant.make(), seed=0, profile="quick"), list[tuple[str, Verdict]]()
    for claim in enumerate_claims(bench.config, bench.capabilities):
        if fnmatchcase(claim.id, glob):
            try:
                check = make_check(claim.id, "annotate", list(check_annotations(state_of(bench, claim))))
                found.append((check.rule, check.verdict))
            except FaultFound as error:
                found.append((error.fault.rule, error.fault.verdict))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_quantizer_is_found_and_blamed_on_annotate(name: str) -> None:
    """What a pattern is exported to is remembered, so that its faults share it in one process."""
    mutant = FAULTY[name]
    verdicts = annotations_of(mutant, *mutant.claims)
    failures = [(rule, verdict) for rule, verdict in verdicts if verdict is not Verdict.VERIFIED]
    assert failures
    assert {rule for rule, _ in failures} <= set(mutant.rules)
    assert {verdict for _, verdict in failures} <= {Verdict.REFUTED, Verdict.FALLBACK}


@pytest.mark.slow
def test_what_no_entry_claims_is_found_in_a_whole_model() -> None:
    mutant = UNCLAIMED
    [failure] = run_mutant(mutant, Task(mutant=mutant.name, profile="quick")).failures
    assert failure.rule in mutant.rules and failure.message.startswith("annotate: ")


@pytest.mark.slow
def test_the_program_that_the_quantizer_leads_to_is_what_is_judged() -> None:
    [mutant] = [each for each in MUTANTS if "NUM-03" in each.rules]
    [failure] = run_mutant(mutant, Task(mutant=mutant.name, profile="quick")).failures
    assert failure.stage == "numerics" and failure.rule in mutant.rules
    assert 0 < failure.failing < failure.cases  # the first case of each variant; others have the reference's weights


@pytest.mark.slow
def test_a_program_of_the_quantizer_has_the_bits_of_the_reference_model() -> None:
    bench, claim = bench_of(Quantized().quantizer)
    state = rebuild(bench, claim, Where(case=plan_claim(bench, claim)[0].name))
    program = make_program(
        Quantized().quantizer(QuantizerRequest(weight_scheme=claim.scheme)),
        state.model,
        state.reference,
        state.inputs[0].tensors,
        dynamic_batch=True,
    )
    assert {str(node.target).partition(".")[0] for node in program.graph.nodes if node.op == "call_function"} == {
        "aten",
        "quantized_decomposed",
    }
    computing = [node for node in program.graph.nodes if str(node.target).startswith("aten")]
    assert {owner_of(node) for node in computing} == {"op0"}, "reports can name the reference model's node"
    for each in state.inputs:
        assert torch.equal(program.module()(*each.tensors), state.reference(*each.tensors))


def test_the_reference_model_is_lowered_where_the_quantizer_keeps_to_other_grids() -> None:
    class Other(LocalExecutor):
        def lower_by(self, function: Any, given: Any, *, step: str) -> Any:
            raise type(name, (Exception,), {})("observed in another range")

    example = (torch.ones(1, 3),)
    given = (Other(SmallReference()), QuantizerRequest(), nn.Linear(3, 3), torch.fx.symbolic_trace(nn.ReLU()), example)
    name = "OtherGridError"
    assert torch.equal(lower_as_annotated(*given)(*example), *example)
    name = "OtherError"
    with pytest.raises(Exception, match="another range"):
        lower_as_annotated(*given)


@pytest.mark.slow
def test_no_program_is_made_of_a_fused_module_that_holds_a_norm() -> None:
    """torchao folds it into the weight before it quantizes that; FX does not, so that the weights are other ones."""
    entries = [entry for entry in list_entries() if entry.normal_pattern in (nni.ConvBn2d, nn.Conv2d)]
    config = BackendConfig("fused").set_backend_pattern_configs(
        [copy_entry(entry, is_qat=False).add_dtype_config(U8_S8) for entry in entries]
    )

    class Fused(Quantized):
        representation = Representation.EXPORTED

        def backend_config(self) -> BackendConfig:
            return config

    bench, found = Bench(Fused(), seed=0, profile="quick"), dict[str, bool]()
    for claim in enumerate_claims(bench.config, bench.capabilities):
        run = state_of(bench, claim)
        list(check_annotations(run))
        found[claim.pattern] = bool(run.lowerings)
    assert found == {"nn.Conv2d": True, "nni.ConvBn2d": False}


@pytest.mark.slow
def test_the_honest_quantizer_passes_everywhere() -> None:
    """With a bias of int32; the mutation gate takes it, one with a float bias, and programs through all stages."""
    [mutant] = [each for each in MUTANTS if each.name == "honest Quantizer, int32 bias, decomposed"]
    verdicts = annotations_of(mutant)
    assert {verdict for _, verdict in verdicts} == {Verdict.VERIFIED}
    assert len(verdicts) > 15


def bench_of(quantizer: Any) -> tuple[Bench, Claim]:
    """A bench whose backend gives a Quantizer, or what is none, and its claim of static linear layers."""

    class Given(Quantized):
        def quantizer(self, request: QuantizerRequest) -> Any:
            return quantizer(request) if callable(quantizer) else quantizer

    bench = Bench(Given(), seed=0, profile="quick")
    claims = enumerate_claims(bench.config, bench.capabilities)
    return bench, next(claim for claim in claims if claim.id.startswith("nn.Linear/static") and claim.flow == "ptq")


def judge(quantizer: Any) -> Fault:
    """Return what the stage raises for it."""
    with pytest.raises(FaultFound) as raised:
        list(check_annotations(state_of(*bench_of(quantizer))))
    return raised.value.fault


def test_a_backend_without_a_quantizer_for_a_claim_leaves_it_unexercised() -> None:
    fault = judge(lambda request: None)
    assert fault.verdict is Verdict.UNEXERCISED
    assert "gives no Quantizer" in fault.message and "per_channel_symmetric" in fault.message


def test_what_is_no_quantizer_is_refused_with_its_class() -> None:
    fault = judge(lambda request: nn.Identity())
    assert (fault.rule, fault.verdict) == ("LOW-01", Verdict.REFUTED)
    assert "torch.nn.modules.linear.Identity" in fault.message and "or None" in fault.message


def test_a_quantizer_method_that_raises_is_the_backends_fault() -> None:
    def refuse(request: QuantizerRequest) -> Any:
        raise RuntimeError("no licence found")

    fault = judge(refuse)
    assert fault.verdict is Verdict.REFUTED and "no licence found" in fault.message and fault.evidence["traceback"]


def test_a_missing_torchao_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "find_spec", lambda name: None)
    fault = judge(lambda request: StaticLinear())
    assert fault.verdict is Verdict.UNEXERCISED and "fx-quant-conformance[pt2e]" in fault.message


def test_backends_without_a_quantizer_have_no_such_stage() -> None:
    assert set(STAGES) - set(stages_of(SmallReference())) == {"annotate"}
    assert stages_of(Quantized()) == STAGES


def test_readings_survive_the_way_to_the_judge() -> None:
    spec = weighted(bias=derived_bias)
    probe = Probe(pattern=nn.Linear(4, 3), inputs=(torch.randn(2, 4),), activations=(0,))
    found = Prober(ByTarget({aten.linear.default: spec}), is_qat=False).probe({"a linear layer": probe})
    again = read_places(json.loads(json.dumps(describe_places(found))))
    assert again is not None
    sent, got = found["a linear layer"].alone.reading, again["a linear layer"].alone.reading
    assert sent is not None and got is not None
    assert (got.inputs[0], got.outputs[0]) != (None, None)
    for name, each in sent.parameters.items():
        other = got.parameters[name]
        assert (other.qscheme, other.axis, other.group, other.sources) == (
            each.qscheme,
            each.axis,
            each.group,
            each.sources,
        )
        assert (other.facts.dtype, other.facts.quant_min, other.facts.eps) == (
            each.facts.dtype,
            each.facts.quant_min,
            each.facts.eps,
        )
    assert sent.parameters["bias"].sources and got.ops == sent.ops == ("linear",)


@pytest.mark.parametrize("data", [[], {"a": 1}, {"a": [None, None, False]}, {"a": [{"inputs": []}, None, False]}])
def test_data_that_are_no_readings_are_refused(data: Any) -> None:
    with pytest.raises(WireError, match="no readings of annotations"):
        read_places(data)
