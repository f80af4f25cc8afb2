"""How a model is called by its owner, and what the flow gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace

from fx_quant_conformance import GivenModel
from fx_quant_conformance.conformance.own_models.calling import CallingError, Structure
from fx_quant_conformance.conformance.own_models.given import ModelSpecError, _check, settle


@dataclass
class Pair:
    """Two tensors and a number."""

    first: Tensor
    second: Tensor
    factor: float = 1.0


@dataclass
class Answer:
    """A score, where it is, and nothing."""

    score: Tensor
    place: Tensor
    loss: Tensor | None = None


class Network(nn.Module):
    """Takes a dataclass, a number and keywords; returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: Pair, power: int, *, mask: Tensor | None = None, names: Mapping[str, Tensor]) -> Answer:
        """Return the largest and its place."""
        y = (self.linear(pair.first) * pair.factor + pair.second + names["bias"]) ** power
        y = y if mask is None else y * mask
        score, place = y.max(-1)
        return Answer(score=score, place=place)


def arguments(seed: int, factor: float = 2.0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    draws = torch.Generator().manual_seed(seed)
    a, b, bias = (torch.randn(3, 4, generator=draws) for _ in range(3))
    return (Pair(a, b, factor), 2), {"mask": None, "names": {"bias": bias}}


def given(**others: Any) -> GivenModel:
    torch.manual_seed(0)
    args, kwargs = arguments(0)
    return GivenModel(model=Network().eval(), example_inputs=args, kwargs=kwargs, **others)


def test_a_model_takes_the_tensors_of_its_arguments_and_returns_those_of_its_result() -> None:
    model = settle(given(calibration=[arguments(1), arguments(2)]))
    assert [tuple(each.shape) for each in model.example_inputs] == [(3, 4)] * 3
    assert len(model.calibration) == 2 and not model.kwargs
    args, kwargs = arguments(1)
    expected = given().model(*args, **kwargs)
    score, place = model.model(*model.calibration[0])
    assert torch.equal(score, expected.score) and torch.equal(place, expected.place)


def test_torch_fx_traces_what_is_left() -> None:
    model = settle(given())
    traced = symbolic_trace(model.model)
    assert [node.op for node in traced.graph.nodes].count("placeholder") == 3
    assert torch.equal(traced(*model.example_inputs)[0], model.model(*model.example_inputs)[0])


def test_an_evaluation_calls_every_side_as_its_owner_does() -> None:
    args, kwargs = arguments(3)
    evaluated = settle(given(evaluate=lambda model: {"sum": float(model(*args, **kwargs).score.sum())}))
    assert evaluated.evaluate is not None
    owner = given().model(*args, **kwargs)
    assert evaluated.evaluate(evaluated.model)["sum"] == pytest.approx(float(owner.score.sum()))


def test_other_constants_are_refused() -> None:
    with pytest.raises(ModelSpecError, match="another structure, or other constants, than the example inputs"):
        settle(given(calibration=[arguments(1, factor=3.0)]))
    structure = Structure.of(({"a": torch.zeros(1), "n": 1},))
    assert len(structure.read(({"a": torch.ones(1), "n": 1},))) == 1
    for other in (({"a": torch.ones(1), "n": 2},), ({"a": torch.ones(1)},), ({"a": torch.ones(1), "n": True},)):
        with pytest.raises(CallingError):
            structure.read(other)


def test_a_model_that_takes_tensors_alone_is_left_as_it_is() -> None:
    plain = nn.Linear(4, 4).eval()
    assert type(settle(GivenModel(model=plain, example_inputs=(torch.zeros(2, 4),))).model) is nn.Linear


@pytest.mark.parametrize(
    ("inputs", "kwargs", "said"),
    [(({},), {}, "without a tensor"), ((torch.zeros(2, 5),), {}, "does not run on the inputs that come with it")],
)
def test_what_cannot_be_called_is_said(inputs: tuple[Any, ...], kwargs: dict[str, Any], said: str) -> None:
    model = GivenModel(model=nn.Linear(4, 4), example_inputs=inputs, kwargs=kwargs)
    with pytest.raises(ModelSpecError, match=said):
        _check("nets:made", model)
        settle(model)


@dataclass(slots=True)
class Slotted:
    """A dataclass without a dictionary."""

    value: Tensor
    number: int = 1


def test_a_dataclass_with_slots_is_found_within_others() -> None:
    structure = Structure.of(({"a": Slotted(torch.zeros(2))},))
    assert [each.shape for each in structure.read(({"a": Slotted(torch.ones(2))},))] == [(2,)]
