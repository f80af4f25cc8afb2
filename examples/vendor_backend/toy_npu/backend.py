"""The claims of the toy NPU, and the door through which the conformance suite comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from fx_quant_conformance import register
from fx_quant_conformance.backends.base import Backend, Capabilities, Execution, Representation
from fx_quant_conformance.refimpl import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    ObservationType,
    nni,
    nnqr,
    qint8,
)
from toy_npu.compiler import compile_model, executed
from toy_npu.machine import Machine
from toy_npu.modules import LinearSquash, Squash, fuse_linear_relu, fuse_linear_squash

WEIGHTED = DTypeConfig(qint8, qint8, qint8, torch.float)
PLAIN = DTypeConfig(qint8, qint8)


def toy_npu_config() -> BackendConfig:
    """What the machine quantizes: int8 linear layers, alone or fused, activations by table, and flatten."""
    linear = BackendPatternConfig(nn.Linear).set_dtype_configs([WEIGHTED])
    linear.set_root_module(nn.Linear).set_reference_quantized_module(nnqr.Linear)
    fusions = [
        BackendPatternConfig((nn.Linear, nn.ReLU)).set_fuser_method(fuse_linear_relu).set_fused_module(nni.LinearReLU),
        BackendPatternConfig((nn.Linear, Squash)).set_fuser_method(fuse_linear_squash).set_fused_module(LinearSquash),
    ]
    fused = [
        BackendPatternConfig(kind).set_root_module(nn.Linear).set_reference_quantized_module(nnqr.Linear)
        for kind in (nni.LinearReLU, LinearSquash)
    ]
    activations = [BackendPatternConfig(kind).set_dtype_configs([PLAIN]) for kind in (nn.ReLU, nn.ELU, Squash)]
    flatten = BackendPatternConfig(torch.flatten).set_dtype_configs([PLAIN])
    flatten.set_observation_type(ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT)
    for entry in (*fusions, *fused):
        entry.set_dtype_configs([WEIGHTED])
    entries = [linear, *fusions, *fused, *activations, flatten]
    return BackendConfig("toy_npu").set_backend_pattern_configs(entries)


class ToyNpu(Backend):
    """The toy NPU, for `pytest conformance --backend=toy_npu`."""

    name = "toy_npu"
    representation = Representation.DECOMPOSED
    waivers: Path | None = Path(__file__).parent / "waivers.toml"
    machine = Machine()

    def backend_config(self) -> BackendConfig:
        return toy_npu_config()

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> GraphModule:
        return compile_model(reference_model, self.machine)

    def execution(self, lowered: Any) -> Execution:
        return executed(lowered)

    def capabilities(self) -> Capabilities:
        """Weights with one scale, or one for each output channel; ELU as torch has it by default."""
        return Capabilities(
            weight_schemes=("per_tensor_symmetric", "per_channel_symmetric"),
            int32_bias=True,
            limits={"nn.ELU": {"alpha": (1.0,)}},
        )

    def versions(self) -> dict[str, str]:
        from importlib.metadata import version

        return {"toy-npu": version("toy-npu"), "numpy": version("numpy")}


# How the suite builds a model of what only this vendor has. Squash makes two roundings: the sum, the quotient.
register(Squash, build=lambda: nn.Sequential(Squash()).eval(), inputs=[(4, 17)], roundings=2)
# Around a linear layer it builds one model for each variant of that layer, which it hands over as `root`.
register((nn.Linear, Squash), build=lambda root: nn.Sequential(root, Squash()).eval())
register(LinearSquash, build=lambda root: nn.Sequential(LinearSquash(root, Squash())).eval())
