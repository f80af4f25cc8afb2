"""The x86 engine of torch.backends.quantized."""

from __future__ import annotations

from backends.torch_engine import TorchEngineBackend


class X86Backend(TorchEngineBackend):
    """torch's x86 kernels behind the contract of backends/base.py."""

    name = "x86"
    engine = "x86"
