"""What follows a convolution, a linear layer or a sum is built without `register`, and tried where it bends."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized.reference as nnqr
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.conformance.claims.build import build_model
from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.claims.inputs import draw_calibration_inputs
from fx_quant_conformance.conformance.claims.plan import BENDS, VALUE_RANGES
from fx_quant_conformance.conformance.ops.fused_modules import BENDING, EPILOGUES, make_epilogue
from fx_quant_conformance.refimpl import BackendPatternConfig, MatchAllNode
from fx_quant_conformance.refimpl.config.patterns import leaf_name
from tests.conformance.support.own_entries import U8, U8_S8, OwnEntries, checks_of, claim_of, failures
from tests.conformance.support.planning import claims_of, planned

ROOTS = (nn.Conv1d, nn.Conv3d, nn.Linear, F.linear, torch.conv2d, operator.add, torch.mul)
ASKED = (
    nn.ReLU6,
    F.relu6,
    nn.Hardtanh,
    F.hardtanh,
    nn.Hardswish,
    F.hardswish,
    nn.Hardsigmoid,
    F.hardsigmoid,
    nn.Sigmoid,
    torch.sigmoid,
    "sigmoid",
    nn.SiLU,
    F.silu,
    nn.LeakyReLU,
    F.leaky_relu,
    nn.PReLU,
    F.prelu,
    torch.clamp,
    "clamp",
    "relu",
    "tanh",
)


def entry_of(root: Any, *epilogues: Any) -> BackendPatternConfig:
    entry = BackendPatternConfig((root, *epilogues)) if epilogues else BackendPatternConfig(root)
    if root in (operator.add, torch.mul):
        return entry.set_dtype_configs([U8])
    if isinstance(root, type):
        entry.set_root_module(root).set_reference_quantized_module(getattr(nnqr, root.__name__))
    else:
        entry._set_input_type_to_index({"weight": 1, "bias": 2})
    return entry.set_dtype_configs([U8_S8])


def claim_after(root: Any, epilogue: Any) -> Claim:
    entry = entry_of(root, epilogue)
    return claim_of(entry, entry.dtype_configs[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("root", "epilogue"),
    [*((nn.Conv2d, epilogue) for epilogue in ASKED), *((root, nn.PReLU) for root in ROOTS)],
    ids=leaf_name,
)
def test_it_is_built_after_every_root_and_runs(root: Any, epilogue: Any) -> None:
    cases = planned(claim_after(root, epilogue), 8)
    for case in cases:
        model = build_model(case)
        nodes = [node for node in torch.fx.symbolic_trace(model).graph.nodes if node.op.startswith("call")]
        assert len(nodes) == 2
        last = nodes[-1]
        kind: Any = type(model.get_submodule(str(last.target))) if last.op == "call_module" else last.target
        assert kind == epilogue
        model(*draw_calibration_inputs(case)[0])


def test_what_bends_is_tried_beyond_the_bends_in_every_profile_and_what_does_not_as_before() -> None:
    for limit in (1, 8, None):
        assert [case.value_range for case in planned(claim_after(nn.Conv2d, nn.ReLU6), limit)][-3:] == list(BENDS)
    value_ranges = {case.value_range.name for case in planned(claim_after(nn.Conv2d, nn.ReLU6))}
    assert value_ranges == {value_range.name for value_range in (*VALUE_RANGES, *BENDS)}
    for backend in ("qnnpack", "onednn"):
        for claim in claims_of(backend):
            if any(op in EPILOGUES for op in (claim.entry.normal_pattern,)):
                assert not {case.value_range for case in planned(claim)} & set(BENDS), claim.id


@pytest.mark.parametrize("root", (nn.Conv2d, nn.Linear, operator.add), ids=leaf_name)
@pytest.mark.parametrize("epilogue", (nn.ReLU6, nn.Hardtanh, torch.clamp, nn.Hardswish, nn.Hardsigmoid), ids=leaf_name)
def test_beyond_the_bends_are_values_on_both_sides_of_them(root: Any, epilogue: Any) -> None:
    """A sixteenth of them at least, of the root's results, above the upper bend and below it."""
    for case in planned(claim_after(root, epilogue), 1)[-3:]:
        torch.manual_seed(0)
        model: Any = build_model(case)
        first, second = model.steps
        values = torch.cat([_run(model, 0, first, inputs) for inputs in draw_calibration_inputs(case)])
        end = _run(model, 1, second, (torch.tensor([[1e6]]),)).item()
        upper = {nn.Hardswish: 3.0, nn.Hardsigmoid: 3.0}.get(epilogue, end)
        above = float((values > upper).float().mean())
        assert 1 / 16 < above < 15 / 16, (case.name, above)


