"""What is wrong with an entry, or with a model on the way, is said under its rule (rules CFG, FUS, OBS, CVT, DTY)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic as nni
import torch.ao.nn.quantized.reference as nnqr
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule

from fx_quant_conformance.backends.base import Backend, Capabilities, Representation
from fx_quant_conformance.conformance.claims.build import Preluded
from fx_quant_conformance.conformance.claims.claim import Claim, enumerate_claims
from fx_quant_conformance.conformance.machine.fault import Fault
from fx_quant_conformance.conformance.pipeline.claim_run import ClaimRun
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.convert import check_meaning, check_reference
from fx_quant_conformance.conformance.stages.fuse import check_fused
from fx_quant_conformance.conformance.stages.prepare import check_prepared
from fx_quant_conformance.conformance.stages.state import CaseState
from fx_quant_conformance.refimpl import BackendPatternConfig, DTypeConfig, DTypeWithConstraints, ObservationType
from fx_quant_conformance.refimpl.config.fusers import fold_bn, sequential
from fx_quant_conformance.refimpl.prepare.plan import PLAN
from fx_quant_conformance.reports.schema import Check
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.own_entries import U8, U8_S8, OwnEntries, claim_of

SHARE = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
NOT_OBSERVED = ObservationType.INPUT_OUTPUT_NOT_OBSERVED
LINEAR = BackendPatternConfig(nn.Linear).add_dtype_config(U8_S8).set_root_module(nn.Linear)
LINEAR.set_reference_quantized_module(nnqr.Linear)
LINEAR_RELU = BackendPatternConfig(nni.LinearReLU).add_dtype_config(U8_S8)
LINEAR_AND_RELU = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))


def run_of(backend: Backend, claim: Claim | None = None) -> ClaimRun:
    """The work on the first entry's claim, or on the one given."""
    bench = Bench(backend, seed=0, profile="full", max_examples=1)
    return ClaimRun(bench, claim or enumerate_claims(bench.config, bench.capabilities)[0])


def checks_of(run: ClaimRun) -> Iterator[Check]:
    """Take a claim through the stages, on its base case alone."""
    for message in run.steps():
        if isinstance(message, Check):
            run.state.cases = run.state.cases[:1]  # planned in the first stage
            yield message


def ended_by(*entries: BackendPatternConfig, decomposed: bool = True) -> Check:
    """The first check of the first entry's claim that finds something, or the last one."""
    backend = OwnEntries(*entries)
    backend.representation = Representation.DECOMPOSED if decomposed else Representation.QUANTIZED
    checks = list(checks_of(run_of(backend)))
    return next((check for check in checks if check.verdict is not Verdict.VERIFIED), checks[-1])


def at(stage: str, *entries: BackendPatternConfig) -> tuple[Claim, CaseState]:
    """The first entry's claim, and what was made of its base case, once a stage is through."""
    run = run_of(OwnEntries(*entries))
    check = next(check for check in checks_of(run) if check.stage == stage)
    assert check.outcome == "pass", check.message
    (state,) = run.state.rerun_cases
    return run.claim, state


@pytest.mark.rule("CVT-02")
def test_a_reference_module_that_cannot_be_made() -> None:
    entry = BackendPatternConfig(nn.Linear).add_dtype_config(U8_S8).set_root_module(nn.Linear)
    ended = ended_by(entry.set_reference_quantized_module(nn.Linear))
    assert (ended.stage, ended.rule, ended.verdict) == ("config", "CVT-02", Verdict.REFUTED)
    assert ended.message == "reference module Linear has no from_float"


def loses_relu(is_qat: bool, linear: nn.Module, relu: nn.Module) -> nn.Module:
    return linear


