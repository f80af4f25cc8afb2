"""Reference models as exported programs, as ONNX, and on ONNX Runtime: what is computed, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    PlaceholderObserver,
    default_observer,
    default_per_channel_weight_observer,
    default_weight_observer,
)
from torch.fx import symbolic_trace
from torch.nn import functional as F

from fx_quant_conformance.backends.discovery import find_backend
from fx_quant_conformance.backends.exporting import owner_of
from fx_quant_conformance.backends.lowering import lower_reference
from fx_quant_conformance.refimpl import QConfig, QConfigMapping, export_reference
from fx_quant_conformance.refimpl.exported.exported import hold_weights
from fx_quant_conformance.refimpl.observers.decomposed import OPS
from fx_quant_conformance.refimpl.observers.default_qconfigs import get_default_qconfig_mapping
from tests.runtimes.references import PER_TENSOR, Flat, image, reference_of

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
_onnx = pytest.importorskip("fx_quant_conformance.backends._onnx")
_fx_passes = pytest.importorskip("torch.onnx._internal.exporter._fx_passes")


def dynamic(**observer: Any) -> QConfigMapping:
    activation = PlaceholderObserver.with_args(dtype=torch.quint8, is_dynamic=True, **observer)
    return QConfigMapping().set_global(QConfig(activation, PER_TENSOR))


def static(weight: Any) -> QConfigMapping:
    return QConfigMapping().set_global(QConfig(default_observer, weight))


class FunctionalLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 30).reshape(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class Sum(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


# -- folding and exporting --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU()), FunctionalLinear))
@pytest.mark.parametrize("weight", (default_weight_observer, default_per_channel_weight_observer))
def test_weights_are_folded_to_the_integers_of_the_reference_model(make: Callable[[], nn.Module], weight: Any) -> None:
    x = image(4, 6)
    reference = reference_of(make(), x, mapping=static(weight))
    before = [node.name for node in reference.graph.nodes]
    model = hold_weights(reference)
    integers = [value for name, value in model.named_buffers() if name.endswith("integers")]
    assert [each.dtype for each in integers] == [torch.int8] and int(integers[0].long().abs().max()) >= 127
    assert torch.equal(model(x), reference(x)), "they mean what the float weight meant"
    assert [node.name for node in reference.graph.nodes] == before, "the model that is given is not changed"
    written = [node.target for node in export_reference(reference, (x,)).graph.nodes]
    assert OPS.quantize_per_channel.default not in written
    assert written.count(OPS.quantize_per_tensor.default) == 2, "of input and output alone"


class Moved(nn.Module):
    """What there is to decompose: a word for the padding, an op in place, a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv1d(3, 4, 3, padding="same"), nn.BatchNorm1d(4), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.relu(self.conv(x)))
        return found.transpose(1, 2).reshape(-1, 4)


def normed() -> nn.Module:
    """A batch norm alone to decompose: it may be a view, says torch."""
    return nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3))


