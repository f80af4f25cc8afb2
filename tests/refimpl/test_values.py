"""What is a float tensor: masks, indices, integer inputs and tuples beside torch, with and without example inputs."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as torch_fx
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl.graph.example_run import Examples
from fx_quant_conformance.refimpl.graph.tracer import trace
from fx_quant_conformance.refimpl.graph.values import find_float_tensors
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.both_core import Net, assert_parity
from tests.refimpl.support.parity import CONVERTS
from tests.support.torch_release import need

torch.manual_seed(7)
X = torch.randn(2, 4, 4)
BOOLS, INTEGERS = torch.tensor([[True, False, False, True], [False, True, False, False]]), torch.randint(0, 4, (2, 4))
Run = Callable[..., Any]


class Net2(Net):
    """Linear layers and what has states, with a second input: a mask, or indices."""

    def __init__(self, run: Run) -> None:
        torch.manual_seed(1)
        parts = {"embed": nn.Embedding(10, 4), "lstm": nn.LSTM(4, 4), "gru": nn.GRU(4, 4), "cell": nn.LSTMCell(4, 4)}
        super().__init__(run, **parts, attend=nn.MultiheadAttention(4, 2, batch_first=True))
        self.register_buffer("positions", torch.arange(4))
        self.eval()

    def forward(self, x: Any, m: Any) -> Any:  # type: ignore[override]
        return self.run(self, x, m)


def slots(model: Any) -> list[str]:
    return [slot.value for slot in refimpl.explain(model).plan.slots]


def prepared(run: Run, second: Tensor, *, has_examples: bool = True) -> Any:
    """Prepare and calibrate, with the example inputs or without any."""
    examples = (X, second) if has_examples else None
    found = refimpl.prepare_fx(Net2(run), flows.global_mapping(), examples, backend_config=flows.our_config("native"))
    with torch.no_grad():
        found(X, second)
    return found


# What torch's rule gets right: (forward, second input).
ALIKE: Mapping[str, tuple[Run, Tensor]] = {
    "mask through shapes": (
        lambda net, x, m: net.a(x).masked_fill(m.unsqueeze(1).transpose(1, 2).repeat(1, 1, 4).view(2, 4, 4), 0.0),
        BOOLS,
    ),
    "masked scores": (
        lambda net, x, m: torch.softmax((net.a(x) @ net.b(x).mT).masked_fill(m[:, None, :], -10.0), -1),
        BOOLS,
    ),
    "mask as floats": (lambda net, x, m: net.a(x) * m.float()[:, None, :], BOOLS),
    "comparison as floats by dtype": (lambda net, x, m: net.a((m == 0).to(torch.float32)), INTEGERS),
    "index as floats": (lambda net, x, m: net.a(x) + net.b(x).argmax(-1, keepdim=True).float(), BOOLS),
    "type of floats": (lambda net, x, m: net.a(x.type(torch.float32)), BOOLS),
    "quotient of integers": (lambda net, x, m: net.a(m / 2), INTEGERS),
    "function of integers": (lambda net, x, m: net.a(torch.exp(m)), INTEGERS),
    "classes": (lambda net, x, m: net.a(F.one_hot(m, 4).float()), INTEGERS),
    "positions": (lambda net, x, m: net.a(net.embed(torch.arange(x.size(1))[None].expand(2, -1))), BOOLS),
    "positions and tokens": (lambda net, x, m: net.a(net.embed(torch.arange(4)[None] + m)), INTEGERS),
    "numbers as floats": (lambda net, x, m: net.a(x) + torch.arange(x.size(1)).float(), BOOLS),
    "ones": (lambda net, x, m: net.a(x) + net.b(torch.ones((x.size(0), 4)))[:, None], BOOLS),
    "states in a list": (lambda net, x, m: torch.cat([net.lstm(x)[1][0], net.a(x)]).relu(), BOOLS),
    "states passed on": (lambda net, x, m: net.lstm(x, net.lstm(x)[1])[0].relu(), BOOLS),
    "attention": (lambda net, x, m: torch.cat([net.attend(x, x, x)[0], x]), BOOLS),
}
TRACED_NUMBERS = ("positions", "numbers as floats", "ones")


@pytest.mark.slow
@pytest.mark.rule("OBS-10")
@pytest.mark.parametrize("name", ALIKE)
def test_where_torch_works_the_same_is_observed(name: str) -> None:
    if name in TRACED_NUMBERS:
        need("traces_lists")
    run, second = ALIKE[name]
    assert_parity(lambda: Net2(run), batches=((X, second), (2 * X, second)), converts=CONVERTS)


# What torch quantizes although it is no float tensor: (forward, second input, our observed values).
SAVED: dict[str, tuple[Run, Tensor, list[str]]] = {
    "expanded mask": (lambda net, x, m: net.a(x).masked_fill(m.unsqueeze(1).expand(2, 4, 4), 0.0), BOOLS, ["x", "a"]),
    "mask of masks": (lambda net, x, m: net.a(x).masked_fill(m.unsqueeze(1) & ~m.unsqueeze(2), 0.0), BOOLS, ["x", "a"]),
    "joined masks": (
        lambda net, x, m: net.a(x).masked_fill(torch.cat([m, m], 1)[:, :4].unsqueeze(1), 0.0),
        BOOLS,
        ["x", "a"],
    ),
    "mask by keyword": (lambda net, x, m: net.a(x).masked_fill(mask=m.unsqueeze(1), value=0.0), BOOLS, ["x", "a"]),
    "mask in place": (lambda net, x, m: net.a(x).masked_fill_(m.unsqueeze(1), 0.0), BOOLS, ["x", "a"]),
    "condition": (lambda net, x, m: torch.where(m.unsqueeze(1), net.a(x), net.b(x)), BOOLS, ["x", "a", "b"]),
    "condition of a method": (lambda net, x, m: net.a(x).where(m.unsqueeze(1), x), BOOLS, ["x", "a"]),
    "tokens": (lambda net, x, m: net.a(net.embed(m.view(-1))), INTEGERS, ["embed", "a"]),
    "sum of tokens": (lambda net, x, m: net.a(net.embed(m + net.positions)), INTEGERS, ["embed", "a"]),
    "gather": (lambda net, x, m: torch.gather(net.a(x), 1, m.unsqueeze(1)), INTEGERS, ["x", "a"]),
    "index": (lambda net, x, m: net.a(x)[:, m.view(-1)], INTEGERS, ["x", "a"]),
    "product with a comparison": (lambda net, x, m: net.a(x) * (m > 0)[:, None], INTEGERS, ["x", "a", "mul"]),
}
# The same, but only the example inputs can tell: nothing in the graph asks for integers.
TOLD: dict[str, tuple[Run, Tensor, list[str]]] = {
    "comparison": (lambda net, x, m: net.a(x).masked_fill(m.unsqueeze(1) == 0, 0.0), INTEGERS, ["x", "a"]),
    "additive mask": (lambda net, x, m: net.a(x) + (1 - m.unsqueeze(1)) * -2.0, INTEGERS, ["x", "a", "mul", "add"]),
    "additive mask of floats": (
        lambda net, x, m: net.a(x) + (1.0 - m.unsqueeze(1).float()) * -2.0,
        INTEGERS,
        ["x", "a", "sub", "mul", "add"],
    ),
    "product": (lambda net, x, m: net.a(x) * m.unsqueeze(1), BOOLS, ["x", "a", "mul"]),
    "sum": (lambda net, x, m: net.a(x) + m.unsqueeze(1), INTEGERS, ["x", "a", "add"]),
    "output": (lambda net, x, m: (net.a(x), m.unsqueeze(1)), BOOLS, ["x", "a"]),
    "attention": (
        lambda net, x, m: F.scaled_dot_product_attention(net.a(x), net.b(x), x, attn_mask=m.unsqueeze(1)),
        BOOLS,
        ["x", "a", "b"],
    ),
    "padding": (lambda net, x, m: net.attend(x, x, x, m.reshape(2, 4))[0], BOOLS, []),
}


def torch_fails(run: Run, second: Tensor) -> None:
    """Torch quantizes integers or booleans: its reference model cannot run."""
    options = {"backend_config": flows.torch_config("native")}
    theirs = torch_fx.prepare_fx(Net2(run), flows.global_mapping(), (X, second), **options)
    flows.calibrate(theirs, [(X, second)])
    with pytest.raises(RuntimeError, match="Quantize only works on Float Tensor"):
        torch_fx.convert_to_reference_fx(theirs, **options)(X, second)


@pytest.mark.slow
@pytest.mark.rule("OBS-10")
@pytest.mark.parametrize("name", [*SAVED, *TOLD])
def test_what_is_no_float_is_not_observed_where_torch_quantizes_it_and_fails(name: str) -> None:
    run, second, values = (SAVED | TOLD)[name]
    torch_fails(run, second)
    for has_examples in (True,) if name in TOLD else (True, False):
        found = prepared(run, second, has_examples=has_examples)
        assert slots(found) == values
        with torch.no_grad():
            reference = refimpl.convert_to_reference_fx(found)(X, second)
            torch.testing.assert_close(reference, Net2(run)(X, second), atol=0.15, rtol=0.02)


@pytest.mark.slow
@pytest.mark.rule("OBS-10")
@pytest.mark.rule("QAT-02")
def test_in_training_the_same_is_observed() -> None:
    for run, second, values in (SAVED | TOLD).values():
        model = Net2(run).train()
        found = refimpl.prepare_qat_fx(model, flows.global_mapping(), (X, second), None, flows.our_config("native"))
        assert slots(found) == values


# ---- tuples -----------------------------------------------------------------------------------------------------

TUPLES: Mapping[str, Run] = {
    "states of a cell": lambda net, x, m: torch.cat(net.cell(x[0])),
    "result of a GRU": lambda net, x, m: torch.cat(net.gru(x)),
    "result of an attention": lambda net, x, m: torch.cat(net.attend(x, x, x)),
    "a part of a result": lambda net, x, m: torch.stack(net.lstm(x)[1][:2]),
}


@pytest.mark.rule("OBS-10")
@pytest.mark.rule("OBS-09")
@pytest.mark.parametrize("name", TUPLES)
def test_a_modules_tuple_is_not_observed_where_torch_observes_it_and_fails(name: str) -> None:
    need("traces_lists")
    run = TUPLES[name]
    with pytest.raises(AttributeError, match="'tuple' object has no attribute"):
        flows.torch_flow(Net2(run), flows.global_mapping(), [(X, BOOLS)])
    for has_examples in (True, False):
        found = prepared(run, BOOLS, has_examples=has_examples)
        assert slots(found) == []
        with torch.no_grad():
            assert torch.equal(refimpl.convert_to_reference_fx(found)(X, BOOLS), Net2(run)(X, BOOLS))


class Halves(nn.Module):
    """A user's own leaf that returns a tuple: only a run tells."""

    def forward(self, x: Any) -> Any:
        return x[..., :2], x[..., 2:]


