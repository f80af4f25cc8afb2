"""Backends of which only the config is known, in the three ways in which one may be given."""

from __future__ import annotations

import torch

from fx_quant_conformance.backends.base import Backend, Representation
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, DTypeConfig, ObservationType

U8 = DTypeConfig(torch.quint8, torch.quint8)


def give_config() -> BackendConfig:
    """Return a config that claims one op."""
    entry = BackendPatternConfig(torch.nn.ReLU)
    entry.set_observation_type(ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT).add_dtype_config(U8)
    return BackendConfig("a board").set_backend_pattern_config(entry)


CONFIG = give_config()


class WithoutLower(Backend):
    """A backend that runs elsewhere."""

    name = "without_lower"
    representation = Representation.DECOMPOSED

    def backend_config(self) -> BackendConfig:
        return give_config()
