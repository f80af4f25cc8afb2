"""The qnnpack engine of torch.backends.quantized."""

from __future__ import annotations

from backends.torch_engine import TorchEngineBackend


class QnnpackBackend(TorchEngineBackend):
    """torch's qnnpack kernels behind the contract of backends/base.py."""

    name = "qnnpack"
    engine = "qnnpack"
