"""find_changes in QAT: the constants and folds that it names are those that torchao changes."""

# ruff: noqa: E402
from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.support.torchao import require_torchao

require_torchao()

from torchao.quantization.pt2e import disable_observer, move_exported_model_to_eval, move_exported_model_to_train
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer import ComposableQuantizer
from torchao.testing.pt2e._xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config

from fx_quant_conformance import refimpl
from fx_quant_conformance.conformance.pt2e.remembered import remember_patterns
from fx_quant_conformance.refimpl.exported.pt2e import BackendConfigQuantizer
from fx_quant_conformance.refimpl.exported.pt2e_changes import ChangeKind, find_changes
from tests.refimpl.support.folded import REFUSED, Model, conv, export, integers, norm, settle
from tests.refimpl.test_pt2e_changes import Head


@pytest.fixture(scope="module")
def patterns() -> Iterator[None]:
    """Let torchao export its patterns once."""
    with remember_patterns():
        yield


def train(model: nn.Module) -> nn.Module:
    """Put a model in train mode, apart from batch norms and dropouts that are frozen."""
    model.train()
    for part in model.modules():
        part.train(not getattr(part, "is_frozen", False))
    return model


def frozen(part: nn.Module) -> nn.Module:
    part.is_frozen = True  # type: ignore[assignment]
    return part


MODES: dict[str, tuple[nn.Module, list[ChangeKind]]] = {
    "norm": (norm(eps=1e-5), []),
    "eps": (norm(eps=1e-3), [ChangeKind.SWITCHED_TO_DEFAULTS]),
    "momentum": (norm(eps=1e-5, momentum=0.03), [ChangeKind.SWITCHED_TO_DEFAULTS]),
    "frozen norm": (frozen(norm(eps=1e-5)), [ChangeKind.SWITCHED_TO_DEFAULTS]),
    "dropout": (nn.Dropout(0.5), []),
    "p": (nn.Dropout(0.1), [ChangeKind.SWITCHED_TO_DEFAULTS]),
    "p of 0": (nn.Dropout(0.0), [ChangeKind.SWITCHED_TO_DEFAULTS]),
    "p, in place": (nn.Dropout(0.1, inplace=True), [ChangeKind.SWITCHED_TO_DEFAULTS]),
    "frozen dropout": (frozen(nn.Dropout(0.5)), [ChangeKind.SWITCHED_TO_DEFAULTS]),
    "channels": (nn.Dropout2d(0.5), [ChangeKind.LEFT_IN_TRAINING]),
    "frozen channels": (frozen(nn.Dropout2d(0.5)), []),
    "alpha": (nn.AlphaDropout(0.5), [ChangeKind.LEFT_IN_TRAINING]),
    "alpha of channels": (nn.FeatureAlphaDropout(0.5), [ChangeKind.LEFT_IN_TRAINING]),
    "rrelu": (nn.RReLU(), [ChangeKind.LEFT_IN_TRAINING]),
    "attention": (
        Model(lambda m, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1 if m.training else 0.0)),
        [ChangeKind.LEFT_IN_TRAINING],
    ),
    "attention without": (Model(lambda m, x: F.scaled_dot_product_attention(x, x, x)), []),
    "lstm": (
        Model(lambda m, x: m.cells(x[:, 0])[0], cells=nn.LSTM(4, 3, 2, dropout=0.2)),
        [ChangeKind.LEFT_IN_TRAINING],
    ),
    "lstm without": (Model(lambda m, x: m.cells(x[:, 0])[0], cells=nn.LSTM(4, 3, 2)), []),
}
"""A module, and what is named of it in QAT."""


