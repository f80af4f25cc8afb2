"""A complete vendor backend: it claims linear, and "compiles" by running the reference model.

That is in float, as it says, and it does not report what it runs, so that its claims are UNSHOWN.

pytest conformance --backend=examples.minimal_backend:MinimalBackend --without-execution-evidence
"""

from typing import Any

import torch
from torch import nn

from fx_quant_conformance.backends.base import Backend, Capabilities, Representation
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, DTypeConfig, nnqr, qint8, quint8

INT8 = DTypeConfig(quint8, quint8, qint8, torch.float32)


class MinimalBackend(Backend):
    name = "minimal"
    representation = Representation.DECOMPOSED

    def backend_config(self) -> BackendConfig:
        linear = BackendPatternConfig(nn.Linear).add_dtype_config(INT8).set_root_module(nn.Linear)
        return BackendConfig(self.name).set_backend_pattern_config(linear.set_reference_quantized_module(nnqr.Linear))

    def capabilities(self) -> Capabilities:
        return Capabilities(float_accumulation=True)

    def lower(self, reference_model: Any, example_inputs: tuple[Any, ...]) -> Any:
        return torch.no_grad()(reference_model)
