"""Where torch's equalization changes what a model computes, or fails, and refimpl's does not (rule EQL-01)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.refimpl.config.qconfig import QConfigMapping
from fx_quant_conformance.refimpl.errors import QConfigError
from fx_quant_conformance.refimpl.prepare.equalize import EqualizationQConfig
from tests.refimpl.support.both_equalized import (
    EVERYWHERE,
    ONLY_LINEAR,
    OURS,
    STATIC,
    WHOLE,
    Net,
    TorchMapping,
    both,
    conv,
    equalized,
    linear,
    selected,
    torch_equalize,
    torch_fakes,
    torch_reference,
    torchs,
    weight,
)

pytestmark = pytest.mark.rule("EQL-01")
FIXED = torchs.FixedQParamsObserver.with_args(scale=1 / 256, zero_point=0)


@pytest.fixture(autouse=True)
def quiet_and_seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield


class Deviation(NamedTuple):
    """A model, what is asked for, and what refimpl makes of it: ops equalized, muls."""

    make: Callable[[], nn.Module]
    ops: int
    muls: int
    shape: tuple[int, ...] = (16, 6)
    mapping: Any = WHOLE
    asked: tuple[Any, Any] = (EVERYWHERE, OURS)


def two(between: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Net(lambda m, x: m.b(between(m.a(x))), a=linear(), b=linear())


def read_twice(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    return torch.cat([y, m.b(y)], 1)


WRONG_FOR_TORCH = {
    "the scaled value has another reader": Deviation(
        lambda: Net(read_twice, a=linear(), b=linear()), 1, 1, mapping=ONLY_LINEAR
    ),
    "a relu of no layer": Deviation(lambda: Net(lambda m, x: m.a(F.relu(x + x)), a=linear()), 1, 1),
    "relu6": Deviation(two(F.relu6), 2, 2),
    "torch.relu": Deviation(two(torch.relu), 2, 2),
    "relu as a method": Deviation(two(lambda y: y.relu()), 2, 2),
    "the layer before is not asked for": Deviation(
        lambda: nn.Sequential(linear(), linear()), 1, 0, asked=selected(module_name=("1",))
    ),
    "the layer before is float": Deviation(
        lambda: nn.Sequential(linear(), linear()), 1, 0, mapping=TorchMapping().set_module_name("1", STATIC)
    ),
    "the layer before is called twice": Deviation(
        lambda: Net(lambda m, x: m.b(m.a(x)) + torch.sin(m.a(torch.cos(x))), a=linear(), b=linear()),
        1,
        1,
        mapping=ONLY_LINEAR,
        asked=selected(module_name=("b",)),
    ),
    "the float layer before has another reader": Deviation(
        lambda: Net(read_twice, a=linear(), b=linear()), 1, 1, mapping=TorchMapping().set_module_name("b", STATIC)
    ),
    "a module called twice": Deviation(lambda: Net(lambda m, x: m.a(m.a(x)), a=linear()), 0, 0),
    "a weight used twice": Deviation(
        lambda: Net(lambda m, x: F.linear(F.linear(x, m.w), m.w), w=weight(linear())), 2, 1
    ),
    "a bias that is not called bias": Deviation(
        lambda: Net(
            lambda m, x: F.linear(F.linear(x, m.w, m.c), m.v), w=weight(linear()), v=weight(linear()), c=torch.ones(6)
        ),
        2,
        1,
    ),
    "channels are the last axis": Deviation(lambda: nn.Sequential(linear()), 1, 1, (4, 6, 6)),
}


@pytest.mark.parametrize("name", WRONG_FOR_TORCH)
def test_where_torchs_equalization_changes_the_function_ours_does_not(name: str) -> None:
    case = WRONG_FOR_TORCH[name]
    found = both(case.make(), case.shape, case.mapping, *case.asked)
    torchs_change, our_change = found.float_errors()
    assert torchs_change > 0.05
    assert our_change < 1e-5
    assert sum(bool(item.observer) for item in found.found) == case.ops
    assert sum(node.target is torch.mul for node in equalized(found.ours).graph.nodes) == case.muls


@pytest.mark.parametrize(
    ("make", "shape", "error", "ops"),
    [
        pytest.param(
            lambda: Net(lambda m, x: F.linear(x, m.w), w=nn.Parameter(weight(linear()))),
            (16, 6),
            TypeError,
            1,
            id="a weight that is a parameter",
        ),
        pytest.param(
            lambda: Net(lambda m, x: F.linear(x, m.w * 2), w=nn.Parameter(weight(linear()))),
            (16, 6),
            AssertionError,
            0,
            id="a weight that is computed",
        ),
        pytest.param(lambda: nn.Sequential(conv(groups=2)), (4, 6, 5, 5), ValueError, 0, id="groups"),
        pytest.param(
            lambda: Net(lambda m, x: F.conv2d(x, m.w, groups=2), w=weight(conv(groups=2))),
            (4, 6, 5, 5),
            ValueError,
            0,
            id="groups of a function",
        ),
        pytest.param(lambda: nn.Sequential(linear()), (4, 3, 6), ValueError, 1, id="channels are the last axis"),
        pytest.param(lambda: nn.Sequential(conv()), (6, 5, 5), ValueError, 1, id="an image without a batch"),
    ],
)
def test_where_torch_fails_to_convert_ours_equalizes_or_leaves_alone(
    make: Any, shape: tuple[int, ...], error: type[Exception], ops: int
) -> None:
    found = both(make(), shape)
    with pytest.raises(error):
        torch_reference(found.torchs)
    exact = found.model(found.x)
    torch.testing.assert_close(equalized(found.ours)(found.x), exact, rtol=1e-5, atol=1e-4)
    assert sum(bool(item.observer) for item in found.found) == ops


@pytest.mark.parametrize("shape", [(4, 3, 6), (4, 6, 6)])
def test_torchs_observer_on_the_wrong_axis_is_an_error_that_names_it(shape: tuple[int, ...]) -> None:
    found = both(nn.Sequential(linear()), shape, ours=EVERYWHERE)
    message = r"process_0_equalization_process_0, a _Input.* saw . channels of 3 axes, the weight of _0 has 6 columns"
    with pytest.raises(QConfigError, match=message):
        equalized(found.ours)


def test_a_fake_quantizes_range_is_adjusted_where_torch_keeps_the_old_one() -> None:
    fake = torch_fakes.FakeQuantize.with_args(observer=torchs.MovingAverageMinMaxObserver)
    mapping = TorchMapping().set_global(STATIC._replace(activation=fake))
    found = both(Net(lambda m, x: m.a(x), a=linear()), mapping=mapping)
    torchs_model = torch_equalize._convert_equalization_ref(copy.deepcopy(found.torchs))
    assert torchs_model.activation_post_process_0.activation_post_process.max_val == found.x.max()
    our_model: Any = equalized(found.ours)
    scaled = found.ours.get_submodule("activation_post_process_0")(found.x) * our_model.x_equalization_scale0
    adjusted = our_model.activation_post_process_0.activation_post_process
    assert adjusted.min_val == pytest.approx(float(scaled.min()))
    assert adjusted.max_val == pytest.approx(float(scaled.max()))


def test_what_shares_an_observer_with_the_scaled_value_keeps_its_range_unlike_torchs() -> None:
    found = both(Net(lambda m, x: m.b(m.a(x) + 5), a=linear(), b=linear()))
    torchs, ours = torch_equalize._convert_equalization_ref(copy.deepcopy(found.torchs)), equalized(found.ours)
    before = found.ours.get_submodule("activation_post_process_1")  # of what linear a gives, and of that plus 5
    assert ours.get_submodule("activation_post_process_1").min_val == before.min_val
    assert torchs.get_submodule("activation_post_process_1").min_val != before.min_val
    torchs_error, our_error = found.errors()
    assert our_error < torchs_error


def test_a_value_with_fixed_qparams_is_left_alone_where_torch_scales_it_out_of_their_range() -> None:
    fixed = TorchMapping().set_global(STATIC).set_object_type(nn.Sigmoid, STATIC._replace(activation=FIXED))
    found = both(nn.Sequential(nn.Sigmoid(), linear()), mapping=fixed)
    assert ["has no range" in item.reason for item in found.found] == [True]
    torchs_error, our_error = found.errors()
    assert torchs_error > 3 * our_error


def test_an_unquantized_reader_of_the_input_makes_no_branch_though_a_qconfig_names_it() -> None:
    """Torch documents two quantized layers on one value; it counts any op that a QConfig holds for."""
    found = both(Net(lambda m, x: m.a(x) * x.size(0), a=linear()))
    assert not [node for node in found.torchs.graph.nodes if "equalization" in node.name]
    assert found.found[0].observer == "activation_post_process_0_equalization_process_0"
    assert found.float_errors()[1] < 1e-5


def test_a_weight_by_keyword_is_equalized_where_torch_multiplies_by_one() -> None:
    found = both(Net(lambda m, x: F.linear(x, weight=m.w), w=weight(linear())))
    assert torch_equalize._convert_equalization_ref(copy.deepcopy(found.torchs)).x_equalization_scale0 == 1
    assert len(set(equalized(found.ours).get_buffer("x_equalization_scale0").tolist())) == 6
    assert found.float_errors()[1] < 1e-5


def test_an_equalization_qconfig_without_observers_is_said_to_have_none() -> None:
    found = both(nn.Sequential(linear()), ours=QConfigMapping().set_global(EqualizationQConfig()))
    assert "no observer for the input" in found.found[0].reason
