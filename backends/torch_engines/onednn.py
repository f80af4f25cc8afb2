"""The onednn engine of torch.backends.quantized."""

from __future__ import annotations

from pathlib import Path

from fx_quant_conformance.backends.torch_engines.engine import TorchEngineBackend


class OnednnBackend(TorchEngineBackend):
    """torch's onednn kernels."""

    name = "onednn"
    engine = "onednn"
    waivers = Path(__file__).with_name("onednn.waivers.toml")
