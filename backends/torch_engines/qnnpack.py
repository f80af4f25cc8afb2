"""The qnnpack engine of torch.backends.quantized."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.backends.torch_engines.engine import TorchEngineBackend, batched_pools


class QnnpackBackend(TorchEngineBackend):
    """torch's qnnpack kernels."""

    name = "qnnpack"
    engine = "qnnpack"
    waivers = Path(__file__).with_name("qnnpack.waivers.toml")

    def capabilities(self) -> Capabilities:
        """QNNPACK holds the bias as int32 of scale s_x·s_w: torch quantizes it so when it packs the weight."""
        common = super().capabilities()
        pools = ("max_pool", "avg_pool", "adaptive_avg_pool")
        limits = {**common.limits, **batched_pools(1, *pools), **batched_pools(2, *pools)}
        return replace(common, int32_bias=True, limits=limits)
