"""Helpers: a small net whose forward a test gives, quantized by torch and by refimpl, stage by stage (see `parity`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.ao.quantization.fx.custom_config as torch_custom
from torch import nn

from fx_quant_conformance import refimpl
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.parity import Batches, Case, Recipe, parity

REFERENCE = ("reference",)
CORE = ("reference", "decomposed")
NAMED: Any = flows.torch_qconfigs
TORCHS: Any = torch_custom  # its setters are annotated as methods of abstract classes
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(5))


class Net(nn.Module):
    """Linear layers ``a``, ``b``, ``c``, a weight, a bias, a constant, what the test adds; ``run`` is its forward."""

    def __init__(self, run: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.a, self.b, self.c, self.relu = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.register_buffer("constant", torch.randn(4))
        for name, part in parts.items():
            self.add_module(name, part)
        self.run = run

    def forward(self, x: Any) -> Any:
        return self.run(self, x)


class Net3(Net):
    """The same with three inputs."""

    def forward(self, x: Any, y: Any, z: Any) -> Any:  # type: ignore[override]
        return self.run(self, x, y, z)


def case(
    build: Callable[[], nn.Module],
    mapping: Callable[[], Any] = flows.global_mapping,
    *,
    batches: Batches = ((X,), (2 * X,)),
    custom: tuple[Callable[[], Any], Callable[[], Any]] = (lambda: None, lambda: None),
    convert_mapping: Callable[[], Any] = lambda: None,
    **recipe: Any,
) -> Case:
    """Return a case of the parity harness: native config, reference and decomposed form, if `recipe` does not differ.

    `custom`: makers of the custom configs of prepare and of convert.
    """
    defaults: dict[str, Any] = {"config": "native", "converts": CORE}
    return Case(
        name="",
        build=lambda: (build(), batches),
        recipe=Recipe(mapping=mapping, **(defaults | recipe)),
        prepare_custom=custom[0],
        convert_custom=custom[1],
        convert_mapping=convert_mapping,
    )


def assert_parity(build: Callable[[], nn.Module], *args: Any, **options: Any) -> None:
    """Torch and refimpl agree on every stage: graphs, names, numbers, bits. Arguments are those of `case`."""
    found = parity(case(build, *args, **options))
    assert not found, "\n".join(f"{stage}: {text}" for stage, text in found.items())


def prepared(model: nn.Module, mapping: Any = None, *inputs: Any, **options: Any) -> Any:
    """Prepare with refimpl and torch's native config, and calibrate."""
    options = {"backend_config": flows.our_config("native")} | options
    inputs = inputs or (X,)
    found = refimpl.prepare_fx(model, flows.global_mapping() if mapping is None else mapping, inputs, **options)
    with torch.no_grad():
        found(*inputs)
    return found


def calls(model: Any) -> list[str]:
    """Name what a graph calls, in order: classes of modules, functions, ``.methods``."""
    return [
        type(model.get_submodule(node.target)).__name__
        if node.op == "call_module"
        else f".{node.target}"
        if node.op == "call_method"
        else getattr(node.target, "__name__", str(node.target))
        for node in model.graph.nodes
        if node.op.startswith("call")
    ]


def spots(model: Any) -> list[tuple[str, str, str]]:
    """(role, value, rule) of every observer that prepare placed, as the decision log has them."""
    return [(slot.role, slot.value, slot.rule) for slot in refimpl.explain(model).plan.slots]
