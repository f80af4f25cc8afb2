"""Quantizers whose claims are known by construction. Importing this needs torchao."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e import (
    FakeQuantize,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
)
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)

aten = torch.ops.aten
ACTIVATION = QuantizationSpec(
    dtype=torch.uint8,
    quant_min=0,
    quant_max=255,
    qscheme=torch.per_tensor_affine,
    observer_or_fake_quant_ctr=MinMaxObserver.with_args(eps=2**-12),
)
WEIGHT = QuantizationSpec(
    dtype=torch.int8,
    quant_min=-127,
    quant_max=127,
    qscheme=torch.per_channel_symmetric,
    ch_axis=0,
    observer_or_fake_quant_ctr=PerChannelMinMaxObserver,
)
DYNAMIC = QuantizationSpec(
    dtype=torch.int8,
    quant_min=-128,
    quant_max=127,
    qscheme=torch.per_tensor_affine,
    is_dynamic=True,
    observer_or_fake_quant_ctr=PlaceholderObserver.with_args(eps=2**-10),
)
SIGMOID = FixedQParamsQuantizationSpec(dtype=torch.uint8, scale=1 / 256, zero_point=0, quant_min=0, quant_max=255)
FLOAT8 = QuantizationSpec(dtype=torch.float8_e4m3fn, observer_or_fake_quant_ctr=PlaceholderObserver)
INT16 = QuantizationSpec(
    dtype=torch.int16,
    quant_min=-(2**15),
    quant_max=2**15 - 1,
    qscheme=torch.per_tensor_affine,
    observer_or_fake_quant_ctr=MinMaxObserver,
)
SYMMETRIC = QuantizationSpec(
    dtype=torch.int8,
    quant_min=-128,
    quant_max=127,
    qscheme=torch.per_tensor_symmetric,
    observer_or_fake_quant_ctr=MinMaxObserver,
)
ALONG_INPUTS = replace(WEIGHT, ch_axis=1)
TRAINED_ACTIVATION = QuantizationSpec(
    dtype=torch.uint8,
    quant_min=0,
    quant_max=255,
    qscheme=torch.per_tensor_affine,
    observer_or_fake_quant_ctr=FakeQuantize.with_args(observer=MovingAverageMinMaxObserver),
)
TRAINED_WEIGHT = QuantizationSpec(
    dtype=torch.int8,
    quant_min=-128,
    quant_max=127,
    qscheme=torch.per_channel_symmetric,
    ch_axis=0,
    observer_or_fake_quant_ctr=FakeQuantize.with_args(observer=MovingAveragePerChannelMinMaxObserver),
)

Annotate = Callable[[Node], None]


class ByTarget(Quantizer):  # type: ignore[misc]
    """Annotates nodes by what they call."""

    def __init__(self, annotate_by_target: Mapping[Any, Annotate]) -> None:
        super().__init__()
        self._by_target = annotate_by_target

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate each node whose target is known and that no other annotation has taken."""
        for node in model.graph.nodes:
            if node.target in self._by_target and "quantization_annotation" not in node.meta:
                self._by_target[node.target](node)
        return model

    def validate(self, model: GraphModule) -> None:
        """Accept anything."""


def mark(node: Node, inputs: Mapping[Any, Any] | None = None, output: Any = None) -> None:
    """Annotate a node: its inputs, by node, and its output."""
    annotation = QuantizationAnnotation(input_qspec_map=dict(inputs or {}), output_qspec=output, _annotated=True)
    node.meta["quantization_annotation"] = annotation


def weighted(
    activation: Any = ACTIVATION, weight: Any = WEIGHT, output: Any = ACTIVATION, bias: Any = None
) -> Annotate:
    """Return what annotates a weighted op by itself. ``bias``: its qspec, or what makes it of the node."""

    def annotate(node: Node) -> None:
        inputs = {node.args[0]: activation, node.args[1]: weight}
        if bias is not None and len(node.args) > 2:
            inputs[node.args[2]] = bias(node) if callable(bias) else bias
        mark(node, inputs, output)

    return annotate


def weighted_with_relu(activation: Any = ACTIVATION, weight: Any = WEIGHT) -> Annotate:
    """Return what annotates a weighted op together with a relu after it, through a batch norm too."""

    def annotate(node: Node) -> None:
        inputs = {node.args[0]: activation, node.args[1]: weight}
        last, [user, *others] = node, node.users
        while not others and user.target in (aten.batch_norm.default, aten.relu.default):
            last, [user, *others] = user, user.users
        mark(node, inputs)
        mark(last, inputs if last is node else {}, activation)

    return annotate


