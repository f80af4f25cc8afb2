"""refimpl: the executable specification of BackendConfig and of fuse → prepare → convert → lower.

The front door has torch's names and signatures, so that a vendor swaps one import. What each rule says stands in the
project's specification (docs/spec.md); the code names the rule at the line that decides.
"""

import refimpl.releases  # noqa: F401  # first: it says what is missing in a torch that cannot serve
from refimpl.backend_config import BackendConfig, BackendPatternConfig, ObservationType
from refimpl.convert import (
    _convert_to_reference_decomposed_fx,
    convert_to_reference_decomposed_fx,
    convert_to_reference_fx,
)
from refimpl.custom_config import (
    ConvertCustomConfig,
    FuseCustomConfig,
    PrepareCustomConfig,
    QuantType,
    StandaloneModuleConfigEntry,
)
from refimpl.default_qconfigs import (
    get_default_qat_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig,
    get_default_qconfig_mapping,
)
from refimpl.dtype_config import DTypeConfig, DTypeWithConstraints
from refimpl.equalize import EqualizationQConfig, default_equalization_qconfig
from refimpl.errors import ConfigError, ModelError, QConfigError, RefimplError
from refimpl.explain import DecisionLog
from refimpl.exported import export_reference
from refimpl.fake_quantize import (
    FakeQuantize,
    FixedQParamsFakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    disable_fake_quant,
    disable_observer,
    enable_fake_quant,
    enable_observer,
)
from refimpl.fuse import fuse_fx
from refimpl.histogram import HistogramObserver
from refimpl.lower import convert_fx, lower
from refimpl.native import default_backend_config
from refimpl.observers import (
    FixedQParamsObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
    ReuseInputObserver,
)
from refimpl.patterns import MatchAllNode
from refimpl.prepare import prepare_fx, prepare_qat_fx
from refimpl.qconfig import QConfig, QConfigMapping
from refimpl.quality import LayerQuality, QualityReport, explain

__all__ = [  # noqa: RUF022
    "BackendConfig",
    "BackendPatternConfig",
    "ConfigError",
    "ConvertCustomConfig",
    "DecisionLog",
    "DTypeConfig",
    "DTypeWithConstraints",
    "EqualizationQConfig",
    "FakeQuantize",
    "FixedQParamsFakeQuantize",
    "FixedQParamsObserver",
    "FuseCustomConfig",
    "FusedMovingAvgObsFakeQuantize",
    "HistogramObserver",
    "LayerQuality",
    "MatchAllNode",
    "MinMaxObserver",
    "ModelError",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "ObservationType",
    "PerChannelMinMaxObserver",
    "PlaceholderObserver",
    "PrepareCustomConfig",
    "QConfig",
    "QConfigError",
    "QConfigMapping",
    "QualityReport",
    "QuantType",
    "RefimplError",
    "ReuseInputObserver",
    "StandaloneModuleConfigEntry",
    "_convert_to_reference_decomposed_fx",
    "convert_fx",
    "convert_to_reference_decomposed_fx",
    "convert_to_reference_fx",
    "default_backend_config",
    "default_equalization_qconfig",
    "disable_fake_quant",
    "disable_observer",
    "enable_fake_quant",
    "enable_observer",
    "explain",
    "export_reference",
    "fuse_fx",
    "get_default_qat_qconfig",
    "get_default_qat_qconfig_mapping",
    "get_default_qconfig",
    "get_default_qconfig_mapping",
    "lower",
    "prepare_fx",
    "prepare_qat_fx",
]
