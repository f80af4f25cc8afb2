"""find_changes: what it names, torchao changes; what it does not name stays."""

# ruff: noqa: E402
from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.utils._pytree import tree_leaves
from torch.utils._traceback import CapturedTraceback

from tests.support.torchao import require_torchao

require_torchao()

from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer import ComposableQuantizer

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl.exported.pt2e import BackendConfigQuantizer
from fx_quant_conformance.refimpl.exported.pt2e_changes import ChangeKind, find_changes
from tests.refimpl.support.folded import REFUSED, RIGHT, WRONG, conv, export, integers, norm, of, settle

X86 = refimpl.get_default_qconfig_mapping("x86")


def prepare(program: Any) -> Any:
    """Prepare a program with a Quantizer that annotates nothing."""
    with torch.no_grad():
        return prepare_pt2e(program, ComposableQuantizer([]))


def is_same(model: nn.Module, program: Any, inputs: tuple[Tensor, ...]) -> bool:
    pairs = zip(tree_leaves(model(*inputs)), tree_leaves(program(*inputs)), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


# -- prepare_pt2e --------------------------------------------------------------------------------------------------


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a norm of a norm", "residual"])
def test_functional_programs_and_those_of_strict_export_are_read_as_well(name: str) -> None:
    case = (RIGHT | WRONG)[name]
    model, inputs = case.build()
    functional = torch.export.export(model, inputs).run_decompositions({}).module()
    assert any("native_batch_norm" in str(node.target) for node in functional.graph.nodes)
    for program in (functional, export(model, inputs, strict=True)):
        assert tuple(change.kind for change in find_changes(program)) == case.kinds
        assert is_same(model, prepare(program), inputs) == (not case.kinds)


@pytest.mark.slow
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
@pytest.mark.parametrize("chunk", range(3))
def test_in_drawn_models_just_those_are_named_that_torchao_changes(chunk: int) -> None:
    found = []
    for seed in range(20 * chunk, 20 * (chunk + 1)):
        model, inputs = settle(Drawn(seed)), (integers(1, 2, 3, 3),)
        program = export(model, inputs)
        is_named = bool(find_changes(program))
        assert is_same(model, prepare(program), inputs) == (not is_named), f"seed {seed}"
        found.append(is_named)
    assert found.count(True) >= 4 <= found.count(False)


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


OF_KINDS = {kind: case for case in (*WRONG.values(), *REFUSED.values()) for kind in case.kinds}


@pytest.mark.parametrize("kind", OF_KINDS)
def test_a_copy_helps_against_every_kind(kind: ChangeKind) -> None:
    model, inputs = OF_KINDS[kind].build()
    program = export(model, inputs)
    while changes := find_changes(program):  # as in docs/pt2e.md
        (norm,) = (node for node in program.graph.nodes if node.name == changes[0].node)
        with program.graph.inserting_before(norm):
            copy = program.graph.call_function(torch.ops.aten.clone.default, (norm.args[0],))
        norm.update_arg(0, copy)
    program.recompile()
    assert is_same(model, prepare(program), inputs)


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
