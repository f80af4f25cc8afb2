"""Parts of configs, ours and torch's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.ao.quantization import backend_config as theirs

from refimpl import backend_config as ours
from refimpl.dtype_config import DTypeWithConstraints


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
