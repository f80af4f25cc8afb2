"""The x86 engine of torch.backends.quantized."""

from __future__ import annotations

from pathlib import Path

from fx_quant_conformance.backends.torch_engines.engine import TorchEngineBackend


class X86Backend(TorchEngineBackend):
    """torch's x86 kernels."""

    name = "x86"
    engine = "x86"
    waivers = Path(__file__).with_name("x86.waivers.toml")