class Counted(nn.Module):
    """A sum of floats and integers, which needs a cast, and one of floats, which needs none."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.arange(6))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.steps) + x


@pytest.mark.slow
@pytest.mark.parametrize(("make", "casts"), ((Counted, 1), (Sum, 0)))
def test_the_search_for_casts_is_spared_only_where_torch_finds_none(
    make: Callable[[], nn.Module], casts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = (image(2, 6),) if casts else (image(2, 6), image(2, 6))
    searched, insert_nodes = list[Any](), _fx_passes.insert_type_promotion_nodes

    def insert(model: Any) -> None:
        searched.append(model)
        insert_nodes(model)

    def kinds() -> list[str]:
        written = _onnx.onnx_bytes(export_reference(symbolic_trace(make()), inputs))
        return [node.op_type for node in onnx.load_from_string(written).graph.node]

    monkeypatch.setattr(_onnx, "_PROMOTE", insert)
    spared = kinds()
    assert len(searched) == casts
    monkeypatch.setattr(_onnx, "_promote", insert)
    assert kinds() == spared and len(searched) == casts + 1


@pytest.mark.slow
@pytest.mark.parametrize("make", (normed, Moved))
def test_what_is_spared_in_decomposing_leaves_the_program_as_it_is(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = image(2, 3, 8)
    reference = reference_of(make(), x, mapping=static(default_per_channel_weight_observer))

    def nodes() -> list[tuple[Any, ...]]:
        found = onnx.load_from_string(_onnx.onnx_bytes(export_reference(reference, (x,)))).graph
        return [(each.op_type, tuple(each.input), tuple(each.output)) for each in found.node]

    spared = nodes()
    assert "BatchNormalization" in {kind for kind, *_ in spared}
    monkeypatch.setattr(_onnx, "_decompose", _fx_passes.decompose_with_registry)
    assert nodes() == spared


@pytest.mark.slow
def test_the_batch_of_a_program_is_dynamic_though_the_example_has_one_row() -> None:
    backend = find_backend("onnxruntime")
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    reference = reference_of(layers, image(1, 3, 4, 4))
    lowered = lower_reference(backend, reference, (image(1, 3, 4, 4),))
    for rows in (0, 1, 5):
        x = image(rows, 3, 4, 4)
        assert torch.allclose(lowered(x), reference(x), atol=1e-6) and len(lowered(x)) == rows


def test_what_is_broadcast_has_no_dynamic_batch() -> None:
    x, y = image(4, 1, 9), image(1, 3, 1)
    reference = reference_of(Sum(), x, y)
    lowered = lower_reference(find_backend("onnxruntime"), reference, (x, y))
    assert float((lowered(x, y) - reference(x, y)).abs().max()) < 0.016, "a step at most: some sums are near a tie"


# -- translations -----------------------------------------------------------------------------------------------------


@pytest.mark.rule("CVT-09")
def test_ends_that_are_narrower_than_the_dtype_are_kept() -> None:
    x = image(1, 64)
    reference = reference_of(Sum(), x, x, mapping=get_default_qconfig_mapping("x86"))  # 0…127
    lowered = lower_reference(find_backend("onnxruntime"), reference, (x, x))
    assert torch.equal(lowered(x * 4, x * 4), reference(x * 4, x * 4))


@pytest.mark.slow
@pytest.mark.rule("CVT-03")
@pytest.mark.parametrize("make", (lambda: nn.Linear(6, 5), lambda: nn.Linear(6, 5, bias=False), FunctionalLinear))
@pytest.mark.parametrize("runtime", ("onnxruntime", "onnx-reference"))
def test_dynamic_linear_runs_on_integers_with_the_qparams_of_the_reference(
    make: Callable[[], nn.Module], runtime: str
) -> None:
    """On usual inputs, on some whose scale would be below the smallest, and on zeros."""
    backend, x = find_backend(runtime), image(3, 6) + 0.25
    reference = reference_of(nn.Sequential(make()), x, mapping=dynamic())
    lowered = lower_reference(backend, reference, (x,))
    for size in (1.0, 1e-6, 0.0):
        assert torch.allclose(lowered(x * size), reference(x * size), rtol=1e-5, atol=1e-6 * size)
    execution = backend.execution(lowered)
    assert execution is not None and not execution.float_fallbacks
    assert any("MatMulInteger" in each for each in execution.quantized_ops)


def test_dynamic_ends_that_the_operator_does_not_have_are_refused() -> None:
    x = image(3, 6)
    reference = reference_of(nn.Sequential(nn.Linear(6, 5)), x, mapping=dynamic(quant_min=0, quant_max=127))
    with pytest.raises(Exception, match=r"quantizes to 0\.\.255, not to 0\.\.127"):
        lower_reference(find_backend("onnxruntime"), reference, (x,))


class Narrowed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.narrow(x, 1, -3, 3)


def test_views_are_decomposed_as_the_exporter_does() -> None:
    """It has a translation of narrow, does not use it, and is right: the translation ends before it starts."""
    x = image(2, 5)
    reference = reference_of(Narrowed(), x)
    assert torch.equal(lower_reference(find_backend("onnxruntime"), reference, (x,))(x), reference(x))


# -- evidence ---------------------------------------------------------------------------------------------------------


@pytest.mark.rule("LOW-04")
def test_what_runs_in_float_is_named_after_the_reference_model() -> None:
    backend, x = find_backend("onnxruntime"), image(2, 3, 6, 6)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3))
    reference = reference_of(model, x)
    execution = backend.execution(lower_reference(backend, reference, (x,)))
    assert execution is not None and execution.kernels == ()
    first, tanh, last = (node.name for node in reference.graph.nodes if node.op == "call_module")
    assert {f"{first} (QLinearConv)", f"{last} (QLinearConv)"} <= {*execution.quantized_ops}
    assert execution.float_fallbacks == (f"{tanh} (Tanh)",)


class Composed(nn.Module):
    """What torch.export calls otherwise, or the exporter makes of other ops."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(torch.narrow(x, 1, 0, 4), inplace=True)
        x = torch.flatten(x.unsqueeze_(1), 1)
        return x.reshape(-1, 2, 2) + 1.0


@pytest.mark.rule("LOW-04")
def test_functions_that_are_decomposed_keep_the_names_of_the_reference_model() -> None:
    x = image(4, 9)
    reference = reference_of(Composed(), x)
    calls = [node for node in reference.graph.nodes if node.op.startswith("call_")]
    ops = {node.name for node in calls if "quantize" not in node.name}
    assert ops == {"narrow", "leaky_relu", "unsqueeze_", "flatten", "reshape", "add"}
    program = export_reference(reference, (x,))
    assert {owner_of(node) for node in program.graph.nodes if str(node.target).startswith("aten.")} >= ops
    assert {*_onnx.sources(_onnx.onnx_bytes(program)).values()} == ops


@pytest.mark.slow
@pytest.mark.rule("LOW-04")
def test_where_nothing_is_left_to_run_that_is_said() -> None:
    backend, x = find_backend("onnxruntime"), image(4, 9)
    reference = reference_of(Flat(), x)
    assert "quantize_per_tensor" in reference.code
    execution = backend.execution(lower_reference(backend, reference, (x,)))
    assert execution is not None and not execution.float_fallbacks
    assert execution.quantized_ops == ("flatten: nothing is left to be done between quantize and dequantize",)