def _run(model: Any, number: int, step: Any, inputs: tuple[Tensor, ...]) -> Tensor:
    with torch.no_grad():
        found: Tensor = model._call_step(number, step, inputs)
    return found.flatten()


def test_limits_hold_for_what_follows_too() -> None:
    limits = {"nn.Hardtanh": {"min_val": (0.0,), "max_val": (6,)}}
    for cases, ends in (
        (planned(claim_after(nn.Conv2d, nn.Hardtanh)), (-0.3, 0.7)),
        (planned(claim_after(nn.Conv2d, nn.Hardtanh), limits=limits), (0.0, 6)),
    ):
        module: Any = build_model(cases[0]).get_submodule("op1")
        assert (module.min_val, module.max_val) == ends


def test_a_slope_for_each_channel_comes_after_what_has_channels() -> None:
    slopes: Any = make_epilogue(nn.PReLU, 7).op
    assert slopes.weight.shape == (7,) and len(set(slopes.weight.tolist())) == 7
    for root, ranks in ((nn.Conv2d, {4}), (nn.Linear, {2}), (F.linear, {2}), (nn.Conv1d, {3})):
        assert {len(case.inputs[0].shape) for case in planned(claim_after(root, nn.PReLU))} == ranks
    assert make_epilogue(nn.PReLU, 0).op.weight.shape == (1,)  # type: ignore[union-attr]


def test_of_an_op_that_follows_the_arguments_are_not_the_defaults() -> None:
    x = torch.linspace(-4, 8, 97)
    for kind in (nn.Hardtanh, nn.PReLU, nn.ELU):
        module: Any = make_epilogue(kind, 1).op
        assert kind in BENDING and not torch.equal(module(x), kind()(x))


@pytest.mark.parametrize("rest", (nn.ReLU6, F.relu6, "relu"), ids=leaf_name)
def test_after_a_second_input_the_same_ops_may_follow(rest: Any) -> None:
    pattern: Any = (rest, (operator.mul, MatchAllNode, nn.Conv2d))
    entry = BackendPatternConfig()._set_pattern_complex_format(pattern).set_dtype_configs([U8_S8])
    cases = planned(claim_of(entry, U8_S8), 8)
    assert (cases[-1].value_range in BENDS) == (rest in BENDING)
    model = build_model(cases[0])
    x, y = draw_calibration_inputs(cases[0])[0]
    wanted: Any = y * model.chain(x)  # type: ignore[operator]
    assert torch.equal(model(x, y), wanted.clamp(0, 6 if rest in BENDING else None))


@pytest.mark.slow
@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize(
    ("root", "epilogue"),
    [
        *((nn.Linear, epilogue) for epilogue in EPILOGUES if epilogue in BENDING and isinstance(epilogue, type)),
        (torch.conv2d, nn.ReLU6),
        (operator.add, nn.Hardswish),
    ],
    ids=leaf_name,
)
def test_the_reference_model_is_verified_in_all_value_ranges(root: Any, epilogue: Any) -> None:
    assert failures(checks_of(OwnEntries(entry_of(root, epilogue), entry_of(nn.Linear)))) == []
