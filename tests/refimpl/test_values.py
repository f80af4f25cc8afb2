"""Which values are observed: masks, indices and tuples are not, beside torch where it can run (OBS-10, CUS-01)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Self

import both_flows as flows
import pytest
import torch
import torch.ao.quantization.quantize_fx as torch_fx
from both_flows import torch_mappings, torch_qconfigs
from torch import Tensor, nn
from torch.ao.quantization.fx import custom_config as torch_custom
from torch.ao.quantization.quant_type import QuantType as TorchQuantType

import refimpl
from backends.torch_engine import engine

torch.manual_seed(0)
X = torch.randn(3, 8)
MASK, INTEGERS = torch.rand(3, 8) > 0.5, torch.randint(0, 8, (3, 8))
WORDS = torch.randn(5, 3, 8)


class Net(nn.Module):
    """Layers for a function of two inputs."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.words, self.run = nn.Linear(8, 8), nn.Linear(8, 8), nn.Embedding(10, 8), run
        self.lstm, self.gru, self.cell = nn.LSTM(8, 8), nn.GRU(8, 8), nn.LSTMCell(8, 8)

    def forward(self, x: Tensor, other: Tensor) -> Any:
        return self.run(self, x, other)


Case = tuple[Callable[..., Any], Tensor]
# What torch's flow takes too: the result is its, bit for bit.
AS_TORCH: Mapping[str, Case] = {
    "a mask that is unsqueezed": (
        lambda net, x, mask: net.b(net.a(x).unsqueeze(1).masked_fill(mask.unsqueeze(1), -4.0)),
        MASK,
    ),
    "a mask that is viewed": (lambda net, x, mask: net.b(net.a(x).masked_fill(mask.view(3, 8), 0.0)), MASK),
    "a comparison of a slice": (lambda net, x, ids: net.b(net.a(x).masked_fill(ids[:, :] == 0, 0.0)), INTEGERS),
    "a cat of masks": (
        lambda net, x, mask: net.b(net.a(x).masked_fill(torch.cat([mask[:, :4], mask[:, 4:]], 1), 0.0)),
        MASK,
    ),
    "indices that are moved and added to": (
        lambda net, x, ids: net.b(x + net.words(ids[:, :1].reshape(3) + 1)),
        INTEGERS,
    ),
}
# What torch observes as floats, and fails on.
TORCH_FAILS: Mapping[str, Case] = {
    "a condition": (lambda net, x, mask: torch.where(mask.squeeze(), net.a(x), net.b(x)), MASK),
    "an inverted mask": (
        lambda net, x, mask: net.b(net.a(x).masked_fill(~mask.unsqueeze(0).squeeze(0), 0.0)),
        MASK,
    ),
    "indices of gather": (lambda net, x, ids: net.b(torch.gather(net.a(x), 1, ids.contiguous())), INTEGERS),
}
# What only a run of the example inputs can tell.
BY_EXAMPLE: Mapping[str, Case] = {
    "arithmetic of integers": (lambda net, x, ids: net.b(net.a(x) + (1 - ids) * -0.5), INTEGERS),
    "a product with a mask": (lambda net, x, mask: net.b(net.a(x) * mask), MASK),
}
TUPLES: Mapping[str, Case] = {
    "cat of both states": (lambda net, x, words: net.a(torch.cat(net.lstm(net.a(words))[1], 0)), WORDS),
    "stack of both states": (lambda net, x, words: net.a(torch.stack(net.lstm(words)[1])), WORDS),
    "cat of a GRU's result": (lambda net, x, words: torch.cat(net.gru(words), 0), WORDS),
    "cat of a cell's result": (lambda net, x, words: net.a(torch.cat(net.cell(words[0]), 0)), WORDS),
}


