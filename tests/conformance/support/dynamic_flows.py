"""Reference models of embeddings, recurrent modules and linear layers that are not static, and what the oracle says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.backends.torch_engines.tables import native_config
from fx_quant_conformance.conformance.ops.op_model import MODEL_OF, Input, Role
from fx_quant_conformance.conformance.ops.table import RECORDS
from fx_quant_conformance.conformance.oracle.exact import Exact
from fx_quant_conformance.refimpl import (
    MinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
    QConfig,
    QConfigMapping,
    convert_to_reference_decomposed_fx,
    prepare_fx,
)

_FLOAT = PlaceholderObserver.with_args(dtype=torch.float32)
_TENSOR: dict[str, Any] = {"dtype": torch.qint8, "qscheme": torch.per_tensor_symmetric}
_CHANNEL: dict[str, Any] = {"dtype": torch.qint8, "qscheme": torch.per_channel_symmetric}
_ROWS: dict[str, Any] = {"qscheme": torch.per_channel_affine_float_qparams, "ch_axis": 0}


def dynamic(low: int = 0, high: int = 255, *, per_channel: bool = False) -> QConfig:
    """Inputs to low … high at run time, weights to qint8."""
    activation = {"dtype": torch.quint8, "is_dynamic": True, "quant_min": low, "quant_max": high}
    weight = PerChannelMinMaxObserver.with_args(**_CHANNEL) if per_channel else MinMaxObserver.with_args(**_TENSOR)
    return QConfig(PlaceholderObserver.with_args(**activation), weight)


FLOAT16 = QConfig(
    activation=PlaceholderObserver.with_args(dtype=torch.float16, is_dynamic=True),
    weight=PlaceholderObserver.with_args(dtype=torch.float16),
)
PER_CHANNEL = dynamic(per_channel=True)
BYTES = QConfig(_FLOAT, PerChannelMinMaxObserver.with_args(dtype=torch.quint8, **_ROWS))
NIBBLES = QConfig(_FLOAT, PerChannelMinMaxObserver.with_args(dtype=torch.quint4x2, **_ROWS))
SIGNED = QConfig(_FLOAT, PerChannelMinMaxObserver.with_args(ch_axis=0, **_CHANNEL))
RECURRENT = (nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell)


NATIVE = Capabilities(dynamic_states=True, dynamic_scale_floor=float(torch.tensor(6.1e-5)), half_row_qparams=True)
IN_FLOAT = Capabilities(float_accumulation=True)


def flat(output: Any) -> list[Any]:
    """List what nested tuples hold."""
    return [each for item in output for each in flat(item)] if isinstance(output, (tuple, list)) else [output]


def model_of(op: Any, arguments: dict[str, Any]) -> nn.Module:
    """Build the model of an op's samples."""
    samples = RECORDS[op]
    return MODEL_OF[len(samples.inputs(arguments))]([samples.step(op, arguments)]).eval()


def inputs_of(op: Any, arguments: dict[str, Any], *, is_half: bool = False) -> tuple[Tensor, ...]:
    """Draw inputs: activations on a grid of 255 steps, states off the middle, so that no zero point is at a tie."""
    drawn = tuple(map(_drawn, RECORDS[op].inputs(arguments)))
    return tuple(x.half().float() if is_half and x.is_floating_point() else x for x in drawn)


def _drawn(given: Input) -> Tensor:
    if given.role is Role.INDEX:
        return torch.randint(0, given.high, given.shape)
    if given.role is Role.OFFSETS:
        return torch.randint(0, given.high, given.shape).sort().values * (torch.arange(given.shape[0]) > 0)
    if given.role is Role.STATE:
        return torch.empty(given.shape).uniform_(-1.0, 0.7)
    drawn = torch.randint(0, 256, given.shape)
    drawn.view(-1)[0], drawn.view(-1)[-1] = 0, 255
    return (drawn - 96) * 2.0**-6


def reference_of(model: nn.Module, qconfig: QConfig, *, config: str = "qnnpack") -> GraphModule:
    """Quantize a model by one QConfig; the range of dynamic inputs is not cut by the global engine."""
    mapping = QConfigMapping().set_global(qconfig)
    prepared = prepare_fx(model, mapping, None, backend_config=native_config(config))  # type: ignore[arg-type]
    return convert_to_reference_decomposed_fx(prepared)


def excess(exacts: Sequence[Exact], output: Any) -> float:
    """By how many steps, at the most, an output is farther from the exact result than its slack."""
    found = [
        float(((each.detach().double() - exact.real).abs() / exact.step - exact.slack).max())
        for exact, each in zip(exacts, flat(output), strict=True)
        if each.numel() and exact.real.shape == each.shape
    ]
    assert len(found) == len(exacts) or not all(exact.real.numel() for exact in exacts), "shapes differ"
    return max(found, default=-1.0)