def describe_constants(program: Any) -> list[tuple[Any, ...]]:
    """Return each op that is read, with its numbers: torchao removes the others."""
    return [
        (str(node.target), *(value for value in node.args if isinstance(value, (int, float))))
        for node in program.graph.nodes
        if node.op == "call_function" and node.users
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("patterns")
@pytest.mark.parametrize("name", MODES)
def test_eval_and_train_change_the_constants_that_are_named(name: str) -> None:
    model, kinds = MODES[name]
    program = export(train(model), (torch.randn(2, 2, 4, 4),))
    assert [change.kind for change in find_changes(program, is_qat=True)] == kinds
    assert find_changes(program) == ()
    before = describe_constants(program)
    there = describe_constants(move_exported_model_to_eval(program))
    back = describe_constants(move_exported_model_to_train(program))
    assert (back != before) == (ChangeKind.SWITCHED_TO_DEFAULTS in kinds)
    if kinds == [ChangeKind.LEFT_IN_TRAINING]:
        assert there == before


@pytest.mark.slow
def test_a_norm_without_statistics_cannot_be_in_eval_mode() -> None:
    model, x = nn.Sequential(nn.ReLU(), norm(eps=1e-5, track_running_stats=False)).train(), torch.randn(2, 2, 4, 4)
    program = export(model, (x,))
    (change,) = find_changes(program, is_qat=True)
    assert change.kind is ChangeKind.SWITCHED_TO_DEFAULTS and "without running statistics" in change.reason
    with pytest.raises(RuntimeError, match="running_mean"):
        move_exported_model_to_eval(program)(x)


@pytest.mark.slow
@pytest.mark.usefixtures("patterns")
@pytest.mark.parametrize(
    "part", [norm(eps=1e-3), norm(eps=1e-5, momentum=0.03), frozen(norm(eps=1e-5)), norm(eps=1e-5)]
)
def test_prepare_qat_changes_the_constants_that_are_named(part: nn.Module) -> None:
    program = export(train(nn.Sequential(nn.Conv2d(2, 2, 1), part)), (torch.randn(2, 2, 4, 4),))
    kinds = [change.kind for change in find_changes(program, is_qat=True)]
    before = [each for each in describe_constants(program) if "batch_norm" in each[0]]
    prepared = prepare_qat_pt2e(program, ComposableQuantizer([]))
    changed = before != [each for each in describe_constants(prepared) if "batch_norm" in each[0]]
    assert kinds == [ChangeKind.TRAINED_WITH_DEFAULTS] * changed


@pytest.mark.parametrize("name", ["a buffer", "a weight that is computed", "no statistics", "transposed, in groups"])
def test_what_torchao_cannot_train_is_named(name: str) -> None:
    model, inputs = REFUSED[name].build()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.eps = 1e-5
    (change,) = find_changes(export(model.train(), inputs), is_qat=True)
    assert change.kind is ChangeKind.RAISES


def test_a_norm_without_weights_can_be_folded_and_not_trained() -> None:
    model, x = nn.Sequential(nn.Conv2d(2, 2, 1), norm(affine=False, eps=1e-5)).train(), torch.randn(2, 2, 4, 4)
    program = export(model, (x,))
    (change,) = find_changes(program, is_qat=True)
    assert change.kind is ChangeKind.RAISES and "the norm has no weight and no bias" in change.reason
    with pytest.raises(RuntimeError):
        prepare_qat_pt2e(program, ComposableQuantizer([]))(x)


# -- convert_pt2e, after training ----------------------------------------------------------------------------------

TRAINED: dict[str, tuple[Callable[[Any, Tensor], Any], list[ChangeKind]]] = {
    "alone": (lambda m, x: m.norm(m.conv(x)), []),
    "residual": (lambda m, x: m.norm(y := m.conv(x)) + y, []),  # torchao does not make such a layer trainable
    "a norm of a norm": (lambda m, x: m.other(m.norm(m.conv(x))), []),
    "a copy between": (lambda m, x: (m.norm(m.conv(x).clone()), m.other(m.conv(x * 2).clone())), []),
    "a norm for each level": (lambda m, x: (m.norm(m.conv(x)), m.other(m.conv(x * 2))), [ChangeKind.TENSOR_READ] * 2),
    "called without the norm": (lambda m, x: (m.norm(m.conv(x)), m.conv(x * 2)), [ChangeKind.TENSOR_READ]),
    "a regulariser": (lambda m, x: (m.norm(m.conv(x)), m.conv.weight.square()), [ChangeKind.TENSOR_READ]),
}
"""Functions of a model as in ``of``, and what is named of them in QAT."""


@pytest.mark.slow
@pytest.mark.usefixtures("patterns")
@pytest.mark.parametrize("name", TRAINED)
def test_convert_changes_what_is_named_of_a_trained_program(name: str) -> None:
    """Against the trained program in eval mode, which rounds as the converted one does.

    The order of operations may move each weight by a step and the output by one more: 18 products of an input of up to
    ``2 · max |x|`` with a step of the largest weight, and a step of the output.
    """
    call, kinds = TRAINED[name]
    layer, norms, x = conv(), [norm(eps=1e-5), norm(eps=1e-5)], integers(8, 2, 6, 6).float()
    model = settle(Model(call, conv=layer, norm=norms[0], other=norms[1])).float().train()
    for momentum in (1.0, 0.1):  # after the first call the running statistics are the batch's
        norms[0].momentum = norms[1].momentum = momentum
        model(x)
    program = export(model, (x,))
    assert [change.kind for change in find_changes(program, is_qat=True)] == kinds
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_qat=True))
    prepared = prepare_qat_pt2e(program, quantizer)
    prepared(x)
    for node in prepared.graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default):
        node.update_arg(5, False)  # as in docs/pt2e.md
    prepared.recompile()
    prepared.apply(disable_observer)
    with torch.no_grad():
        right, found = tree_leaves(prepared(x)), tree_leaves(convert_pt2e(prepared)(x))
        factors = [(part.weight / (_tensor(part.running_var) + part.eps).sqrt()).abs().max() for part in norms]
    step = float(layer.weight.abs().max()) * float(max(factors)) / 127
    bounds = [18 * 2 * float(x.abs().max()) * step + float(value.max() - value.min()) / 255 for value in right]
    errors = [float((each - value).abs().max()) for each, value in zip(found, right, strict=True)]
    assert all(error <= bound for error, bound in zip(errors, bounds, strict=True)) == (not kinds), (errors, bounds)


