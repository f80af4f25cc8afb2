"""Kinds: how a dtype config quantizes."""

from __future__ import annotations

from enum import Enum

import torch

from fx_quant_conformance.refimpl.config.dtype_config import DTypeConfig
from fx_quant_conformance.refimpl.observers.observers import is_quantized_dtype
from fx_quant_conformance.refimpl.prepare.dtype_choice import round_to_float32


class Kind(Enum):
    """How a dtype config quantizes."""

    STATIC = "static"
    """Activations are integers with qparams known before the run."""

    FIXED = "fixed qparams"
    """Static, with one scale and zero point that the dtype config prescribes."""

    DYNAMIC = "dynamic"
    """Activations are quantized by what each run brings; the result is float."""

    FLOAT16 = "float16"
    """Activations and weights in half precision."""

    WEIGHT_ONLY = "weight only"
    """Integers in the weight only; float in and out."""

    OTHER = "other"
    """Anything else: the suite has no QConfig for it."""


INTEGERS = (Kind.STATIC, Kind.FIXED)
"""The kinds whose activations lie on grids that are known before the run."""


def kind_of(dtypes: DTypeConfig) -> Kind:
    """Tell how a dtype config quantizes."""
    if dtypes.input_dtype is torch.float16:
        return Kind.FLOAT16
    if dtypes.is_dynamic:
        return Kind.DYNAMIC
    if is_quantized_dtype(dtypes.input_dtype):
        return Kind.STATIC if fixed_qparams_of(dtypes) is None else Kind.FIXED
    is_float = dtypes.input_dtype in (None, torch.float32)
    return Kind.WEIGHT_ONLY if is_float and is_quantized_dtype(dtypes.weight_dtype) else Kind.OTHER


def fixed_qparams_of(dtypes: DTypeConfig) -> tuple[float, int] | None:
    """Return the scale, as float32, and the zero point that a dtype config fixes at an end; None: it fixes none.

    Wherever they are named, they are the result's, and the input is measured. (OBS-14)

    One observer is asked for both ends of a static one; one of the two numbers without the other requires nothing, and
    neither does what is said of any dtype. (DTY-01, DTY-05)
    """
    ends = [dtypes.input_dtype_with_constraints, *[dtypes.output_dtype_with_constraints] * (not dtypes.is_dynamic)]
    pairs = [(each.scale_exact_match, each.zero_point_exact_match) for each in ends if each.dtype is not None]
    fixed = ((round_to_float32(s), int(z)) for s, z in pairs if s is not None and z is not None)  # rule: DTY-05
    return next(fixed, None)
