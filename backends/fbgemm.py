"""The fbgemm engine of torch.backends.quantized."""

from __future__ import annotations

from backends.torch_engine import TorchEngineBackend


class FbgemmBackend(TorchEngineBackend):
    """torch's fbgemm kernels behind the contract of backends/base.py."""

    name = "fbgemm"
    engine = "fbgemm"
