"""Attention, which models have in float between quantized layers: its rule. (NUM-04)"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from fx_quant_conformance.conformance.bounds.error_bounds import (
    FUNCTION,
    Errors,
    NoOracleError,
    OpCall,
    OpRule,
    U,
    Value,
    add_error,
    as_value,
    bound_matrix_products,
    gamma,
)
from fx_quant_conformance.conformance.ops.activations import bound_softmax

_PLAIN: Mapping[str, Any] = {
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}
"""The options of attention, with the values for which it has a rule."""
_RESCALE = 42
"""Roundings of one rescaling of what is summed so far: an exponential within twenty ulp, difference and product."""


def bound_attention(call: OpCall) -> Errors:
    """softmax(q·kᵀ / √d)·v, by the bounds of its parts, in float32.

    The scores are sums of d products, whose operands or result are scaled: γ_{d+6}·|q|·|kᵀ| / √d. A kernel that sums
    block by block rescales its sums by e^(m − m'), with the largest score m so far: of n keys at most n times, 42u
    each; the arguments add up to at most u times the range of the scores. Then weights times values, n products.
    """
    _require_plain(call)
    query, key, value = (as_value(each) for each in call.args[:3])
    in_float, exact = (replace(call.capabilities, float_accumulation=each) for each in (True, False))
    scale = 1 / math.sqrt(query.real.shape[-1])
    turned = {name: each.expand_as(key.real).mT for name, each in key.errors.items()}
    turned_key = Value(real=key.real.mT, errors=turned)
    scores = _multiply(query, turned_key, exact)
    spread = gamma(query.real.shape[-1] + 6) * torch.matmul(query.real.abs(), turned_key.real.abs())
    errors = {name: each * scale for name, each in scores.errors.items()}
    logits = Value(real=scores.real * scale, errors=add_error(errors, "accumulation", spread * scale))
    weights = torch.softmax(logits.real, -1)
    soft = OpCall(function=torch.softmax, args=(logits, -1), kwargs={}, capabilities=in_float, result=weights)
    found = bound_softmax(soft)
    below = logits.real.amax(-1, keepdim=True) - logits.real.amin(-1, keepdim=True)
    rescaled = weights * (_RESCALE * weights.shape[-1] * U + U * below)
    return dict(_multiply(Value(real=weights, errors=add_error(found, "function", rescaled)), value, in_float).errors)


def _multiply(left: Value, right: Value, capabilities: Any) -> Value:
    """Return the product of two matrices, with the bound on its error."""
    call = OpCall(function=torch.matmul, args=(left, right), kwargs={}, capabilities=capabilities)
    return Value(real=torch.matmul(left.real, right.real), errors=bound_matrix_products(call))


def _require_plain(call: OpCall) -> None:
    """Raise NoOracleError for a mask, dropout, another scale, or grouped heads."""
    given = dict(zip(_PLAIN, call.args[3:], strict=False)) | dict(call.kwargs)
    other = [name for name, value in given.items() if name not in _PLAIN or value != _PLAIN[name]]
    if other:
        raise NoOracleError(f"no rule for attention with {', '.join(other)}")


UNSAMPLED: dict[Any, OpRule] = {
    F.scaled_dot_product_attention: OpRule(
        arithmetic=FUNCTION, bound=bound_attention, source="torch.nn.functional.scaled_dot_product_attention; NUM-04"
    )
}
