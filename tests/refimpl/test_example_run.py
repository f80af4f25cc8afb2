"""What one run of the example inputs tells, and what follows where it ends too early (FUS-06, OBS-15)."""

from __future__ import annotations

import copy
import warnings
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.ao.quantization.quantize_fx as torch_fx
from torch import Tensor, nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import BackendPatternConfig, ModelError
from fx_quant_conformance.refimpl.fuse.fuse import fuse
from fx_quant_conformance.refimpl.graph.example_run import Examples, Seen
from fx_quant_conformance.refimpl.graph.graph_modules import Draft
from fx_quant_conformance.refimpl.graph.tracer import trace
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.fusing import config_of


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.relu = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return cast(Tensor, self.relu(self.fc(x))).flatten().masked_fill(mask.unsqueeze(0), 0.0)


X, MASK = torch.ones(2, 4), torch.zeros(8, dtype=torch.bool)
FLOAT, BOOL = torch.float32, torch.bool


def facts(draft: Draft, examples: Examples) -> dict[str, Seen]:
    found = ((node.name, examples.seen.get(node)) for node in draft.graph.nodes)
    return {name: fact for name, fact in found if isinstance(fact, Seen)}


@pytest.mark.rule("OBS-15")
@pytest.mark.parametrize("is_train", [False, True])
def test_every_tensor_has_its_rank_and_dtype_in_either_mode(is_train: bool) -> None:
    draft = trace(Masked().train(is_train))
    examples = Examples(draft, (X, MASK))
    assert facts(draft, examples) == {
        "x": Seen(2, FLOAT),
        "mask": Seen(1, BOOL),
        "fc": Seen(2, FLOAT),
        "relu": Seen(2, FLOAT),
        "flatten": Seen(1, FLOAT),
        "unsqueeze": Seen(2, BOOL),
        "masked_fill": Seen(2, FLOAT),
        "output": Seen(2, FLOAT),
    }
    assert examples.failure == ""


@pytest.mark.rule("OBS-15")
@pytest.mark.parametrize("is_train", [False, True])
def test_what_was_reached_before_the_run_ended_is_kept(is_train: bool) -> None:
    draft = trace(Masked().train(is_train))
    examples = Examples(draft, (X, None))
    with pytest.warns(UserWarning, match="example_inputs cannot be run; from there on ranks are not known: %unsqueeze"):
        examples.run()
    assert list(facts(draft, examples)) == ["x", "fc", "relu", "flatten"]
    assert examples.failure.startswith("%unsqueeze : [num_users=1] = call_method[target=unsqueeze]")
    assert "AttributeError" in examples.failure
    assert not Examples(draft, None).are_given and not Examples(draft, None).seen


@pytest.mark.rule("OBS-15")
def test_it_is_run_once_and_a_fused_module_stands_for_its_last_part() -> None:
    calls: list[int] = []
    linear = nn.Linear(4, 4)
    linear.register_forward_hook(lambda *_: calls.append(1))
    draft = trace(nn.Sequential(linear, nn.Flatten()).eval())
    examples = Examples(draft, (torch.ones(2, 3, 4),))
    last = next(node for node in draft.graph.nodes if node.target == "1")
    entry = BackendPatternConfig((nn.Linear, nn.Flatten)).set_fuser_method(lambda is_qat, *parts: nn.Sequential(*parts))
    fuse(draft, config_of(entry), is_qat=False, examples=examples)
    assert facts(draft, examples) == {"input_1": Seen(3, FLOAT), "_0": Seen(2, FLOAT), "output": Seen(2, FLOAT)}
    assert last not in examples.seen and len(calls) == 1


class Odd(NamedTuple):
    """Example inputs that torch, which never runs them, takes without a word; what ours says of them."""

    inputs: Any
    reason: str


