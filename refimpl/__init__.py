"""refimpl: the executable specification of BackendConfig and of fuse → prepare → convert → lower.

The front door has torch's names and signatures, so that a vendor swaps one import. What each rule says stands in the
project's specification (docs/spec.md); the code names the rule at the line that decides.
"""

from fx_quant_conformance.former import check_name

# first: it says what is missing in a torch that cannot serve
from fx_quant_conformance.refimpl import releases as _  # noqa: F401
from fx_quant_conformance.refimpl.config.backend_config import BackendConfig, BackendPatternConfig, ObservationType
from fx_quant_conformance.refimpl.config.custom_config import (
    ConvertCustomConfig,
    FuseCustomConfig,
    PrepareCustomConfig,
    QuantType,
    StandaloneModuleConfigEntry,
)
from fx_quant_conformance.refimpl.config.dtype_config import DTypeConfig, DTypeWithConstraints
from fx_quant_conformance.refimpl.config.native import default_backend_config
from fx_quant_conformance.refimpl.config.patterns import MatchAllNode
from fx_quant_conformance.refimpl.config.qconfig import QConfig, QConfigMapping
from fx_quant_conformance.refimpl.convert.convert import (
    _convert_to_reference_decomposed_fx,
    convert_to_reference_decomposed_fx,
    convert_to_reference_fx,
)
from fx_quant_conformance.refimpl.errors import ConfigError, ModelError, QConfigError, RefimplError
from fx_quant_conformance.refimpl.exported.exported import export_reference
from fx_quant_conformance.refimpl.fuse.fuse import fuse_fx
from fx_quant_conformance.refimpl.legacy import nni, nniqat, nnqat, nnqr, qint8, qint32, quint4x2, quint8
from fx_quant_conformance.refimpl.lower.lower import convert_fx, lower
from fx_quant_conformance.refimpl.observers.default_qconfigs import (
    get_default_qat_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig,
    get_default_qconfig_mapping,
)
from fx_quant_conformance.refimpl.observers.fake_quantize import (
    FakeQuantize,
    FixedQParamsFakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    disable_fake_quant,
    disable_observer,
    enable_fake_quant,
    enable_observer,
)
from fx_quant_conformance.refimpl.observers.histogram import HistogramObserver
from fx_quant_conformance.refimpl.observers.observers import (
    FixedQParamsObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
    ReuseInputObserver,
)
from fx_quant_conformance.refimpl.prepare.equalize import EqualizationQConfig, default_equalization_qconfig
from fx_quant_conformance.refimpl.prepare.explain import DecisionLog
from fx_quant_conformance.refimpl.prepare.prepare import prepare_fx, prepare_qat_fx
from fx_quant_conformance.refimpl.quality.quality import LayerQuality, QualityReport, explain

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
    "nni",
    "nniqat",
    "nnqat",
    "nnqr",
    "prepare_fx",
    "prepare_qat_fx",
    "qint32",
    "qint8",
    "quint4x2",
    "quint8",
]

check_name(__name__)