@pytest.mark.rule("OBS-10")
def test_the_tuple_of_a_users_own_leaf_is_known_of_the_run() -> None:
    need("traces_lists")
    model = Net(lambda net, x: torch.cat(net.halves(net.a(x)), -1), halves=Halves())
    custom = refimpl.PrepareCustomConfig().set_non_traceable_module_classes([Halves])
    for is_train in (False, True):
        prepare = refimpl.prepare_qat_fx if is_train else refimpl.prepare_fx
        options: dict[str, Any] = {"prepare_custom_config": custom, "backend_config": flows.our_config("native")}
        found = prepare(copy.deepcopy(model).train(is_train), flows.global_mapping(), (X,), **options)
        assert slots(found) == ["x", "a"]


# ---- the run ----------------------------------------------------------------------------------------------------


@pytest.mark.rule("OBS-10")
@pytest.mark.parametrize(
    ("run", "second", "is_needed"),
    [
        (lambda net, x, m: (net.a(x) + x).relu().reshape(2, -1), BOOLS, False),
        (lambda net, x, m: net.a(net.embed(m + 1)).view(x.size(0), -1), INTEGERS, False),
        (lambda net, x, m: net.a(x) + (1 - m.unsqueeze(1)) * -2.0, INTEGERS, False),
        (lambda net, x, m: net.a(torch.exp(m)), INTEGERS, True),
        (lambda net, x, m: net.a(m.type_as(x)), INTEGERS, True),
    ],
)
def test_the_example_inputs_are_run_only_where_tables_and_inputs_leave_a_value_open(
    run: Run, second: Tensor, is_needed: bool
) -> None:
    draft = trace(Net2(run))
    examples = Examples(draft, (X, second))
    found = find_float_tensors(draft, examples)
    assert examples.were_run == is_needed
    examples.run()
    assert find_float_tensors(draft, examples) == found, "the tables say what the run says"


