"""Draws: inputs lie on their grids, reach where faults are, and stay what dequantize and quantize make of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fx_quant_conformance.conformance.claims.case import Case, ValueRange
from fx_quant_conformance.conformance.claims.inputs import (
    BEYOND,
    DIRECTED,
    draw_calibration_inputs,
    draw_float_inputs,
    draw_static_inputs,
)
from fx_quant_conformance.conformance.claims.plan import VALUE_RANGES
from fx_quant_conformance.conformance.ops.op_model import Input, Role
from fx_quant_conformance.conformance.oracle.grids import Grid

GRIDS = (
    Grid(scale=2 / 255, zero_point=127, low=0, high=255, dtype="quint8"),
    Grid(scale=0.0117647061124444, zero_point=-128, low=-128, high=127, dtype="qint8"),
    Grid(scale=1e-7, zero_point=0, low=-127, high=127, dtype="qint8"),
    Grid(scale=700.0, zero_point=255, low=0, high=255, dtype="quint8"),
)


def case(*inputs: Input, ranges: tuple[tuple[float, float], ...] = ((-1.0, 3.0), (0.0, 0.5))) -> Case:
    return Case(name="c", build=nn.Identity, inputs=inputs, value_range=ValueRange(name="r", ranges=ranges))


# -- calibration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ((), (1,), (1, 1), (2, 3)), ids=str)
def test_calibration_reaches_both_ends_of_every_range_even_with_one_element(shape: tuple[int, ...]) -> None:
    for value_range in VALUE_RANGES:
        for low, high in value_range.ranges:
            drawn = draw_calibration_inputs(case(Input(shape=shape), ranges=((low, high),)))
            seen = torch.cat([inputs[0].flatten() for inputs in drawn])
            assert (float(seen.min()), float(seen.max())) == (low, high)


def test_inputs_take_the_ranges_in_turn_and_states_one_of_their_own() -> None:
    """States in −1 … 3/4: a dynamic zero point of 255·4/7, which is no tie."""
    given = case(*[Input(shape=(9,))] * 3, Input(shape=(9,), role=Role.STATE))
    for inputs in draw_calibration_inputs(given):
        ends = [(float(x.min()), float(x.max())) for x in inputs]
        assert ends == [(-1.0, 3.0), (0.0, 0.5), (-1.0, 3.0), (-1.0, 0.75)]


def test_an_empty_input_stays_empty() -> None:
    ((x,), _) = draw_calibration_inputs(case(Input(shape=(0, 4))))
    assert x.shape == (0, 4)


def test_indices_name_the_first_and_the_last_row_and_offsets_begin_at_zero() -> None:
    given = case(Input(shape=(7,), role=Role.INDEX, high=5), Input(shape=(3,), role=Role.OFFSETS, high=7))
    for indices, offsets in draw_calibration_inputs(given):
        assert indices.dtype == offsets.dtype == torch.int64
        assert (int(indices[0]), int(indices[-1]), int(indices.max())) == (0, 4, 4)
        assert int(offsets[0]) == 0 and offsets.tolist() == sorted(offsets.tolist()) and int(offsets[-1]) <= 7


# -- on grids ---------------------------------------------------------------------------------------------------------


@pytest.mark.rule("NUM-01")
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_inputs_are_on_the_grid_and_reach_its_ends(grid: Grid) -> None:
    torch.manual_seed(0)
    drawn = draw_static_inputs(case(Input(shape=(3, 300)), Input(shape=(5,))), [grid] * 2, directed=None, random=3)
    assert [name for name, _ in drawn] == [*(name for name, _ in DIRECTED), "random 2", "random 3", "random 4"]
    dtype = torch.int8 if grid.low < 0 else torch.uint8
    for name, inputs in drawn:
        if name == "between steps and beyond the ends":
            continue
        for x in inputs:
            q = torch.ops.quantized_decomposed.quantize_per_tensor(
                x, grid.scale, grid.zero_point, grid.low, grid.high, dtype
            )
            assert torch.equal(grid.values(q), x), name
            if "random" in name and x.numel() == 900:
                assert (int(q.min()), int(q.max())) == (grid.low, grid.high)


def test_directed_inputs_are_what_their_names_say() -> None:
    grid = Grid(scale=0.25, zero_point=100, low=0, high=255, dtype="quint8")
    drawn = {
        name: grid.integers(x)
        for name, (x,) in draw_static_inputs(case(Input(shape=(4, 5))), [grid], directed=None, random=0)
    }
    assert set(drawn["all at the high end"].flatten().tolist()) == {255}
    assert set(drawn["all at the low end"].flatten().tolist()) == {0}
    assert set(drawn["all at the zero point"].flatten().tolist()) == {100}
    assert drawn["alternating ends"].flatten()[:3].tolist() == [0, 255, 0]
    assert float((drawn["near the zero point"] - 100).abs().max()) <= 3
    assert {*drawn["close to the high end"].flatten().tolist()} == {252, 253, 254, 255}
    assert sorted(drawn["one away from the zero point"].flatten().tolist()) == [100] * 19 + [255]


@pytest.mark.rule("NUM-01")
def test_what_is_off_the_grid_is_at_no_tie_and_reaches_beyond_the_ends() -> None:
    grid = Grid(scale=0.25, zero_point=100, low=0, high=255, dtype="quint8")
    (drawn,) = [
        x
        for name, (x,) in draw_static_inputs(case(Input(shape=(40, 50))), [grid], directed=None, random=0)
        if name.startswith("between")
    ]
    position = grid.integers(drawn)
    away = (position - position.round()).abs()
    assert float(away.mean()) > 0 and float(away.max()) < 0.4
    assert float((position < 0).double().mean()) > 0.2 < float((position > 255).double().mean())
    assert float(position.min()) < -(2.0**27) and float(position.max()) > 2.0**27


def test_the_ends_of_one_operand_meet_the_other_ends_of_the_other() -> None:
    grid = Grid(scale=0.25, zero_point=100, low=0, high=255, dtype="quint8")
    given = case(Input(shape=(4, 5)), Input(shape=(4, 5)))
    by_name = dict(draw_static_inputs(given, [grid] * 2, directed=2, random=0))
    x, y = (grid.integers(each) for each in by_name["alternating ends"])
    assert torch.equal(x + y, torch.full((4, 5), 255.0).double())


def test_fewer_directed_inputs_are_the_first_ones_and_what_has_no_grid_is_drawn_as_for_calibration() -> None:
    given = case(Input(shape=(9,)), Input(shape=(4,), role=Role.INDEX, high=3))
    drawn = draw_static_inputs(given, [GRIDS[0], None], directed=3, random=0)
    assert [name for name, _ in drawn] == [name for name, _ in DIRECTED[:3]]
    assert all(indices.dtype == torch.int64 and int(indices[-1]) == 2 for _, (_, indices) in drawn)


@pytest.mark.parametrize("directed", [3, None])
def test_in_a_value_range_that_goes_beyond_one_input_is_beyond_the_ends(directed: int | None) -> None:
    given = case(Input(shape=(9,)))
    beyond = replace(given, value_range=replace(given.value_range, goes_beyond=True))
    names, more = (
        [name for name, _ in draw_static_inputs(each, [GRIDS[0]], directed=directed, random=1)]
        for each in (given, beyond)
    )
    expected = names if directed is None else [*names[:3], BEYOND[0], *names[3:]]
    assert more == expected and more.count(BEYOND[0]) == 1


# -- float inputs -----------------------------------------------------------------------------------------------------


@pytest.mark.rule("CVT-03")
def test_the_first_float_input_has_exact_qparams_and_no_tie() -> None:
    """255 steps of 2⁻⁶ from −96 steps on: the range of 8 bits is the scale 2⁻⁶ and the zero point 96 exactly."""
    given = case(Input(shape=(3, 8)), Input(shape=(3,), role=Role.STATE), Input(shape=(4,), role=Role.INDEX, high=3))
    drawn = draw_float_inputs(given, random=2)
    directed = ["zeros", "only positive", "only negative", "all the same", "tiny", "huge", "one far out"]
    names = ["on a grid", *directed, "random 1", "random 2"]
    assert [name for name, _ in drawn] == names
    x, state, indices = drawn[0][1]
    steps = x.double() / 2.0**-6
    assert torch.equal(steps, steps.round())
    assert (float(steps.min()), float(steps.max())) == (-96, 255 - 96)
    assert (float(state.min()), float(state.max()), indices.dtype) == (-1.0, 0.75, torch.int64)
    by_name = {name: inputs[0] for name, inputs in drawn}
    assert not bool(by_name["zeros"].any())
    assert float(by_name["only positive"].min()) > 0 > float(by_name["only negative"].max())
    assert not torch.equal(by_name["random 1"], by_name["random 2"])
    assert float(by_name["tiny"].abs().max()) < 2.0**-16 and 2.0**12 < float(by_name["huge"].abs().max()) < 65504
    assert sorted(by_name["one far out"].abs().flatten().tolist())[-2] < 8
    assert len(set(by_name["all the same"].flatten().tolist())) == 1
