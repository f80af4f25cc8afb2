"""Rules of the oracle's table: ops with a weight, and the reference modules that hold one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.ao.nn.quantized.reference as nnqr
import torch.nn.functional as F
from torch import nn

from conformance.oracle import error_bounds as bounds
from conformance.oracle.error_bounds import DOT_PRODUCT, OpRule, Value

_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)

OP_RULES: dict[Any, OpRule] = {
    **dict.fromkeys(
        (*_CONVOLUTIONS, *_TRANSPOSED),
        OpRule(verifier=DOT_PRODUCT, bound=bounds.dot_products, source="torch.nn.functional.conv*; NUM-03"),
    ),
}

Operands = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function of OP_RULES, and the arguments to call it with."""


def _linear(module: Any, weight: Value, x: Value) -> Operands:
    return F.linear, (x, weight, module.bias)


def _convolution(function: Callable[..., Any]) -> Callable[..., Operands]:
    def operands(module: Any, weight: Value, x: Value) -> Operands:
        """What the float model computes: torch's reference modules hold a padding_mode, but pad with zeros."""
        padding = module.padding
        if module.padding_mode != "zeros":
            x, padding = _padded(module, x), 0
        return function, (x, weight, module.bias, module.stride, padding, module.dilation, module.groups)

    return operands


def _padded(module: Any, x: Value) -> Value:
    """The input as its values lie in the padding too; their errors are where they are."""

    def pad(values: Any) -> Any:
        return F.pad(values, module._reversed_padding_repeated_twice, mode=module.padding_mode)

    errors = {cause: pad(error.expand_as(x.real)) for cause, error in x.errors.items()}
    return Value(real=pad(x.real), errors=errors, step=x.step)


def _transposed(function: Callable[..., Any], rank: int) -> Callable[..., Operands]:
    def operands(module: Any, weight: Value, x: Value, output_size: list[int] | None = None) -> Operands:
        geometry = (list(module.stride), list(module.padding), list(module.kernel_size), rank, list(module.dilation))
        output_padding = module._output_padding(x.real, output_size, *geometry)
        options = (module.stride, module.padding, output_padding, module.groups, module.dilation)
        return function, (x, weight, module.bias, *options)

    return operands


REFERENCE_MODULES: dict[Any, Callable[..., Operands]] = {
    nnqr.Linear: _linear,
    nnqr.Conv1d: _convolution(F.conv1d),
    nnqr.Conv2d: _convolution(F.conv2d),
    nnqr.Conv3d: _convolution(F.conv3d),
    nnqr.ConvTranspose1d: _transposed(F.conv_transpose1d, 1),
    nnqr.ConvTranspose2d: _transposed(F.conv_transpose2d, 2),
    nnqr.ConvTranspose3d: _transposed(F.conv_transpose3d, 3),
}
"""What each reference module computes: called with the module, its weight, and what its forward takes."""
FLOAT_MODULES = {getattr(nn, kind.__name__): operands for kind, operands in REFERENCE_MODULES.items()}
"""The same of float modules, which a model holds where its config claims none of the patterns around them."""
