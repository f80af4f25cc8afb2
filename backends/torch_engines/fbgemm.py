"""The fbgemm engine of torch.backends.quantized."""

from __future__ import annotations

from pathlib import Path

from fx_quant_conformance.backends.torch_engines.engine import TorchEngineBackend


class FbgemmBackend(TorchEngineBackend):
    """torch's fbgemm kernels."""

    name = "fbgemm"
    engine = "fbgemm"
    waivers = Path(__file__).with_name("fbgemm.waivers.toml")