def converted(side: Any, case: Case, examples: bool = True) -> list[Any]:
    """The results of the reference and of the lowered model, under qnnpack's default mapping."""
    run, other = case
    mapping: Any = torch_mappings.get_default_qconfig_mapping("qnnpack").set_object_type(nn.Embedding, None)
    with engine("qnnpack"), torch.no_grad():
        prepared = side.prepare_fx(Net(run).eval(), mapping, (X, other) if examples else None)
        prepared(X, other)
        made = (convert(copy.deepcopy(prepared)) for convert in (side.convert_to_reference_fx, side.convert_fx))
        return [model(X, other) for model in made]


@pytest.mark.rule("OBS-10")
@pytest.mark.parametrize("examples", [True, False], ids=["run", "not run"])
@pytest.mark.parametrize("name", AS_TORCH)
def test_masks_and_indices_are_not_observed_where_torch_does_not(name: str, examples: bool) -> None:
    ours, theirs = converted(refimpl, AS_TORCH[name], examples), converted(torch_fx, AS_TORCH[name])
    assert all(map(torch.equal, ours, theirs))


def nearly_float(case: Case, examples: bool) -> bool:
    """Both forms are within the steps of some 8-bit roundings of the float model, whose values are of order 1."""
    exact = Net(case[0]).eval()(X, case[1])
    return all(bool((found - exact).abs().max() < 0.15) for found in converted(refimpl, case, examples))


@pytest.mark.rule("OBS-10")
@pytest.mark.parametrize("examples", [True, False], ids=["run", "not run"])
@pytest.mark.parametrize("name", TORCH_FAILS)
def test_torch_observes_masks_and_indices_and_fails_and_ours_runs(name: str, examples: bool) -> None:
    with pytest.raises((NotImplementedError, RuntimeError)):
        converted(torch_fx, TORCH_FAILS[name])
    assert nearly_float(TORCH_FAILS[name], examples)


@pytest.mark.rule("OBS-10")
@pytest.mark.parametrize("name", BY_EXAMPLE)
def test_the_run_of_the_example_inputs_tells_dtypes(name: str) -> None:
    assert nearly_float(BY_EXAMPLE[name], True)


@pytest.mark.rule("OBS-10")
@pytest.mark.parametrize("examples", [True, False], ids=["run", "not run"])
@pytest.mark.parametrize("name", TUPLES)
def test_torch_observes_the_tuple_of_a_recurrent_module_and_fails_and_ours_its_elements(
    name: str, examples: bool
) -> None:
    with pytest.raises(AttributeError, match="'tuple' object has no attribute"):
        converted(torch_fx, TUPLES[name])
    assert nearly_float(TUPLES[name], examples)


class Custom(nn.Module):
    """A module that no pass looks into."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


class Doubled(Custom):
    """What convert makes of it."""

    @classmethod
    def from_observed(cls, observed: Custom) -> Self:
        assert hasattr(observed, "qconfig")
        made = cls()
        made.layer = observed.layer
        return made

    def forward(self, x: Tensor) -> Any:
        return 2 * self.layer(x)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.custom, self.last = Custom(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.custom(x))


@pytest.mark.rule("CUS-01")
@pytest.mark.parametrize("form", ["convert_to_reference_fx", "convert_fx"])
def test_a_dynamic_custom_module_that_convert_alone_names_is_swapped_as_in_torch(form: str) -> None:
    found = []
    for side, custom, mode in (
        (torch_fx, torch_custom, TorchQuantType.DYNAMIC),
        (refimpl, refimpl, refimpl.QuantType.DYNAMIC),
    ):
        sides: Any = side
        classes: Any = custom
        prepared = sides.prepare_fx(
            Holder().eval(),
            flows.global_mapping(torch_qconfigs.default_dynamic_qconfig),
            (X,),
            prepare_custom_config=classes.PrepareCustomConfig().set_non_traceable_module_classes([Custom]),
        )
        config = classes.ConvertCustomConfig().set_observed_to_quantized_mapping(Custom, Doubled, mode)
        with engine("x86"), torch.no_grad():
            made = getattr(sides, form)(prepared, convert_custom_config=config)
            found.append((type(made.custom), made(X)))
    assert found[0][0] is found[1][0] is Doubled
    assert torch.equal(found[0][1], found[1][1])
