"""Reference modules: layers that compute in float with a weight that is rounded to its grid. (CVT-02)

``from_float(module, qparams)`` makes one. The qparams are a dict: ``qscheme`` (None: float16), ``dtype``, ``scale`` and
``zero_point`` (tensors of one element, or of one per channel), ``axis``, and, where the range is not the dtype's,
``quant_min`` and ``quant_max``. Integers are plain tensors, of the dtype that holds those of the quantized one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.refimpl.legacy.channels import lay_along
from fx_quant_conformance.refimpl.legacy.dtypes import PLAIN_DTYPE, QUANTIZED_DTYPES, RANGES
from fx_quant_conformance.refimpl.legacy.tables import LooksUp, SumsBags
from fx_quant_conformance.refimpl.legacy.taking_over import take_copies

__all__ = [  # noqa: RUF022  # as torch orders them
    "Linear",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "RNNCell",
    "LSTMCell",
    "GRUCell",
    "LSTM",
    "GRU",
    "Embedding",
    "EmbeddingBag",
]
_PER_TENSOR = (torch.per_tensor_affine, torch.per_tensor_symmetric)


def hold_qparams(module: Any, name: str, qparams: Mapping[str, Any], device: Any = None) -> None:
    """Give a module the qparams of one of its weights: attributes, and buffers, under names that begin with it."""
    set_own = {
        "qscheme": qparams["qscheme"],
        "dtype": qparams["dtype"],
        "quant_min": qparams.get("quant_min"),
        "quant_max": qparams.get("quant_max"),
    }
    for key, value in set_own.items():
        setattr(module, f"{name}_{key}", value)
    axis = 0 if qparams["qscheme"] in (None, *_PER_TENSOR) else int(qparams["axis"])
    numbers = {
        "scale": torch.as_tensor(qparams.get("scale", 1.0), dtype=torch.float32),
        "zero_point": torch.as_tensor(qparams.get("zero_point", 0)),
        "axis": torch.tensor(axis, dtype=torch.int32),
    }
    for key, value in numbers.items():
        module.register_buffer(f"{name}_{key}", value.detach().clone().to(device))
    setattr(module, f"{name}_axis_int", axis)


def get_quantized_weight(module: Any, name: str) -> Tensor:
    """Return the integers of a weight, of its shape; the weight in half precision where that is its dtype."""
    weight, dtype = getattr(module, name), getattr(module, f"{name}_dtype")
    if getattr(module, f"{name}_qscheme") is None:
        return weight.to(dtype)  # type: ignore[no-any-return]
    scale, zero_point, low, high = _read(module, name)
    if zero_point.is_floating_point():
        levels = torch.round(weight * (1.0 / scale) + zero_point)
    else:
        levels = torch.round(weight * (1.0 / scale.double()).to(torch.float32)) + zero_point
    return levels.clamp(low, high).to(PLAIN_DTYPE.get(dtype, torch.uint8))  # four bits in a byte


def get_weight(module: Any, name: str) -> Tensor:
    """Return the reals that a weight is computed with, of its shape."""
    if getattr(module, f"{name}_qscheme") is None:
        return getattr(module, name)  # type: ignore[no-any-return]
    scale, zero_point, *_ = _read(module, name)
    return (get_quantized_weight(module, name).to(torch.float32) - zero_point) * scale


def _read(module: Any, name: str) -> tuple[Tensor, Tensor, int, int]:
    """Return scale and zero point, in the shape in which they lie along the weight's axis, and the range."""
    numbers = [getattr(module, f"{name}_{key}") for key in ("scale", "zero_point")]
    if getattr(module, f"{name}_qscheme") not in _PER_TENSOR:
        axis, dim = getattr(module, f"{name}_axis_int"), getattr(module, name).dim()
        numbers = [lay_along(value, axis, dim) for value in numbers]
    given = (getattr(module, f"{name}_quant_min"), getattr(module, f"{name}_quant_max"))
    ends = zip(RANGES[getattr(module, f"{name}_dtype")], given, strict=True)
    low, high = (own if end is None else end for own, end in ends)
    return numbers[0], numbers[1], low, high