def elementwise(activation: Any = ACTIVATION, output: Any = ACTIVATION) -> Annotate:
    """Return what annotates an op all of whose tensors are quantized alike."""
    return lambda node: mark(node, dict.fromkeys(node.all_input_nodes, activation), output)


def first_input_only(node: Node) -> None:
    """Annotate the first of an op's inputs, and its output."""
    mark(node, {node.all_input_nodes[0]: ACTIVATION}, ACTIVATION)


def shared(node: Node) -> None:
    """Annotate an op all of whose inputs share an observer with its output."""
    first, *others = node.all_input_nodes
    same = SharedQuantizationSpec((first, node))
    mark(node, {first: ACTIVATION, **dict.fromkeys(others, same)}, same)


def shared_with_number(node: Node) -> None:
    """Annotate an op that shares one observer if it has a number as operand, and has one for each tensor otherwise."""
    (shared if len(node.all_input_nodes) == 1 else elementwise())(node)


def half_shared(node: Node) -> None:
    """Annotate an op whose output shares the observer of its first input only."""
    first, *others = node.all_input_nodes
    mark(node, {first: ACTIVATION, **dict.fromkeys(others, ACTIVATION)}, SharedQuantizationSpec((first, node)))


def shared_behind_quantized(node: Node) -> None:
    """Annotate an op that shares its input's observer, where that comes from an annotated op."""
    source = node.all_input_nodes[0]
    if "quantization_annotation" in source.meta:
        mark(node, {source: SharedQuantizationSpec(source)}, SharedQuantizationSpec(source))


def derived_bias(node: Node) -> DerivedQuantizationSpec:
    """Return the qspec of an int32 bias whose scale is that of the input times that of the weight."""

    def multiply(observers: Any) -> Any:
        (scale, _), (weight_scale, _) = (observer.calculate_qparams() for observer in observers)
        return scale * weight_scale, torch.zeros_like(weight_scale, dtype=torch.int32)

    return DerivedQuantizationSpec(
        derived_from=[(node.args[0], node), (node.args[1], node)],
        derive_qparams_fn=multiply,
        dtype=torch.int32,
        quant_min=-(2**31),
        quant_max=2**31 - 1,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
    )


def refuse(node: Node) -> None:
    """Raise, as a Quantizer with a fault does."""
    raise ValueError(f"no rule for {node.target}")


class StaticLinear(ByTarget):
    """Linear layers, static, with weights per channel: a class that needs no arguments."""

    def __init__(self) -> None:
        super().__init__({aten.linear.default: weighted()})


class NoModules(StaticLinear):
    """Linear layers, where no node of the program calls a module."""

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate, or raise."""
        if called := [node.name for node in model.graph.nodes if node.op == "call_module"]:
            raise NotImplementedError(f"call_module is not supported: {', '.join(called)}")
        return super().annotate(model)


class Raising(StaticLinear):
    """One that takes no program."""

    def annotate(self, model: GraphModule) -> GraphModule:
        """Raise."""
        raise NotImplementedError("no licence for this program")


class NothingAtAll(ByTarget):
    """No op."""

    def __init__(self) -> None:
        super().__init__({})


INSTANCE = ByTarget({aten.relu.default: shared})


def make_dynamic() -> Quantizer:
    """Return a Quantizer for dynamic linear layers."""
    return ByTarget({aten.linear.default: weighted(DYNAMIC, WEIGHT, None)})


def make_trained() -> Quantizer:
    """Return a Quantizer for linear layers in training."""
    return ByTarget({aten.linear.default: weighted(TRAINED_ACTIVATION, TRAINED_WEIGHT, TRAINED_ACTIVATION)})


def fail() -> Quantizer:
    """Raise instead."""
    raise RuntimeError("no licence found")


class Dying(NothingAtAll):
    """Ends the process."""

    def annotate(self, model: GraphModule) -> GraphModule:
        """End the process."""
        os._exit(7)


class Hanging(NothingAtAll):
    """Never ends."""

    def annotate(self, model: GraphModule) -> GraphModule:
        """Sleep for longer than any test."""
        time.sleep(600)
        return model


NO_QUANTIZER = 3
