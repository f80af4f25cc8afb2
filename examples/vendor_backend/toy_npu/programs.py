"""The door of a compiler that takes exported programs, and of a Quantizer; the compiler here is torch, in float."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram

from fx_quant_conformance.backends.base import Backend, Capabilities, QuantizerRequest, Representation
from fx_quant_conformance.refimpl import BackendConfig, MinMaxObserver, QConfig, QConfigMapping, qint8
from toy_npu.backend import toy_npu_config


class OnPrograms(Backend):
    """The claims of the toy NPU, lowered from exported programs; it does not say what it runs."""

    name = "toy_npu_on_programs"
    representation = Representation.EXPORTED

    def backend_config(self) -> BackendConfig:
        return toy_npu_config()

    def lower(self, program: ExportedProgram, example_inputs: tuple[Any, ...]) -> Any:
        return torch.no_grad()(program.module())  # your compiler's call

    def capabilities(self) -> Capabilities:
        """Sums of floats, as torch makes them: not so where your compiler makes sums of integers."""
        return Capabilities(float_accumulation=True)


class OnQuantizedPrograms(OnPrograms):
    """The same, with the Quantizer that the toy NPU's customers use; it has none for training."""

    name = "toy_npu_on_quantized_programs"

    def quantizer(self, request: QuantizerRequest) -> Any:
        """Return the toy NPU's own Quantizer: here that of refimpl, for the claims."""
        from fx_quant_conformance.refimpl.exported.pt2e import BackendConfigQuantizer  # needs torchao

        activation = MinMaxObserver.with_args(dtype=qint8)
        weight = MinMaxObserver.with_args(dtype=qint8, qscheme=torch.per_tensor_symmetric)
        mapping = QConfigMapping().set_global(QConfig(activation, weight))
        return None if request.is_qat else BackendConfigQuantizer(toy_npu_config(), mapping)