class _Reference(nn.Module):
    """A layer with one weight."""

    weight: Tensor
    is_decomposed = True
    """That its integers are plain tensors."""

    def __init__(self, *args: Any, weight_qparams: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = {"qscheme": torch.per_tensor_affine, "dtype": QUANTIZED_DTYPES["quint8"]}
        self._init_weight_qparams(weight_qparams or given, self.weight.device)

    def _init_weight_qparams(self, qparams: Mapping[str, Any], device: Any) -> None:
        hold_qparams(self, "weight", qparams, device)

    def get_weight(self) -> Tensor:
        """Return the reals that the weight is computed with."""
        return get_weight(self, "weight")

    def get_quantized_weight(self) -> Tensor:
        """Return the integers of the weight."""
        return get_quantized_weight(self, "weight")

    @classmethod
    def from_float(cls, module: nn.Module, weight_qparams: Mapping[str, Any]) -> Any:
        """Return the reference module of a float layer, with its parameters and these qparams."""
        made = take_copies(cls, module)
        made._init_weight_qparams(weight_qparams, made.weight.device)
        return made


class Linear(_Reference, nn.Linear):
    """A linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x · wᵀ + b, of shape (…, out_features)."""
        return F.linear(x, self.get_weight(), self.bias)


class _Convolution(_Reference):
    def forward(self, x: Tensor) -> Tensor:
        """Convolve, as the float layer does."""
        own: Any = self
        return own._conv_forward(x, self.get_weight(), own.bias)  # type: ignore[no-any-return]


class Conv1d(_Convolution, nn.Conv1d):
    """A convolution along one axis."""


class Conv2d(_Convolution, nn.Conv2d):
    """A convolution along two axes."""


class Conv3d(_Convolution, nn.Conv3d):
    """A convolution along three axes."""


class _Transposed(_Reference):
    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Convolve, as the float layer does."""
        own: Any = self
        axes = len(own.kernel_size)
        padding = own._output_padding(x, output_size, own.stride, own.padding, own.kernel_size, axes, own.dilation)
        convolve: Any = getattr(F, f"conv_transpose{axes}d")
        return convolve(x, own.get_weight(), own.bias, own.stride, own.padding, padding, own.groups, own.dilation)  # type: ignore[no-any-return]


class ConvTranspose1d(_Transposed, nn.ConvTranspose1d):
    """A transposed convolution along one axis."""


class ConvTranspose2d(_Transposed, nn.ConvTranspose2d):
    """A transposed convolution along two axes."""


class ConvTranspose3d(_Transposed, nn.ConvTranspose3d):
    """A transposed convolution along three axes."""


class _Table(_Reference):
    def read_rows(self) -> Tensor:
        """Return the rows as they are looked up."""
        return self.get_weight()


class Embedding(LooksUp, _Table, nn.Embedding):
    """A table whose rows are looked up."""


class EmbeddingBag(SumsBags, _Table, nn.EmbeddingBag):
    """A table whose rows are looked up and reduced, bag by bag."""


# -- recurrent modules ------------------------------------------------------------------------------------------------


class _Recurrent(nn.Module):
    """A module with several weights, each with qparams of its own."""

    @classmethod
    def from_float(cls, module: nn.Module, weight_qparams: Mapping[str, Any]) -> Any:
        """Return the reference module of a float one. ``weight_qparams``: by the weight's name."""
        made = take_copies(cls, module)
        for name, qparams in weight_qparams.items():
            if isinstance(qparams, Mapping):
                hold_qparams(made, name, qparams, getattr(made, name).device)
        return made


class _Cell(_Recurrent):
    def get_weight_ih(self) -> Tensor:
        """Return the reals of the weight of inputs."""
        return get_weight(self, "weight_ih")

    def get_weight_hh(self) -> Tensor:
        """Return the reals of the weight of hidden states."""
        return get_weight(self, "weight_hh")

    def get_quantized_weight_ih(self) -> Tensor:
        """Return the integers of the weight of inputs."""
        return get_quantized_weight(self, "weight_ih")

    def get_quantized_weight_hh(self) -> Tensor:
        """Return the integers of the weight of hidden states."""
        return get_quantized_weight(self, "weight_hh")

    def _run(self, cell: Any, x: Tensor, states: Any) -> Any:
        own: Any = self
        if states is None:
            zeros = x.new_zeros(*x.shape[:-1], own.hidden_size)
            states = (zeros, zeros) if cell is torch.lstm_cell else zeros
        arguments = (self.get_weight_ih(), self.get_weight_hh(), own.bias_ih, own.bias_hh)
        if x.dim() > 1:
            return cell(x, states, *arguments)
        given = tuple(each[None] for each in states) if isinstance(states, tuple) else states[None]
        found = cell(x[None], given, *arguments)
        return tuple(each[0] for each in found) if isinstance(found, tuple) else found[0]


class LSTMCell(_Cell, nn.LSTMCell):
    """A step of an LSTM."""

    def forward(self, x: Tensor, hx: Any = None) -> Any:
        """Return the hidden state and the cell's, each (batch, hidden_size)."""
        return self._run(torch.lstm_cell, x, hx)


class GRUCell(_Cell, nn.GRUCell):
    """A step of a GRU."""

    def forward(self, x: Tensor, hx: Any = None) -> Any:
        """Return the hidden state, (batch, hidden_size)."""
        return self._run(torch.gru_cell, x, hx)


class RNNCell(_Cell, nn.RNNCell):
    """A step of a plain recurrent network."""

    def forward(self, x: Tensor, hx: Any = None) -> Any:
        """Return the hidden state, (batch, hidden_size)."""
        return self._run(torch.rnn_tanh_cell if self.nonlinearity == "tanh" else torch.rnn_relu_cell, x, hx)


class _Layers(_Recurrent):
    """Layers that read their weights as one list, in the order of their names."""

    def get_flat_weights(self) -> list[Tensor]:
        """Return the reals of all weights, and the biases."""
        own: Any = self
        names = own._flat_weights_names
        return [get_weight(self, each) if hasattr(self, f"{each}_dtype") else getattr(self, each) for each in names]

    # where the float module keeps its list, and reads it
    _flat_weights: Any = property(lambda self: self.get_flat_weights(), lambda self, weights: None)


class LSTM(_Layers, nn.LSTM):
    """Layers of an LSTM, along a sequence."""


class GRU(_Layers, nn.GRU):
    """Layers of a GRU, along a sequence."""
