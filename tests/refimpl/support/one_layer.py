"""Helpers: take a small model through torch's flow, and put its reference modules beside ours."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as torch_fx
from torch import Tensor, nn

from fx_quant_conformance.refimpl.convert.reference import make_reference
from tests.refimpl.support import both_flows as flows

NAMED: Any = flows.torch_qconfigs
QConfig: Any = NAMED.QConfig
ENGINES = ("native", "x86", "onednn", "qnnpack", "fbgemm", "executorch", "tensorrt")
QAT = NAMED.get_default_qat_qconfig("x86")
TORCH_FX: Any = torch_fx
FORMS: Mapping[bool, Any] = {  # is_decomposed → torch's convert
    False: TORCH_FX.convert_to_reference_fx,
    True: TORCH_FX._convert_to_reference_decomposed_fx,
}
each_form = pytest.mark.parametrize("is_decomposed", FORMS, ids=["quantized tensors", "decomposed"])


def ids(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % 5


# Of every root: what makes one, and its input.
ROOTS: Mapping[type[nn.Module], tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    nn.Linear: (lambda: nn.Linear(4, 3), lambda: torch.randn(2, 4)),
    nn.Conv1d: (lambda: nn.Conv1d(2, 3, 2, stride=2), lambda: torch.randn(2, 2, 6)),
    nn.Conv2d: (lambda: nn.Conv2d(2, 4, 3, padding=1, groups=2), lambda: torch.randn(2, 2, 5, 5)),
    nn.Conv3d: (lambda: nn.Conv3d(2, 3, 2, bias=False), lambda: torch.randn(1, 2, 3, 3, 3)),
    nn.ConvTranspose1d: (lambda: nn.ConvTranspose1d(2, 3, 2), lambda: torch.randn(2, 2, 6)),
    nn.ConvTranspose2d: (
        lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, output_padding=1),
        lambda: torch.randn(2, 2, 4, 4),
    ),
    nn.ConvTranspose3d: (lambda: nn.ConvTranspose3d(2, 3, 2), lambda: torch.randn(1, 2, 3, 3, 3)),
    nn.LSTM: (lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True), lambda: torch.randn(3, 2, 4)),
    nn.GRU: (lambda: nn.GRU(4, 3, bias=False), lambda: torch.randn(3, 2, 4)),
    nn.LSTMCell: (lambda: nn.LSTMCell(4, 3), lambda: torch.randn(2, 4)),
    nn.GRUCell: (lambda: nn.GRUCell(4, 3), lambda: torch.randn(2, 4)),
    nn.RNNCell: (lambda: nn.RNNCell(4, 3), lambda: torch.randn(2, 4)),
    nn.Embedding: (lambda: nn.Embedding(6, 4), lambda: ids(2, 3)),
    nn.EmbeddingBag: (lambda: nn.EmbeddingBag(6, 4, mode="sum"), lambda: ids(2, 3)),
}


def references(engine: str) -> dict[type[nn.Module], type[nn.Module]]:
    """The (root, reference class) pairs of an engine's config. (CFG-11)"""
    return {
        entry.root_module: entry.reference_quantized_module
        for entry in flows.torch_config(engine).configs
        if entry.root_module is not None and entry.reference_quantized_module is not None
    }


def prepared_by_torch(model: nn.Module, qconfig: Any, inputs: Tensor, engine: str) -> Any:
    """A calibrated model of torch's prepare_fx."""
    found = TORCH_FX.prepare_fx(
        copy.deepcopy(model).eval(), flows.global_mapping(qconfig), (inputs,), backend_config=flows.torch_config(engine)
    )
    flows.calibrate(found, [(inputs,)])
    return found


def trained_by_torch(model: nn.Module, qconfig: Any, inputs: Tensor, engine: str = "x86", steps: int = 3) -> Any:
    """A model of torch's prepare_qat_fx after some steps of training, in eval mode."""
    found: Any = TORCH_FX.prepare_qat_fx(
        copy.deepcopy(model).train(),
        flows.global_mapping(qconfig),
        (inputs,),
        backend_config=flows.torch_config(engine),
    )
    optimizer = torch.optim.SGD(found.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        found(inputs).square().mean().backward()
        optimizer.step()
    return found.eval()


def facts(module: nn.Module) -> dict[str, Any]:
    """All that a module holds, by name, and the class of each of its parts. Modes and QConfigs left out."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        found[f"{name}:class"] = type(part)
        held = {key: value for key, value in vars(part).items() if not key.startswith("_")}
        tensors = {**part._parameters, **part._buffers}
        found |= {f"{name}.{key}": value for key, value in (held | tensors).items()}
    return {name: value for name, value in found.items() if not name.endswith((".training", ".qconfig"))}


def assert_same_modules(prepared: Any, theirs: Any, inputs: Tensor, engine: str, *, is_decomposed: bool) -> list[Any]:
    """Swap every module of torch's prepared model by ours; same classes, bits and outputs as in torch's reference."""
    ours, made = copy.deepcopy(theirs).eval(), []
    for node in prepared.graph.nodes:
        if node.op != "call_module" or "activation_post_process" in node.target:
            continue
        module = prepared.get_submodule(node.target)
        before = copy.deepcopy(facts(module))
        found = make_reference(
            module, module.qconfig, references(engine), is_decomposed=is_decomposed, where=node.target
        )
        assert flows.same(facts(module), before), f"{node.target}: the prepared model was changed"
        expected = theirs.get_submodule(node.target)
        flows.settle(expected)
        different = [
            name
            for name in facts(expected).keys() | facts(found).keys()
            if not flows.same(facts(expected).get(name, "absent"), facts(found).get(name, "absent"))
        ]
        assert not different, f"{node.target} ({type(module).__name__}): {different} differ from torch's"
        ours.set_submodule(node.target, found)
        made.append(found)
    with torch.no_grad():
        assert flows.same(ours(inputs), theirs.eval()(inputs)), "outputs differ though the modules agree"
    return made