def _tensor(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


@pytest.mark.slow
@pytest.mark.usefixtures("patterns")
@pytest.mark.parametrize("is_apart", [False, True])
def test_a_head_gives_the_bits_of_fx_where_nothing_is_named(is_apart: bool) -> None:
    torch.manual_seed(0)
    model, x = Head(is_apart).train(), torch.randn(2, 3, 8, 8)
    model(x)  # the levels have other statistics
    model.eval()
    program, mapping = export(model, (x,)), refimpl.get_default_qconfig_mapping("x86")
    kinds = [change.kind for change in find_changes(program)]
    assert kinds == ([] if is_apart else [ChangeKind.NORM_DROPPED])
    prepared = prepare_pt2e(program, BackendConfigQuantizer(None, mapping))
    traced = refimpl.prepare_fx(model, mapping, (x,))
    with torch.no_grad():
        prepared(x), traced(x)
        found, right = convert_pt2e(prepared)(x), refimpl.convert_to_reference_decomposed_fx(traced)(x)
    assert all(map(torch.equal, found, right)) == is_apart


class OneWeight(nn.Module):
    """Two layers of one weight, or one layer that is called twice; a batch norm behind the first call."""

    def __init__(self, is_one_layer: bool) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Conv2d(1, 2, 3), nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)
        self.second.weight, self.is_one_layer = self.first.weight, is_one_layer

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.first(x)), (self.first if self.is_one_layer else self.second)(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5)), ""),
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, eps=1e-3)),
            "at 1 of its nodes: batch_norm .*eps 0.001 to",
        ),
        (nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.2)), "at 2 of its nodes; .* lists all: dropout .*p 0.1 to 0.5"),
        (OneWeight(is_one_layer=False), "it writes .*weight, read by conv2d_1"),
        (OneWeight(is_one_layer=True), ""),  # a layer that is called twice is not fused, and so not folded
    ],
)
def test_in_qat_the_quantizer_warns_of_what_torchao_is_going_to_change(model: nn.Module, said: str) -> None:
    program = torch.export.export(model.train(), (torch.randn(3, 1, 5, 5),)).module()
    mapping = refimpl.get_default_qat_qconfig_mapping("x86")
    quantizer = BackendConfigQuantizer(refimpl.default_backend_config(), mapping, is_qat=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        prepare_qat_pt2e(program, quantizer)
    found = [warning for warning in caught if "torchao changes what the program computes" in str(warning.message)]
    assert len(found) == bool(said)
    for warning in found:
        assert re.search(said, str(warning.message)) and warning.filename == __file__
