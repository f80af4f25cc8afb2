"""How modules and patterns are written as Python: a reader and an interpreter take them the same way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic as nni
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.conformance.reproducers.spelling import (
    NoScriptError,
    check_importable,
    format_own_constructor,
    format_pattern,
)
from fx_quant_conformance.conformance.stages.fuse import FUSES_NOTHING
from fx_quant_conformance.refimpl.fuse.fuse import trace_and_fuse
from tests.conformance.support.planning import claim_on, planned


class Scaled(nn.Module):
    """A parameter, a buffer, and a number."""

    def __init__(self, count: int, factor: float = 1.0) -> None:
        super().__init__()
        self.count, self.factor = count, factor
        self.weight = nn.Parameter(torch.ones(count))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.factor


class Renamed(nn.Module):
    """Its constructor's argument has another name than the attribute."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self._factor


class Holding(nn.Module):
    """Takes a tensor, and keeps it under the argument's name."""

    def __init__(self, weight: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2) if weight is None else weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Changed(Scaled):
    """An attribute that the constructor does not set."""


def spelled(pattern: str, variant: str) -> str:
    case = next(each for each in planned(claim_on(pattern)) if each.variant == variant)
    return format_pattern(trace_and_fuse(case.build(), FUSES_NOTHING))


@pytest.mark.parametrize(
    ("pattern", "variant", "said"),
    [
        ("nn.Linear", "bias=False", "nn.Linear(8, 7, bias=False)(x)"),
        ("nn.Conv2d", "_network=16x16x7x1x1x0", "nn.Conv2d(16, 16, 7, padding=3, groups=16)(x)"),
        ("nn.Conv2d+nn.ReLU", "default", "nn.ReLU()(nn.Conv2d(3, 5, 3)(x))"),
        ("nni.ConvReLU2d", "default", "nni.ConvReLU2d(nn.Conv2d(3, 5, 3), nn.ReLU())(x)"),
        ("operator.add", "other=2", "operator.add(x, 2)"),
        ("torch.cat", "dim=1,shape=(2, 7, 3, 3)x(2, 7, 3, 3)", "torch.cat([x, y], dim=1)"),
        (".view", "default", "x.view(2, 63)"),
        ("nn.Hardtanh", "min_val=-0.3", "nn.Hardtanh(min_val=-0.3)(x)"),
    ],
)
def test_a_case_is_written_as_python(pattern: str, variant: str, said: str) -> None:
    assert spelled(pattern, variant) == said


@pytest.mark.slow
def test_what_is_written_builds_the_same_op() -> None:
    """For each case of a convolution: the expression makes a module of the same class with the same geometry."""
    for case in planned(claim_on("nn.Conv2d")):
        text = format_pattern(trace_and_fuse(case.build(), FUSES_NOTHING))
        made: Any = eval(text.removesuffix("(x)"), {"nn": nn})
        model: Any = next(each for each in case.build().modules() if isinstance(each, nn.Conv2d))
        assert repr(made) == repr(model), case.name


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Scaled(3, factor=2.0), "Scaled(3, factor=2.0)"),
        (Renamed(2.0), None),
        (Holding(torch.zeros(2)), None),
        (nn.Sequential(Scaled(3)), None),
    ],
)
def test_an_own_module_is_written_only_if_its_constructor_makes_it_again(module: nn.Module, said: str | None) -> None:
    found = format_own_constructor(module)
    assert found == (None if said is None else f"{__name__}.{said}")


def test_a_module_that_was_changed_after_its_constructor_is_not_written_by_it() -> None:
    changed, replaced = Changed(3), Scaled(3)
    changed.mode = "fast"  # type: ignore[assignment]
    replaced.weight = nn.Parameter(torch.ones(4))
    assert format_own_constructor(changed) is None
    assert format_own_constructor(replaced) is None
    assert format_own_constructor(Scaled(3)) is not None


def test_what_no_script_can_import_is_told() -> None:
    class Inner(nn.Module):
        pass

    check_importable(Scaled)
    with pytest.raises(NoScriptError, match=r"Inner cannot be imported: define it at the top level of a module"):
        check_importable(Inner)


def test_a_norm_and_functions_are_nested_in_their_order() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            fused: Any = nni.BNReLU2d
            self.layer = fused(nn.BatchNorm2d(4, eps=0.5), nn.ReLU())

        def forward(self, x: Any) -> Any:
            return F.relu(self.layer(x).mul(2.0))

    model = trace_and_fuse(Model().eval(), FUSES_NOTHING)
    assert format_pattern(model) == "F.relu(nni.BNReLU2d(nn.BatchNorm2d(4, eps=0.5), nn.ReLU())(x).mul(2.0))"