def wrong_eps(is_qat: bool, conv: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Module:
    norm = copy.deepcopy(norm)
    norm.eps = 1e-3
    return fold_bn(conv, norm)


def adds_bias(is_qat: bool, conv: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Module:
    conv = fold_bn(conv, norm)
    conv.bias = nn.Parameter(torch.zeros(conv.out_channels + 1))
    return conv


@pytest.mark.rule("FUS-06")
@pytest.mark.parametrize(
    ("fuser", "told"),
    ((wrong_eps, "rounding explains"), (adds_bias, "and it does not run any more: RuntimeError: ")),
    ids=("another function", "does not run"),
)
def test_a_fuser_that_folds_wrongly(fuser: Any, told: str) -> None:
    """What does not run was an internal error. torch's own does so for grouped transposed convolutions: finding 113."""
    entry = BackendPatternConfig((nn.Conv2d, nn.BatchNorm2d)).add_dtype_config(U8_S8).set_fuser_method(fuser)
    entry.set_fused_module(nn.Conv2d)
    conv = BackendPatternConfig(nn.Conv2d).add_dtype_config(U8_S8).set_root_module(nn.Conv2d)
    ended = ended_by(entry, conv.set_reference_quantized_module(nnqr.Conv2d))
    assert (ended.stage, ended.rule, ended.verdict) == ("fuse", "FUS-06", Verdict.REFUTED)
    assert told in ended.message
    assert ended.evidence["where"].case and ended.evidence["graph"]


@pytest.mark.rule("CVT-10")
def test_a_dtype_that_the_backends_form_does_not_have() -> None:
    for dtype in (torch.int16, torch.int8):
        entry = BackendPatternConfig(nn.ReLU).add_dtype_config(DTypeConfig(dtype, dtype))
        assert ended_by(entry).verdict is Verdict.VERIFIED
        ended = ended_by(entry, decomposed=False)
        assert (ended.stage, ended.rule, ended.verdict) == ("convert", "CVT-01", Verdict.UNEXERCISED)
        assert f"CVT-10: x is observed for {dtype}" in ended.message


@pytest.mark.rule("CVT-02")
def test_a_reference_model_with_another_meaning() -> None:
    entry = BackendPatternConfig((nn.Linear, nn.ReLU)).add_dtype_config(U8_S8)
    entry.set_fuser_method(sequential(nni.LinearReLU)).set_fused_module(nni.LinearReLU)
    _, state = at("convert", entry, LINEAR, LINEAR_RELU)
    inputs = state.inputs[0].tensors
    assert list(check_meaning(state.model, state.reference, inputs)) == []
    root: Any = state.reference.get_submodule("op0.0")
    root.bias = nn.Parameter(root.bias + 9)
    (fault,) = check_meaning(state.model, state.reference, inputs)
    assert fault.rule == "CVT-02" and "weight rounding explains" in fault.message


def test_without_an_oracle_nothing_is_said_of_the_meaning() -> None:
    class Softsign(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.softsign(x)

    model = Softsign()
    assert list(check_meaning(model, torch.fx.symbolic_trace(model), (torch.zeros(2),))) == []


@pytest.mark.rule("FUS-03")
def test_a_pattern_that_fuse_left_alone() -> None:
    entry = BackendPatternConfig((nn.Linear, nn.ReLU)).add_dtype_config(U8_S8)
    claim = claim_of(entry.set_fuser_method(loses_relu), U8_S8)
    (fault,) = check_fused(claim, LINEAR_AND_RELU, lambda: LINEAR_AND_RELU)
    assert fault.rule == "FUS-03" and fault.message.startswith("fuse left 2 calls, should leave one module")


@pytest.mark.rule("FUS-03")
@pytest.mark.parametrize("has_fuser", [True, False])
def test_the_identity_before_a_pattern_is_no_call_that_fuse_left(has_fuser: bool) -> None:
    entry = BackendPatternConfig((nn.Linear, nn.ReLU)).add_dtype_config(U8_S8)
    claim = claim_of(entry.set_fuser_method(sequential(nni.LinearReLU)) if has_fuser else entry, U8_S8)
    layers = [nn.Linear(1, 1)] if has_fuser else [nn.Linear(1, 1), nn.ReLU(), nn.Tanh()]
    preluded = torch.fx.symbolic_trace(Preluded(nn.Sequential(*layers)))
    assert len(preluded.graph.nodes) == 3 + len(layers)
    assert list(check_fused(claim, preluded, lambda: preluded)) == []


@pytest.mark.rule("FUS-01")
def test_a_pattern_that_another_entrys_fuser_took() -> None:
    pair = BackendPatternConfig((nn.Linear, nn.ReLU)).add_dtype_config(U8_S8)
    fused = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(1, 1)))
    (fault,) = check_fused(claim_of(pair, U8_S8), fused, lambda: LINEAR_AND_RELU)
    assert (fault.rule, fault.message) == ("FUS-01", "no fuser method for the pattern, yet fuse turned 2 calls into 1")


@pytest.mark.rule("DTY-02")
def test_a_dtype_config_that_an_earlier_one_hides() -> None:
    vendor = OwnEntries(BackendPatternConfig(nn.ReLU).set_dtype_configs([U8, U8]).set_observation_type(SHARE))
    hidden = enumerate_claims(vendor.entries, Capabilities())[-1]
    hidden = dataclasses.replace(hidden, dtypes=DTypeConfig(torch.quint8, torch.quint8, torch.qint8))
    (check,) = (check for check in checks_of(run_of(vendor, hidden)) if check.stage == "prepare")
    assert (check.rule, check.outcome, check.verdict) == ("DTY-02", "skip", Verdict.UNEXERCISED)
    assert "an earlier dtype config of the entry" in check.message


@pytest.mark.slow
@pytest.mark.rule("DTY-03")
def test_bounds_of_the_output_narrower_than_the_inputs_are_kept_too() -> None:
    narrow = DTypeWithConstraints(dtype=torch.quint8, quant_min_lower_bound=0, quant_max_upper_bound=127)
    wide = DTypeWithConstraints(dtype=torch.quint8, quant_min_lower_bound=0, quant_max_upper_bound=255)
    entry = BackendPatternConfig(nn.ReLU).add_dtype_config(DTypeConfig(wide, narrow)).set_observation_type(SHARE)
    for decomposed in (False, True):
        assert ended_by(entry, decomposed=decomposed).verdict is Verdict.VERIFIED


def observed(entry: BackendPatternConfig, **changes: Any) -> list[Fault]:
    """Check a prepared model after changing what its plan says."""
    claim, state = at("prepare", entry)
    plan = state.prepared.meta[PLAN]
    decision = dataclasses.replace(plan.decisions[0], **changes.pop("decision", {}))
    state.prepared.meta[PLAN] = dataclasses.replace(plan, decisions=(decision,), **changes)
    return list(check_prepared(claim, state.prepared))


def relu(kind: ObservationType) -> BackendPatternConfig:
    return BackendPatternConfig(nn.ReLU).add_dtype_config(U8).set_observation_type(kind)


@pytest.mark.rule("OBS-01")
def test_an_observation_type_that_the_flow_did_not_follow() -> None:
    fault, *_ = observed(relu(SHARE), decision={"observation": ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT})
    assert fault.rule == "OBS-01"
    assert fault.message.endswith("the claim says OUTPUT_SHARE_OBSERVER_WITH_INPUT")


@pytest.mark.rule("OBS-07")
def test_an_observation_type_by_tensor_arguments_that_the_flow_did_not_follow() -> None:
    entry = BackendPatternConfig(torch.add).add_dtype_config(U8)
    entry._set_num_tensor_args_to_observation_type({2: SHARE})
    assert observed(entry) == []
    different = {"observation": ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT}
    assert observed(entry, decision=different)[0].rule == "OBS-07"


@pytest.mark.slow
@pytest.mark.rule("OBS-02")
def test_observers_that_should_be_shared_or_should_not_or_are_missing() -> None:
    _, shared = at("prepare", relu(SHARE))
    _, separate = at("prepare", relu(ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT))
    one_group, two_groups = (each.prepared.meta[PLAN].slots for each in (shared, separate))
    faults = [
        *observed(relu(SHARE), slots=two_groups),
        *observed(relu(ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT), slots=one_group),
        *observed(relu(SHARE), slots=()),
    ]
    assert [fault.rule for fault in faults] == ["OBS-02", "OBS-01", "OBS-01"]
    assert faults[2].message == "inputs without an observer: x"


def size(kind: ObservationType = NOT_OBSERVED) -> BackendPatternConfig:
    return BackendPatternConfig("size").add_dtype_config(U8).set_observation_type(kind)


RESHAPE = BackendPatternConfig("reshape").add_dtype_config(U8).set_observation_type(SHARE)


@pytest.mark.rule("OBS-03")
@pytest.mark.rule("OBS-10")
def test_what_reads_a_shape_is_not_observed() -> None:
    assert ended_by(size(), RESHAPE).verdict is Verdict.VERIFIED
    claim, state = at("prepare", size(), RESHAPE)
    prepared, plan = state.prepared, state.prepared.meta[PLAN]
    (node,) = (node for node in prepared.graph.nodes if node.target == "size")
    slots = (dataclasses.replace(plan.slots[0], value=node.name), *plan.slots[1:])
    prepared.meta[PLAN] = dataclasses.replace(plan, slots=slots)
    (fault,) = check_prepared(claim, prepared)
    assert (fault.rule, fault.message) == ("OBS-03", f"observed, though it is no tensor: {node.name}")


@pytest.mark.rule("PAT-03")
def test_an_entry_that_no_model_can_match_is_left_unexercised() -> None:
    """A traced model holds ``getattr`` where it reads ``shape``: no node calls a method of that name."""
    entry = BackendPatternConfig("shape").add_dtype_config(U8).set_observation_type(NOT_OBSERVED)
    ended = ended_by(entry, RESHAPE)
    assert (ended.stage, ended.rule, ended.verdict) == ("prepare", "PAT-03", Verdict.UNEXERCISED)
    assert ended.message == "an entry that can never match: no node calls .shape, not even where a model uses it"


def reference_model(entry: BackendPatternConfig = LINEAR) -> tuple[Claim, GraphModule]:
    claim, state = at("convert", entry)
    assert list(check_reference(claim, state.reference)) == []
    return claim, state.reference


@pytest.mark.rule("CVT-01")
@pytest.mark.rule("CVT-06")
def test_ends_that_are_not_quantized_as_claimed() -> None:
    claim, model = reference_model()
    output = next(node for node in model.graph.nodes if node.op == "output")
    quantize = output.args[0].args[0]
    quantize.args = (*quantize.args[:-1], torch.int8)
    faults = [next(check_reference(claim, model))]
    output.args = (quantize,)
    faults.append(next(check_reference(claim, model)))
    output.args = (quantize.args[0],)
    faults.append(next(check_reference(claim, model)))
    assert [fault.rule for fault in faults] == ["CVT-01", "CVT-06", "CVT-06"]
    assert faults[0].message == "output is quantized to torch.int8; the claim says torch.quint8"


@pytest.mark.slow
@pytest.mark.rule("CVT-01")
def test_an_input_that_is_not_quantized_and_an_observer_that_is_left() -> None:
    claim, model = reference_model()
    node = next(node for node in model.graph.nodes if node.op == "call_module")
    node.args = (next(node for node in model.graph.nodes if node.op == "placeholder"),)
    fault = next(check_reference(claim, model))
    assert (fault.rule, fault.message) == ("CVT-01", f"input: {node} is not a quantize node")
    claim, state = at("prepare", LINEAR)
    assert next(check_reference(claim, state.prepared)).message == "an observer is left in the reference model"


@pytest.mark.rule("NUM-05")
def test_only_patterns_that_share_their_observer_move_values_only() -> None:
    assert claim_of(relu(SHARE)).moves_only
    assert not claim_of(relu(ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT)).moves_only
    assert not claim_of(BackendPatternConfig(F.avg_pool2d).set_observation_type(SHARE)).moves_only
