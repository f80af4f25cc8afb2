"""Grids that claims fix: given, whatever calibration saw; and nothing but them where they belong (CVT-01, DTY-05)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized.reference as nnqr
from torch import Tensor, nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.conformance.stages.fixed_grids import check_fixed_grids
from fx_quant_conformance.conformance.stages.ranges import check_ranges
from fx_quant_conformance.refimpl import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    FixedQParamsObserver,
    MinMaxObserver,
    ObservationType,
    QConfig,
    QConfigMapping,
    convert_to_reference_decomposed_fx,
)
from tests.mutants import honest
from tests.mutants.fixed_grids import Fixing, OwnFixedObserver
from tests.mutation.gate import Task, run_mutant

X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
SCALE, ZERO_POINT = 2.0**-6, 100
WEIGHT: Any = MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
AFFINE = MinMaxObserver.with_args(dtype=torch.quint8)
FIXED = FixedQParamsObserver.with_args(scale=SCALE, zero_point=ZERO_POINT)
EXACT = DTypeWithConstraints(torch.quint8, scale_exact_match=SCALE, zero_point_exact_match=ZERO_POINT)


class Net(nn.Module):
    """The result of ``fixed`` is pooled, joined with a plain layer's, and taken by another one."""

    def __init__(self, *, is_first: bool = True) -> None:
        super().__init__()
        self.before, self.fixed, self.beside, self.last = (nn.Linear(8, 8) for _ in range(4))
        self.pool, self.is_first = nn.MaxPool1d(2), is_first

    def forward(self, x: Tensor) -> Any:
        """Take (N, C, 8)."""
        x = self.before(x)
        y, z = self.pool(self.fixed(x)), self.pool(self.beside(x))
        joined = torch.cat([y, z] if self.is_first else [z, y], -1)
        return self.last(joined), x


def config_of(ends: str = "both", observation: Any = ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT) -> Any:
    """All linear layers take what is fixed, or plain dtypes."""
    exact = DTypeConfig(
        EXACT if ends != "output" else torch.quint8, EXACT if ends != "input" else torch.quint8, torch.qint8
    )
    plain = DTypeConfig(torch.quint8, torch.quint8, torch.qint8)
    linear = BackendPatternConfig(nn.Linear).set_root_module(nn.Linear).set_reference_quantized_module(nnqr.Linear)
    linear.set_observation_type(observation).set_dtype_configs([exact, plain] if ends else [plain])
    sharing = [
        BackendPatternConfig(op)
        .set_observation_type(ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT)
        .set_dtype_configs([DTypeConfig(torch.quint8, torch.quint8)])
        for op in (nn.MaxPool1d, torch.cat)
    ]
    return BackendConfig("exact").set_backend_pattern_configs([linear, *sharing])


def prepared(model: nn.Module | None = None, make: Any = FIXED, ends: str = "both", x: Tensor = 4 * X) -> Any:
    """A calibrated model whose layer ``fixed`` has the fixed qparams, and the others measured ones."""
    torch.manual_seed(1)
    mapping = QConfigMapping().set_global(QConfig(AFFINE, WEIGHT)).set_module_name("fixed", QConfig(make, WEIGHT))
    found = refimpl.prepare_fx((model or Net()).eval(), mapping, (x,), backend_config=config_of(ends))
    with torch.no_grad():
        found(x)
    return found


def find_slot(model: Any, value: str, role: str = "output") -> Any:
    return next(each for each in refimpl.explain(model).plan.slots if (each.value, each.role) == (value, role))


def observer_of(model: Any, value: str) -> Any:
    return model.get_submodule(find_slot(model, value).name)


# -- what is fixed is given -------------------------------------------------------------------------------------------


@pytest.mark.rule("CVT-01")
@pytest.mark.rule("OBS-02")
@pytest.mark.parametrize("ends", ["both", "input", "output"])
@pytest.mark.parametrize("factor", [0.01, 4.0], ids=["wider", "narrower"])
def test_a_fixed_grid_need_not_hold_what_calibration_saw(factor: float, ends: str) -> None:
    model = prepared(ends=ends, x=factor * X)
    reference = convert_to_reference_decomposed_fx(model)
    groups = {value: find_slot(model, value).group for value in ("fixed", "pool", "cat", "beside")}
    assert groups["fixed"] == groups["pool"] not in (groups["cat"], groups["beside"])
    assert [*check_fixed_grids(reference), *check_ranges(reference, [(factor * X,)])] == []


@pytest.mark.rule("OBS-02")
def test_a_fixed_result_that_joins_others_has_a_second_grid_for_that() -> None:
    """Whatever the first input of the cat is; the pool before it stays where it is. (OBS-17)"""
    model = prepared(Net(is_first=False))
    assert type(observer_of(model, "cat")) is MinMaxObserver
    assert [
        *check_fixed_grids(convert_to_reference_decomposed_fx(model)),
        *check_ranges(convert_to_reference_decomposed_fx(model), [(4 * X,)]),
    ] == []


