"""What modules that hold a weight compute: a function of the op table, and its operands."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import nn

from fx_quant_conformance.conformance.bounds.error_bounds import Value
from fx_quant_conformance.refimpl.legacy import nnqr

Operands = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function that has a rule, and the arguments to call it with."""


def _open_convolution(function: Callable[..., Any], module: Any, weight: Value, x: Value) -> Operands:
    """What the float model computes: torch's reference modules hold a padding_mode, but pad with zeros."""
    padding = module.padding
    if module.padding_mode != "zeros":
        x, padding = _pad_input(module, x), 0
    return function, (x, weight, module.bias, module.stride, padding, module.dilation, module.groups)


def _pad_input(module: Any, x: Value) -> Value:
    """The input with its own values in the padding too, and their errors with them."""

    def pad(values: Any) -> Any:
        return F.pad(values, module._reversed_padding_repeated_twice, mode=module.padding_mode)

    errors = {cause: pad(error.expand_as(x.real)) for cause, error in x.errors.items()}
    return Value(real=pad(x.real), errors=errors, step=x.step)


def _open_transposed(
    function: Callable[..., Any], module: Any, weight: Value, x: Value, output_size: list[int] | None = None
) -> Operands:
    rank = len(module.kernel_size)
    geometry = (list(module.stride), list(module.padding), list(module.kernel_size), rank, list(module.dilation))
    output_padding = module._output_padding(x.real, output_size, *geometry)
    options = (module.stride, module.padding, output_padding, module.groups, module.dilation)
    return function, (x, weight, module.bias, *options)


REFERENCE_MODULES: dict[Any, Callable[..., Operands]] = {
    nnqr.Linear: lambda module, weight, x: (F.linear, (x, weight, module.bias)),
    nnqr.Conv1d: partial(_open_convolution, F.conv1d),
    nnqr.Conv2d: partial(_open_convolution, F.conv2d),
    nnqr.Conv3d: partial(_open_convolution, F.conv3d),
    nnqr.ConvTranspose1d: partial(_open_transposed, F.conv_transpose1d),
    nnqr.ConvTranspose2d: partial(_open_transposed, F.conv_transpose2d),
    nnqr.ConvTranspose3d: partial(_open_transposed, F.conv_transpose3d),
}
"""What each reference module computes: called with the module, its weight, and what its forward takes."""
FLOAT_MODULES = {getattr(nn, kind.__name__): operands for kind, operands in REFERENCE_MODULES.items()}
"""The same of float modules, which a model holds where its config claims none of the patterns around them."""
