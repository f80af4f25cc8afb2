"""Reference models on ExecuTorch's XNNPACK delegate: what is computed, and what is said of it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver, PlaceholderObserver
from torch.fx import GraphModule

from fx_quant_conformance.backends import executorch
from fx_quant_conformance.backends.base import Execution, UnsupportedPattern
from fx_quant_conformance.backends.discovery import find_backend
from fx_quant_conformance.backends.lowering import lower_reference
from fx_quant_conformance.refimpl import (
    QConfig,
    QConfigMapping,
    convert_to_reference_decomposed_fx,
    export_reference,
    prepare_fx,
)
from fx_quant_conformance.refimpl.observers.default_qconfigs import get_default_qconfig_mapping
from tests.runtimes.references import image

pytest.importorskip("executorch")

SIGNED: dict[str, Any] = {"dtype": torch.qint8, "quant_min": -128, "quant_max": 127}
STATIC = MinMaxObserver.with_args(**SIGNED)
DYNAMIC = PlaceholderObserver.with_args(**SIGNED, is_dynamic=True)
WEIGHTS = {
    "per tensor": MinMaxObserver.with_args(**SIGNED, qscheme=torch.per_tensor_symmetric),
    "per channel": PerChannelMinMaxObserver.with_args(**SIGNED, qscheme=torch.per_channel_symmetric),
}


def reference_of(model: nn.Module, *inputs: Tensor, activation: Any = STATIC, weight: Any = None) -> GraphModule:
    mapping = QConfigMapping().set_global(QConfig(activation, weight or WEIGHTS["per tensor"]))
    config = find_backend("executorch").backend_config()
    prepared = prepare_fx(model.eval(), mapping, inputs, backend_config=config)
    prepared(*inputs)
    return convert_to_reference_decomposed_fx(prepared, backend_config=config)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 5))


def executed(reference: GraphModule, x: Tensor) -> Execution:
    backend = find_backend("executorch")
    execution = backend.execution(lower_reference(backend, reference, (x,)))
    assert execution is not None
    return execution


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_numbers_are_those_of_the_reference_for_any_batch(weight: Any) -> None:
    x = image(1, 3, 6, 6)
    reference = reference_of(layers(), x, weight=weight)
    lowered = lower_reference(find_backend("executorch"), reference, (x,))
    for rows in (1, 2, 20):
        given = image(rows, 3, 6, 6)
        found, right = lowered(given), reference(given)
        step = float(right.flatten().unique().diff().min())
        assert found.shape == right.shape and float((found - right).abs().max()) <= 1.01 * step, "a step where it ties"
        assert float((found != right).float().mean()) < 0.1


def test_an_empty_batch_is_refused_and_does_not_end_the_process() -> None:
    x = image(2, 6)
    lowered = lower_reference(find_backend("executorch"), reference_of(nn.Sequential(nn.Linear(6, 5)), x), (x,))
    with pytest.raises(ValueError, match="an empty tensor"):
        lowered(x[:0])


@pytest.mark.rule("DTY-02")
def test_unsigned_integers_are_declined_up_front() -> None:
    x, backend = image(2, 6), find_backend("executorch")
    prepared = prepare_fx(nn.Sequential(nn.Linear(6, 5)).eval(), get_default_qconfig_mapping("qnnpack"), (x,))
    prepared(x)
    with pytest.raises(UnsupportedPattern, match="XNNPACK takes qint8 alone"):
        lower_reference(backend, convert_to_reference_decomposed_fx(prepared), (x,))


@pytest.mark.rule("LOW-04")
def test_the_delegate_says_what_it_computes_on_integers() -> None:
    x = image(1, 3, 6, 6)
    found = executed(reference_of(layers(), x), x)
    assert [each.partition(" ")[2] for each in found.quantized_ops] == [
        "(Conv2d qint8)",
        "(MaxPooling2d qint8)",
        "(FullyConnected qint8)",
    ]
    assert [each.partition(" ")[0] for each in found.float_fallbacks] == ["_3"], "flatten, which is not claimed"


class Moved(nn.Module):
    """What there is to decompose, and what torch would make of it before: a word for the padding, an op in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu, self.linear = nn.Conv1d(3, 4, 3, padding="same"), nn.ReLU(inplace=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(self.relu(self.conv(x)).transpose(1, 2))
        return found.add(1.0)


@pytest.mark.parametrize("model", [layers(), Moved()], ids=["layers", "moved"])
def test_what_is_spared_in_lowering_leaves_the_program_as_it_is(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = image(1, 3, 6, 6) if isinstance(model, nn.Sequential) else image(2, 3, 8)
    reference = reference_of(model, x, weight=WEIGHTS["per channel"])
    _, spared = executorch._lower(export_reference(reference, (x,)))
    monkeypatch.setattr(executorch, "decompose_sparingly", nullcontext)
    for each in ("_trace_once", "_compile_late"):
        monkeypatch.setattr(executorch, each, nullcontext)
    assert executorch._lower(export_reference(reference, (x,)))[1] == spared


class Joined(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], 1)


@pytest.mark.rule("LOW-04")
def test_what_is_left_outside_is_named_after_the_reference_model() -> None:
    x = image(2, 6)
    found = executed(reference_of(Joined(), x), x)
    assert found == Execution(quantized_ops=(), float_fallbacks=("cat (cat.out outside of the delegate)",))


@pytest.mark.rule("LOW-04")
def test_an_op_that_is_nothing_in_eval_mode_leaves_nothing_to_run() -> None:
    x = image(2, 6)
    mapping = QConfigMapping().set_global(QConfig(STATIC, WEIGHTS["per tensor"]))
    config = find_backend("pt2e-xnnpack").backend_config()
    prepared = prepare_fx(nn.Sequential(nn.Dropout()).eval(), mapping, (x,), backend_config=config)
    prepared(x)
    found = executed(convert_to_reference_decomposed_fx(prepared, backend_config=config), x)
    assert found == Execution(
        quantized_ops=("_0: nothing is left to be done between quantize and dequantize",), float_fallbacks=()
    )


class Between(nn.Module):
    """Two sums read one tensor; the second depends on the first by what stays outside of the delegate."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.erf(x + x)


def test_readers_of_one_tensor_that_depend_on_one_another_are_lowered() -> None:
    """docs/findings.md, 66."""
    x = image(4, 6)
    reference = reference_of(Between(), x)
    lowered = lower_reference(find_backend("executorch"), reference, (x,))
    found, right = lowered(x), reference(x)
    step = float(right.flatten().unique().diff().min())
    assert len(right.unique()) > 4 and float((found - right).abs().max()) <= 1.01 * step, "a step where it ties"


def test_a_strided_example_says_nothing_of_the_layout_of_inputs() -> None:
    x = image(2, 4, 3, 5)
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    reference = reference_of(Turned(), x)
    lowered = lower_reference(find_backend("executorch"), reference, (strided,))
    for given in (x, strided):
        assert torch.equal(lowered(given), reference(x))


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


@pytest.mark.rule("CVT-03")
def test_dynamic_linear_is_on_integers_where_each_channel_has_a_scale() -> None:
    x, linear = image(3, 6), nn.Sequential(nn.Linear(6, 5))
    left, taken = (executed(reference_of(linear, x, activation=DYNAMIC, weight=each), x) for each in WEIGHTS.values())
    assert "FullyConnected qdint8" in str(taken.quantized_ops) and not taken.float_fallbacks
    assert not left.quantized_ops and "outside of the delegate" in str(left.float_fallbacks)
