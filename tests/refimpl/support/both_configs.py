"""Parts of configs, ours and torch's, and strategies for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.ao.quantization.quantize_fx  # torch's configs need it loaded before them
from hypothesis import strategies as st
from torch import nn
from torch.ao.quantization import backend_config as theirs

from fx_quant_conformance.refimpl.config import backend_config as ours
from fx_quant_conformance.refimpl.config.dtype_config import DTypeConfig, DTypeWithConstraints

DTYPES = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.float16, torch.float32)
numbers = st.none() | st.integers(-(2**31), 2**31 - 1)
scales = st.none() | st.floats(min_value=2**-20, max_value=1e6)
constraints = st.builds(
    DTypeWithConstraints,
    dtype=st.sampled_from(DTYPES),
    quant_min_lower_bound=numbers,
    quant_max_upper_bound=numbers,
    scale_min_lower_bound=scales,
    scale_max_upper_bound=scales,
    scale_exact_match=scales,
    zero_point_exact_match=numbers,
)
dtypes = st.none() | st.sampled_from(DTYPES) | constraints
dtype_configs = st.builds(
    DTypeConfig, dtypes, dtypes, dtypes, st.none() | st.sampled_from(DTYPES), st.none() | st.booleans()
)


def fuse(is_qat: bool, *modules: nn.Module) -> nn.Module:
    """A fuser method."""
    return nn.Sequential(*modules)


def first(nested: Any) -> Any:
    """A getter."""
    return nested[0]


def as_theirs(value: Any) -> Any:
    """Put torch's classes in the place of ours, deep inside a dict form too."""
    if isinstance(value, DTypeWithConstraints):
        return theirs.DTypeWithConstraints(**dataclasses.asdict(value))
    if isinstance(value, ours.ObservationType):
        return theirs.ObservationType(value.value)
    if isinstance(value, Mapping):
        return {key: as_theirs(item) for key, item in value.items()}
    return [as_theirs(item) for item in value] if isinstance(value, list) else value


def config_of(*entries: ours.BackendPatternConfig) -> ours.BackendConfig:
    return ours.BackendConfig("mine").set_backend_pattern_configs(entries)
