"""Which ops of the reference model a backend's report names; what runs in float, in the words of the flow, and why.

A backend names nodes, perhaps with kernels and reasons: ``op0``, ``op0 (Conv)``, ``op0: no kernel``.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from fx_quant_conformance.conformance.claims.pattern_plan import is_norm
from fx_quant_conformance.refimpl import explain
from fx_quant_conformance.refimpl.config.patterns import leaf_name
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize, is_quantize

_NAME = re.compile(r"[\w.]*")
_REPORT = re.compile(r"(?P<name>[\w.]+)(?: \((?P<kernel>.*?)\))?(?:: (?P<reason>.*))?", re.DOTALL)
_NO_OP = ("placeholder", "get_attr", "output")
_BASES = (nn.Module, nn.Sequential)


def list_quantized(model: GraphModule) -> list[str]:
    """List the ops that prepare decided to quantize: the names of their nodes, and the paths of modules they call."""
    decisions = explain(model).plan.decisions
    names = {name for decision in decisions if decision.is_quantized for name in decision.nodes}
    nodes = [node for node in model.graph.nodes if node.name in names]
    return [*(node.name for node in nodes), *(str(node.target) for node in nodes if node.op == "call_module")]


def read_name(text: str) -> str:
    """Return the name with which a backend's report of an op begins; "" if it begins with none."""
    return _NAME.match(text).group()  # type: ignore[union-attr]  # it matches anything


def format_float(model: GraphModule, text: str) -> str:
    """Return a backend's report of an op in float, with the op of the reference model, and a reason if it has none.

    ``op0 (Conv)`` becomes ``nn.Conv2d at op0 (Conv): left as it is between dequantize and quantize``. A report that
    names no node of the model, and no module's path, is returned as it is.
    """
    report = _REPORT.fullmatch(text)
    node = _find_node(model, report["name"]) if report else None
    if report is None or node is None:
        return text
    op, kernel, given = name_op(model, node), report["kernel"], report["reason"]
    shown = f" ({kernel})" if kernel and kernel != op.rpartition(".")[2] else ""
    reason = format_norm(model, node)
    if reason and given:
        reason = f"{reason} ({given})"
    return f"{op} at {node.name}{shown}: {reason or given or format_place(model, node)}"


def name_op(model: GraphModule, node: Node) -> str:
    """Name the op that a node calls, as a config does; of a reference module that is its float class."""
    if node.op == "call_module":
        kind = type(model.get_submodule(str(node.target)))
        torchs = (base for base in kind.__mro__ if base not in _BASES and leaf_name(base).startswith(("nn.", "nni.")))
        return leaf_name(next(torchs, kind))
    target: Any = node.target
    return leaf_name(target) if isinstance(target, str) or hasattr(target, "__name__") else str(target)


def format_norm(model: GraphModule, node: Node) -> str:
    """Say that a batch norm is not folded into the layer before it; "" if the node is none that could be."""
    if node.op != "call_module":
        return ""
    module = model.get_submodule(str(node.target))
    if any(is_norm(type(child)) for child in module.children()):
        return "its norm is not folded into the weight"
    before = next((each for each in node.all_input_nodes if each.op == "call_module"), None)
    is_after_layer = before is not None and hasattr(model.get_submodule(str(before.target)), "weight")
    if not is_norm(type(module)) or before is None or not is_after_layer:
        return ""
    return f"is not folded into {name_op(model, before)} at {before.name} before it"


def format_place(model: GraphModule, node: Node) -> str:
    """Say which other float ops stand with a node between dequantize and quantize, if any do."""
    before = [each for each in node.all_input_nodes if not is_dequantize(each)]
    after = [each for each in node.users if not is_quantize(each)]
    beside = [each for each in (*before, *after) if each.op not in _NO_OP and not is_dequantize(each)]
    if not beside:
        return "left as it is between dequantize and quantize"
    names = " and ".join(dict.fromkeys(f"{name_op(model, each)} at {each.name}" for each in beside))
    return f"stands between dequantize and quantize with {names}: one kernel must do all of it"


def _find_node(model: GraphModule, name: str) -> Node | None:
    """Find the op of a name, or that calls the module of this path."""
    ops = [node for node in model.graph.nodes if node.op not in _NO_OP]
    named = (node for node in ops if node.name == name)
    called = (node for node in ops if node.op == "call_module" and str(node.target) == name)
    return next(named, None) or next(called, None)
