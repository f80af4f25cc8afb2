"""find_changes: what it names, torchao changes; what it does not name stays."""

# ruff: noqa: E402
from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.utils._pytree import tree_leaves
from torch.utils._traceback import CapturedTraceback

from tests.support.torchao import require_torchao

require_torchao()

from torchao.quantization.pt2e import disable_observer, move_exported_model_to_eval, move_exported_model_to_train
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer import ComposableQuantizer
from torchao.testing.pt2e._xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config

import refimpl
from conformance.annotations.remembered import remember_patterns
from refimpl.pt2e import BackendConfigQuantizer
from refimpl.pt2e_changes import ChangeKind, find_changes
from tests.refimpl.support import zoo
from tests.refimpl.support.folded import REFUSED, RIGHT, WRONG, Model, conv, integers, norm, of, settle

X86 = refimpl.get_default_qconfig_mapping("x86")


def export(model: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> Any:
    return torch.export.export(model, inputs, **options).module()


def prepare(program: Any) -> Any:
    """Prepare a program with a Quantizer that annotates nothing."""
    with torch.no_grad():
        return prepare_pt2e(program, ComposableQuantizer([]))


@pytest.fixture(scope="module")
def patterns() -> Iterator[None]:
    """Let torchao export its patterns once."""
    with remember_patterns():
        yield


def is_same(model: nn.Module, program: Any, inputs: tuple[Tensor, ...]) -> bool:
    pairs = zip(tree_leaves(model(*inputs)), tree_leaves(program(*inputs)), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


# -- prepare_pt2e --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_torchao_changes_what_is_named_and_nothing_else(name: str) -> None:
    case = (RIGHT | WRONG)[name]
    model, inputs = case.build()
    program = export(model, inputs)
    changes = find_changes(program)
    assert tuple(change.kind for change in changes) == case.kinds
    assert is_same(model, program, inputs), "the check leaves the program alone"
    assert is_same(model, prepare(program), inputs) == (not case.kinds)


@pytest.mark.parametrize("name", REFUSED)
def test_what_torchao_cannot_fold_is_named_before_it_raises(name: str) -> None:
    model, inputs = REFUSED[name].build()
    program = export(model, inputs)
    (change,) = find_changes(program)
    assert change.kind is ChangeKind.RAISES
    with pytest.raises((KeyError, RuntimeError, TypeError, ValueError)):
        prepare(program)


@pytest.mark.parametrize("name", ["a norm of a norm", "residual", "alone"])
def test_functional_programs_and_those_of_strict_export_are_read_as_well(name: str) -> None:
    case = (RIGHT | WRONG)[name]
    model, inputs = case.build()
    functional = torch.export.export(model, inputs).run_decompositions({}).module()
    assert any("native_batch_norm" in str(node.target) for node in functional.graph.nodes)
    for program in (functional, export(model, inputs, strict=True)):
        assert tuple(change.kind for change in find_changes(program)) == case.kinds
        assert is_same(model, prepare(program), inputs) == (not case.kinds)


def test_in_a_program_that_is_decomposed_nothing_is_folded() -> None:
    model, inputs = WRONG["residual"].build()
    program = torch.export.export(model, inputs).run_decompositions().module()
    assert find_changes(program) == () and is_same(model, prepare(program), inputs)


class Drawn(nn.Module):
    """Layers, batch norms and sums drawn at random, so that results, weights and norms have several readers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        layers = [conv(), conv(bias=False), conv()]
        layers[2].weight = layers[0].weight
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList([norm(), norm()])
        self.seed = seed

    def forward(self, x: Tensor) -> Any:
        draw = random.Random(self.seed)
        values = [x]
        for _ in range(6):
            value = values[-1] if draw.random() < 0.7 else draw.choice(values)
            match draw.choice(["layer", "layer", "norm", "norm", "norm", "add", "weight"]):
                case "layer":
                    values.append(draw.choice(list(self.layers))(value))
                case "norm":
                    values.append(draw.choice(list(self.norms))(value))
                case "add":
                    values.append(value + draw.choice(values))
                case "weight":
                    weight: Any = draw.choice(list(self.layers)).weight
                    values.append(value + weight.sum())
        return values[-1], draw.choice(values)


@pytest.mark.slow
def test_in_drawn_models_just_those_are_named_that_torchao_changes() -> None:
    found = []
    for seed in range(60):
        model, inputs = settle(Drawn(seed)), (integers(1, 2, 3, 3),)
        program = export(model, inputs)
        is_named = bool(find_changes(program))
        assert is_same(model, prepare(program), inputs) == (not is_named), f"seed {seed}"
        found.append(is_named)
    assert found.count(True) >= 10 <= found.count(False)


@pytest.mark.slow
@pytest.mark.parametrize("entry", [*zoo.BASIC, *zoo.VISION], ids=lambda entry: entry.name)
def test_in_networks_as_they_are_published_nothing_is_named(entry: zoo.Entry) -> None:
    model, batches = zoo.build(entry)
    assert find_changes(export(model, batches[0])) == ()


class Head(nn.Module):
    """A layer for all levels of a pyramid with a batch norm for each, as detectors have; ``is_apart``: with a copy."""

    def __init__(self, is_apart: bool) -> None:
        super().__init__()
        self.stem, self.layer, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 2, 1)
        self.norms, self.is_apart = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)]), is_apart

    def forward(self, x: Tensor) -> Any:
        levels = (x := self.stem(x), x[..., ::2, ::2])
        values = (self.layer(level) for level in levels)
        values = (value.clone() if self.is_apart else value for value in values)
        return tuple(self.last(norm(value).relu()) for norm, value in zip(self.norms, values, strict=True))


@pytest.mark.slow
@pytest.mark.usefixtures("patterns")
@pytest.mark.parametrize("engine", ["x86", "qnnpack"])
@pytest.mark.parametrize("is_apart", [False, True])
def test_a_head_gives_the_bits_of_fx_where_nothing_is_named(is_apart: bool, engine: str) -> None:
    torch.manual_seed(0)
    model, x = Head(is_apart).train(), torch.randn(2, 3, 8, 8)
    model(x)  # the levels have other statistics
    model.eval()
    mapping = refimpl.get_default_qconfig_mapping(engine)
    program = export(model, (x,))
    kinds = [change.kind for change in find_changes(program)]
    assert kinds == ([] if is_apart else [ChangeKind.NORM_DROPPED])
    prepared, traced = (
        prepare_pt2e(program, BackendConfigQuantizer(None, mapping)),
        refimpl.prepare_fx(model, mapping, (x,)),
    )
    prepared(x), traced(x)
    found, right = convert_pt2e(prepared)(x), refimpl.convert_to_reference_decomposed_fx(traced)(x)
    assert all(map(torch.equal, found, right)) == is_apart


# -- what is said --------------------------------------------------------------------------------------------------


def test_a_change_says_who_reads_what_at_which_line_and_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.fx.proxy, "CapturedTraceback", CapturedTraceback
    )  # conftest.py makes export note no lines
    program = export(Head(is_apart=False).eval(), (torch.randn(2, 3, 8, 8),))
    (change,) = find_changes(program)
    assert (change.node, change.layer) == ("batch_norm_1", "conv2d_3")
    file, number, code = change.line.split(":", 2)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert (file, code.strip()) == (__file__, lines[int(number) - 1].strip()) and "zip(self.norms" in code
    expected = (
        "batch_norm_1 (norms.1), folded into conv2d_3 (layer): left out, as batch_norm (norms.0) is folded into the "
        "same weight first. Instead: write norm(layer(x).clone()), as a batch norm that reads a copy is not folded"
    )
    assert str(change) == f"{expected} ({change.line})"


def test_many_readers_are_counted() -> None:
    model, inputs = of(lambda m, x: [m.norm(y := m.conv(x)), y + 1, y + 2, y + 3, y + 4]).build()
    (change,) = find_changes(export(model, inputs))
    assert "its result is read by add, add_1, add_2 and 1 more as well" in change.reason


def test_other_programs_are_refused() -> None:
    model, inputs = WRONG["residual"].build()
    exported = torch.export.export(model, inputs)
    with pytest.raises(refimpl.ModelError, match=r"ExportedProgram is no graph module: .*\.module\(\)"):
        find_changes(exported)  # type: ignore[arg-type]
    with pytest.raises(refimpl.ModelError, match=r"no exported program: _0 calls 0"):
        find_changes(symbolic_trace(nn.Sequential(nn.Linear(2, 2))))
    prepared = prepare_pt2e(exported.module(), BackendConfigQuantizer(None, X86))
    with pytest.raises(refimpl.ModelError, match="no exported program"):
        find_changes(prepared)


@pytest.mark.slow
def test_the_check_needs_no_torchao() -> None:
    code = (
        "import sys; sys.modules['torchao'] = None\n"
        "import torch\nfrom torch import nn\nfrom refimpl.pt2e_changes import find_changes\n"
        "model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.BatchNorm2d(1)).eval()\n"
        "print(find_changes(torch.export.export(model, (torch.ones(1, 1, 2, 2),)).module())[0].kind)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert run.stdout.strip() == "ChangeKind.NORM_DROPPED", run.stderr


# -- training ------------------------------------------------------------------------------------------------------


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
        Model(lambda m, x: m.cells(x[:, 0])[0], cells=nn.LSTM(4, 3, 2, dropout=0.2)), [ChangeKind.LEFT_IN_TRAINING],
    ),
    "lstm without": (Model(lambda m, x: m.cells(x[:, 0])[0], cells=nn.LSTM(4, 3, 2)), []),
}  # fmt: skip
"""A module, and what is named of it in QAT."""


def spell_constants(program: Any) -> list[tuple[Any, ...]]:
    """Return each op that is read, with its numbers: torchao removes the others."""
    return [
        (str(node.target), *(value for value in node.args if isinstance(value, (int, float))))
        for node in program.graph.nodes
        if node.op == "call_function" and node.users
    ]


@pytest.mark.parametrize("name", MODES)
def test_eval_and_train_change_the_constants_that_are_named(name: str) -> None:
    model, kinds = MODES[name]
    program = export(train(model), (torch.randn(2, 2, 4, 4),))
    assert [change.kind for change in find_changes(program, is_qat=True)] == kinds
    assert find_changes(program) == ()
    before = spell_constants(program)
    there = spell_constants(move_exported_model_to_eval(program))
    back = spell_constants(move_exported_model_to_train(program))
    assert (back != before) == (ChangeKind.SWITCHED_TO_DEFAULTS in kinds)
    if kinds == [ChangeKind.LEFT_IN_TRAINING]:
        assert there == before


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
    before = [each for each in spell_constants(program) if "batch_norm" in each[0]]
    prepared = prepare_qat_pt2e(program, ComposableQuantizer([]))
    changed = before != [each for each in spell_constants(prepared) if "batch_norm" in each[0]]
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