@pytest.mark.rule("OBS-10")
def test_where_the_run_fails_half_way_the_tables_go_on() -> None:
    def run(net: Any, x: Any, m: Any) -> Any:
        y = net.a(x).masked_fill(m.unsqueeze(1) == 0, 0.0)
        return net.b(y.view(3, -1, 4)).masked_fill(m.bool().unsqueeze(1), 0.0)

    draft = trace(Net2(run))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        examples = Examples(draft, (X, INTEGERS))
        assert "view" in examples.failure
    assert {node.name for node in find_float_tensors(draft, examples)} == {
        "x",
        "a",
        "masked_fill",
        "view",
        "b",
        "masked_fill_1",
    }


@pytest.mark.rule("OBS-10")
def test_an_index_says_nothing_of_what_it_was_found_in() -> None:
    """Going backwards ends where indices come from floats."""

    def run(net: Any, x: Any, m: Any) -> Any:
        y = net.a(x)
        best, largest = torch.topk(y, 2), y.argmax(-1)
        return y.gather(-1, best[1]), best[0], operator.getitem(y, largest), y[: x.size(0)]

    draft = trace(Net2(run))
    names = {node.name for node in find_float_tensors(draft, Examples(draft, None))}
    assert {"x", "a", "gather", "getitem_1", "getitem_2", "getitem_3"} <= names
    assert not {"getitem", "topk", "argmax", "size"} & names
