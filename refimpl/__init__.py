"""refimpl: the executable specification of BackendConfig and of fuse → prepare → convert → lower.

The front door has torch's names and signatures, so that a vendor swaps one import. What each rule says stands in the
project's rules (docs); the code names the rule at the line that decides.
"""

from refimpl.backend_config import BackendConfig, BackendPatternConfig, ObservationType
from refimpl.convert import (
    _convert_to_reference_decomposed_fx,
    convert_to_reference_decomposed_fx,
    convert_to_reference_fx,
)
from refimpl.dtype_config import DTypeConfig, DTypeWithConstraints
from refimpl.errors import ConfigError, ModelError, NotBuiltError, QConfigError, RefimplError
from refimpl.explain import DecisionLog, explain
from refimpl.fuse import fuse_fx
from refimpl.lower import convert_fx, lower
from refimpl.observers import FixedQParamsObserver, MinMaxObserver, PerChannelMinMaxObserver, PlaceholderObserver
from refimpl.patterns import MatchAllNode
from refimpl.prepare import prepare_fx
from refimpl.qconfig import QConfig, QConfigMapping

__all__ = [
    "BackendConfig",
    "BackendPatternConfig",
    "ConfigError",
    "DTypeConfig",
    "DTypeWithConstraints",
    "DecisionLog",
    "FixedQParamsObserver",
    "MatchAllNode",
    "MinMaxObserver",
    "ModelError",
    "NotBuiltError",
    "ObservationType",
    "PerChannelMinMaxObserver",
    "PlaceholderObserver",
    "QConfig",
    "QConfigError",
    "QConfigMapping",
    "RefimplError",
    "_convert_to_reference_decomposed_fx",
    "convert_fx",
    "convert_to_reference_decomposed_fx",
    "convert_to_reference_fx",
    "explain",
    "fuse_fx",
    "lower",
    "prepare_fx",
]