@pytest.mark.rule("CVT-01")
def test_an_own_observer_of_fixed_qparams_is_followed_where_nothing_is_claimed() -> None:
    own = Fixing(scale=SCALE, zero_point=ZERO_POINT).observer()
    model = prepared(make=own, ends="")
    assert type(observer_of(model, "fixed")) is OwnFixedObserver
    assert list(check_ranges(convert_to_reference_decomposed_fx(model), [(4 * X,)])) == []
    observer_of(model, "fixed").zero_point.add_(1)
    fault = next(check_ranges(convert_to_reference_decomposed_fx(model), [(4 * X,)]))
    assert "its observer gives -1.5625..2.42188 in steps of 0.015625" in fault.message


# -- and nothing else -------------------------------------------------------------------------------------------------


def more_of(name: str, amount: Any) -> Callable[[Any], None]:
    def change(observer: Any) -> None:
        value = getattr(observer, name)
        setattr(observer, name, value + amount)

    return change


FAULTS = {
    "scale": (more_of("scale", 2.0**-29), "scale 0.01562500186264515, zero point 100"),
    "zero point": (more_of("zero_point", -1), "scale 0.015625, zero point 99, integers 0..255"),
    "shorter": (more_of("quant_max", -1), "integers 0..254"),
    "later": (more_of("quant_min", 1), "integers 1..255"),
}


@pytest.mark.rule("CVT-01")
@pytest.mark.rule("DTY-05")
@pytest.mark.parametrize("fault", FAULTS)
def test_another_grid_than_the_fixed_one_is_found(fault: str) -> None:
    change, told = FAULTS[fault]
    model = prepared()
    change(observer_of(model, "fixed"))
    found = next(check_fixed_grids(convert_to_reference_decomposed_fx(model)))
    assert found.rule == "CVT-01"
    assert found.message.startswith("fixed is quantized with ") and told in found.message
    assert found.message.endswith("the claim fixes scale 0.015625, zero point 100, integers 0..255")


def swapped(model: Any, value: str, observer: Any) -> Any:
    """Put another observer in the place of a value's own, and show it what the value is."""
    model.add_module(find_slot(model, value).name, observer)
    with torch.no_grad():
        model(4 * X)
    return convert_to_reference_decomposed_fx(model)


@pytest.mark.rule("CVT-01")
@pytest.mark.rule("OBS-02")
@pytest.mark.parametrize("value", ["fixed", "pool"])
def test_a_measured_grid_is_found_on_a_fixed_result_and_on_what_shares_it(value: str) -> None:
    fault = next(check_fixed_grids(swapped(prepared(), value, AFFINE())))
    assert fault.message.startswith(f"{value} is quantized with ")


@pytest.mark.rule("CVT-01")
@pytest.mark.parametrize("value", ["before", "beside", "last"])
def test_values_next_to_a_fixed_one_keep_their_checks(value: str) -> None:
    """Before all the value that the op of fixed qparams takes."""
    model = prepared()
    batches = [(4 * X,)]
    assert list(check_ranges(convert_to_reference_decomposed_fx(model), batches)) == []
    observer_of(model, value).max_val.mul_(0.5)
    fault = next(check_ranges(convert_to_reference_decomposed_fx(model), batches))
    assert fault.message.startswith(f"{value} is quantized to ")


@pytest.mark.rule("STD-01")
def test_a_standalone_modules_own_plan_counts() -> None:
    mapping = QConfigMapping().set_global(QConfig(AFFINE, WEIGHT)).set_module_name("fixed", QConfig(FIXED, WEIGHT))
    custom = refimpl.PrepareCustomConfig().set_standalone_module_name("child", mapping, (X,), None, config_of())
    model = nn.Sequential()
    model.before, model.child = nn.Linear(8, 8), Net()
    found = refimpl.prepare_fx(
        model.eval(), QConfigMapping().set_global(QConfig(AFFINE, WEIGHT)), (X,), custom, backend_config=config_of()
    )
    with torch.no_grad():
        found(4 * X)
    reference = convert_to_reference_decomposed_fx(found)
    assert [*check_fixed_grids(reference), *check_ranges(reference, [(4 * X,)])] == []
    child: Any = found.child
    observer_of(child, "fixed").zero_point.add_(1)
    fault = next(check_fixed_grids(convert_to_reference_decomposed_fx(found)))
    assert fault.message.startswith("child.fixed is quantized with ")


# -- claims -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.rule("DTY-05")
@pytest.mark.parametrize("kind", ["narrower than the data", "by own observers, not claimed", "of all ops"])
def test_an_honest_machine_of_a_fixed_grid_passes(kind: str) -> None:
    """The mutation gate has all of them."""
    mutant = next(each for each in honest.MUTANTS if each.name == f"fixed grid, {kind}")
    found = run_mutant(mutant, Task(mutant=mutant.name, profile="quick"))
    assert found.units > 3 and not found.failures and not found.open