ODD = {
    "another width": Odd(
        (torch.ones(2, 3),), r"%fc : .*call_module\[target=fc\].*: RuntimeError: (addmm: )?mat1 and mat2 shapes"
    ),
    "another dtype": Odd((torch.ones(2, 4, dtype=torch.float64),), "%fc : .*: RuntimeError: .*dtype"),
    "None inside": Odd((None,), "%fc : .*: TypeError"),
    "a dict, by name": Odd({"x": X, "y": X}, "%fc : .*: TypeError"),
    "a generator": Odd((each for each in (X,)), "before the first node: TypeError: cannot pickle 'generator' object"),
    "too many": Odd((X, X, X), r"Two takes \(x, y\), found 3 inputs"),
}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.with_norm = True

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        result = self.fc(x)
        return cast(Tensor, self.bn(result) if self.with_norm else result)


@pytest.mark.rule("OBS-15")
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_inputs_that_do_not_run_are_a_warning_with_the_reason_and_torch_takes_them(odd: Odd) -> None:
    model = Two().eval()
    model.with_norm = False
    mapping = flows.global_mapping()
    with pytest.warns(UserWarning, match=f"example_inputs cannot be run; .* {odd.reason}") as told:
        ours = refimpl.prepare_fx(model, mapping, odd.inputs)
    assert {warning.filename for warning in told} == {__file__}
    theirs = torch_fx.prepare_fx(copy.deepcopy(model), mapping, odd.inputs)
    assert flows.same(ours(X), theirs(X))


@pytest.mark.rule("FUS-06")
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_where_fusing_needs_the_rank_that_they_do_not_tell_it_is_an_error_in_eval_mode(odd: Odd) -> None:
    with (
        pytest.warns(UserWarning, match="example_inputs cannot be run"),
        pytest.raises(ModelError, match=rf"nn.Linear\+nn.BatchNorm1d at fc: the rank .*: {odd.reason}.* or None"),
    ):
        refimpl.prepare_fx(Two().eval(), flows.global_mapping(), odd.inputs)
    theirs = torch_fx.prepare_fx(Two().eval(), flows.global_mapping(), odd.inputs)
    assert not any("BatchNorm1d" in type(module).__name__ for module in theirs.modules()), "torch folds it unseen"


@pytest.mark.rule("FUS-06")
@pytest.mark.parametrize("what", ["None inside", "a dict, by name", "too many"])
def test_in_training_linear_and_batch_norm_of_an_unknown_rank_stay_two_with_a_warning(what: str) -> None:
    with pytest.warns(UserWarning, match=f"example_inputs cannot be run; .*{ODD[what].reason}"):
        found = refimpl.prepare_qat_fx(Two().train(), flows.global_mapping(), ODD[what].inputs)
    assert "of an output of rank unknown" in found.meta["not_fused"][0]


@pytest.mark.rule("FUS-06")
def test_a_rank_that_was_seen_before_the_run_ended_will_do() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(3, 2)).eval()
    with pytest.warns(UserWarning, match=r"%_2 : .*target=2.*\(2x4 and 3x2\)"):
        found = refimpl.prepare_fx(model, flows.global_mapping(), (X,))
    assert found.meta["fusions"] == ("nn.Linear+nn.BatchNorm1d at _0",)


@pytest.mark.rule("OBS-15")
def test_a_default_may_be_left_out_and_a_tensor_with_a_history_is_copied() -> None:
    history = nn.Linear(4, 4)(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for inputs in ((X,), [X, X], X, None, (), history, (history, {"more": [history]})):
            assert refimpl.prepare_fx(Two().eval(), flows.global_mapping(), inputs).meta["fusions"]


@pytest.mark.rule("STD-01")
@pytest.mark.parametrize("inputs", [torch.ones(2, 3), {"x": X}, 3], ids=["tensor", "dict", "int"])
def test_a_standalone_modules_example_inputs_may_be_anything_too(inputs: Any) -> None:
    custom = refimpl.PrepareCustomConfig().set_standalone_module_name("0", None, inputs, None, None)
    with pytest.warns(UserWarning, match="example_inputs cannot be run"):
        found = refimpl.prepare_fx(nn.Sequential(nn.Linear(4, 4)).eval(), flows.global_mapping(), (X,), custom)
    assert found(X).shape == X.shape
