"""The reference backend runs the reference model itself: a failure is a fault of the suite or of the config.

One class for each of the seven configs that torch ships, so that every claim in them is exercised.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar, get_args

import torch
from torch.fx import GraphModule

from fx_quant_conformance.backends.base import WEIGHT_SCHEMES, Backend, Capabilities, Representation
from fx_quant_conformance.backends.torch_engines.tables import NativeName, native_config
from fx_quant_conformance.refimpl import BackendConfig
from fx_quant_conformance.refimpl.config.backend_config import as_backend_config
from fx_quant_conformance.refimpl.config.patterns import pattern_name
from fx_quant_conformance.refimpl.legacy import QUANTIZATION


class ReferenceBackend(Backend):
    """Claims what qnnpack claims, the widest of the native configs, and computes it in float between q and dq.

    It has no quantized kernels, so it does not report its execution: what holds is UNSHOWN.
    """

    name = "reference"
    representation = Representation.DECOMPOSED
    config: ClassVar[str] = "qnnpack"
    """Name of the config that it claims."""

    def backend_config(self) -> BackendConfig:
        """Return the claims of one of torch's configs under this backend's name."""
        if self.config in get_args(NativeName):
            return native_config(self.config).set_name(self.name)  # type: ignore[arg-type]
        raw = getattr(_import_torchs_configs(self.config), f"get_{self.config}_backend_config")()
        return _replace_fusers(as_backend_config(raw)).set_name(self.name)

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """Return the reference model, run without gradients."""
        return torch.no_grad()(reference_model)

    def capabilities(self) -> Capabilities:
        """Every weight scheme; float32 arithmetic accumulates rounding errors."""
        return Capabilities(weight_schemes=WEIGHT_SCHEMES, float_accumulation=True)

    def versions(self) -> dict[str, str]:
        """Return the version of torch, which runs the reference model."""
        return {"torch": torch.__version__}


def _import_torchs_configs(name: str) -> ModuleType:
    """Return torch's module of configs. Raises ImportError where torch no longer has it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            importlib.import_module(f"{QUANTIZATION}.quantize_fx")  # torch's configs do not import without it
            return importlib.import_module(f"{QUANTIZATION}.backend_config")
        except ModuleNotFoundError as error:
            own = ", ".join(get_args(NativeName))
            raise ImportError(
                f"the config {name} is read from {QUANTIZATION}.backend_config, which torch {torch.__version__} does "
                f"not have; the configs {own} are refimpl's own and need no such torch"
            ) from error


def _replace_fusers(config: BackendConfig) -> BackendConfig:
    """Replace torch's fuser methods by refimpl's: torch's for transposed convolutions do not support groups."""
    fusers = {pattern_name(entry.normal_pattern): entry.fuser_method for entry in native_config("native").configs}
    for entry in config.configs:
        own = fusers.get(pattern_name(entry.normal_pattern))
        if entry.fuser_method is not None and own is not None:
            entry.set_fuser_method(own)
    return config


class ReferenceNative(ReferenceBackend):
    """The claims of torch's native config."""

    name, config = "reference-native", "native"


class ReferenceFbgemm(ReferenceBackend):
    """The claims of the fbgemm config."""

    name, config = "reference-fbgemm", "fbgemm"


class ReferenceX86(ReferenceBackend):
    """The claims of the x86 config."""

    name, config = "reference-x86", "x86"


class ReferenceOnednn(ReferenceBackend):
    """The claims of the onednn config."""

    name, config = "reference-onednn", "onednn"


class ReferenceTensorrt(ReferenceBackend):
    """The claims of the tensorrt config, whose hardware is not needed."""

    name, config = "reference-tensorrt", "tensorrt"


class ReferenceExecutorch(ReferenceBackend):
    """The claims of the executorch config, whose runtime is not needed."""

    name, config = "reference-executorch", "executorch"
