"""Faults of a vendor's Quantizer, which the stage annotate is to find; the kernels beside it are right.

The honest one is refimpl's own, for the config of the claims. Each fault changes its annotations. Importing this needs
torchao.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e import FakeQuantize, MinMaxObserver, PerChannelMinMaxObserver, PlaceholderObserver
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

from fx_quant_conformance import refimpl
from fx_quant_conformance.backends.base import Capabilities, QuantizerRequest, Representation
from fx_quant_conformance.conformance.claims.qconfigs import make_qconfig
from fx_quant_conformance.refimpl import BackendConfig, DTypeConfig, DTypeWithConstraints
from fx_quant_conformance.refimpl.config.patterns import pattern_name
from fx_quant_conformance.refimpl.exported.calls import ANNOTATION
from fx_quant_conformance.refimpl.exported.pt2e import BackendConfigQuantizer
from tests.mutants.reference_kernels import SCHEMES, SmallReference, entries
from tests.mutation.mutant import Mutant

aten = torch.ops.aten
PATTERNS = (
    "nn.Linear",
    "nnqat.Linear",
    "nn.Linear+nn.ReLU",
    "nni.LinearReLU",
    "nn.Conv2d",
    "nn.ConvTranspose2d",
    "operator.add",
    "torch.cat",
    "nn.Sigmoid",
    "nn.MaxPool2d",
)
_ACTIVATION = DTypeWithConstraints(torch.quint8, scale_min_lower_bound=2**-12)
STATIC = DTypeConfig(_ACTIVATION, _ACTIVATION, DTypeWithConstraints(torch.qint8, -127, 127), torch.float32)
DYNAMIC = DTypeConfig(torch.quint8, torch.float32, torch.qint8, torch.float32, is_dynamic=True)


def _fixed_of(entry: refimpl.BackendPatternConfig) -> DTypeConfig | None:
    ends = ((each, each.output_dtype_with_constraints.scale_exact_match) for each in entry.dtype_configs)
    return next((each for each, scale in ends if scale is not None), None)


def small_config() -> BackendConfig:
    """Return the claims: each pattern static, Linear dynamic too, Sigmoid with its fixed qparams."""
    found = [entry for entry in entries() if pattern_name(entry.normal_pattern) in PATTERNS]
    for entry in found:
        more = [DYNAMIC] if pattern_name(entry.normal_pattern) in ("nn.Linear", "nnqat.Linear") else []
        entry.set_dtype_configs([_fixed_of(entry) or STATIC, *more])
    return BackendConfig("quantizer").set_backend_pattern_configs(found)


class Quantized(SmallReference):
    """The reference backend with refimpl's Quantizer for its config. ``wrap``: what is wrong with that."""

    name = "reference-quantizer"

    def __init__(
        self, wrap: Callable[[Quantizer], Quantizer] = lambda honest: honest, *, int32_bias: bool = False
    ) -> None:
        super().__init__(small_config())
        self._wrap, self._int32_bias = wrap, int32_bias

    def capabilities(self) -> Capabilities:
        return Capabilities(weight_schemes=SCHEMES, float_accumulation=True, int32_bias=self._int32_bias)

    def quantizer(self, request: QuantizerRequest) -> Any:
        """Return refimpl's Quantizer, with what is wrong with it."""
        dtypes, flow = DYNAMIC if request.is_dynamic else STATIC, "qat" if request.is_qat else "ptq"
        channels_first, channels_second = (make_qconfig(dtypes, SCHEMES[0], flow=flow, axis=axis) for axis in (0, 1))
        mapping = refimpl.QConfigMapping().set_global(channels_first)
        mapping.set_object_type(nn.ConvTranspose2d, channels_second)
        for entry in self.backend_config().configs:
            if (fixed := _fixed_of(entry)) is not None:
                op: Any = entry.normal_pattern
                mapping.set_object_type(op, make_qconfig(fixed, "no_weight", flow=flow))
        honest = BackendConfigQuantizer(
            self.backend_config(), mapping, is_qat=request.is_qat, derives_bias=self._int32_bias
        )
        return self._wrap(honest)


class Changed(Quantizer):  # type: ignore[misc]
    """A Quantizer some of whose annotations are changed, those of ops of one name ("": of all)."""

    def __init__(self, honest: Quantizer, op: str, change: Callable[[Node, Any], object]) -> None:
        super().__init__()
        self._honest, self._op, self._change = honest, op, change

    def annotate(self, model: GraphModule) -> GraphModule:
        self._honest.annotate(model)
        for node in model.graph.nodes:
            if node.op == "call_function" and self._op in str(node.target):
                empty = QuantizationAnnotation(allow_implicit_sharing=False)
                self._change(node, node.meta.get(ANNOTATION, empty))
                if node.meta.get(ANNOTATION) is None and (empty.input_qspec_map or empty.output_qspec):
                    node.meta[ANNOTATION] = empty
        return model

    def validate(self, model: GraphModule) -> None:
        """Accept anything."""


class Unlicensed(Quantized):
    """A backend whose Quantizer cannot be had."""

    def quantizer(self, request: QuantizerRequest) -> Any:
        """Raise."""
        raise RuntimeError("no licence found")


class QuantizedPrograms(Quantized):
    """The same backend for programs: those that the Quantizer has quantized are run as they are."""

    representation = Representation.EXPORTED

    def lower(self, reference_model: Any, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        module = reference_model.module()
        return torch.no_grad()(lambda *inputs: module(*inputs))


class Enlarging(Changed):
    """Annotates rightly, and makes the model's parameters larger when torchao lets it prepare the model."""

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Change the parameters."""
        for value in model.parameters():
            value.data.mul_(1.25)
        return model


MUTANTS: list[Mutant] = []


def fault(
    name: str, op: str, change: Callable[[Node, Any], object], *rules: str, claims: str, int32_bias: bool = False
) -> None:
    """Enter a Quantizer that annotates an op in another way than the honest one."""
    MUTANTS.append(
        Mutant(
            group="annotation",
            name=name,
            rules=rules,
            claims=(claims,),
            make=lambda: Quantized(lambda honest: Changed(honest, op, change), int32_bias=int32_bias),
        )
    )


def _spec(make: Any, dtype: torch.dtype = torch.uint8, low: int = 0, high: int = 255, **more: Any) -> QuantizationSpec:
    return QuantizationSpec(dtype=dtype, quant_min=low, quant_max=high, observer_or_fake_quant_ctr=make, **more)


_MEASURED = _spec(MinMaxObserver.with_args(eps=2**-12), qscheme=torch.per_tensor_affine)
_FINE = _spec(MinMaxObserver.with_args(eps=2**-13), qscheme=torch.per_tensor_affine)
_SIGNED = _spec(MinMaxObserver.with_args(eps=2**-12), torch.int8, -128, 127, qscheme=torch.per_tensor_affine)
_WIDE = _spec(PerChannelMinMaxObserver, torch.int8, -128, 127, qscheme=torch.per_channel_symmetric, ch_axis=0)
_ALONG_INPUTS = _spec(PerChannelMinMaxObserver, torch.int8, -127, 127, qscheme=torch.per_channel_symmetric, ch_axis=1)
_PER_TENSOR = _spec(MinMaxObserver, torch.int8, -127, 127, qscheme=torch.per_tensor_symmetric)
_DYNAMIC = _spec(PlaceholderObserver, is_dynamic=True)
_TRAINED = _spec(FakeQuantize.with_args(observer=MinMaxObserver, eps=2**-12), qscheme=torch.per_tensor_affine)


def _set_input(place: int, spec: Any) -> Callable[[Node, Any], object]:
    """Return what annotates an argument as asked, where the op has it and is annotated; None: not at all."""

    def change(node: Node, note: Any) -> None:
        if note.input_qspec_map and place < len(node.args):
            note.input_qspec_map[node.args[place]] = spec

    return change


def _set_output(spec: Any) -> Callable[[Node, Any], object]:
    """Return what annotates an output as asked, where it is no integer."""

    def change(node: Node, note: Any) -> None:
        if node.meta["val"].is_floating_point():
            note.output_qspec = spec

    return change


def _forget(node: Node, note: Any) -> None:
    note.input_qspec_map.clear()
    note.output_qspec = None
    node.meta.pop(ANNOTATION, None)


def _observe_before_relu(node: Node, note: Any) -> None:
    if any("relu" in str(user.target) for user in node.users):
        note.output_qspec = _MEASURED


def _always_with_relu(node: Node, note: Any) -> None:
    """Take a relu after a linear layer as one with it, whoever else reads the layer's result."""
    source = node.all_input_nodes[0]
    if "linear" in str(source.target):
        node.meta[ANNOTATION] = QuantizationAnnotation(output_qspec=_MEASURED, _annotated=True)


def _annotate_integers(node: Node, note: Any) -> None:
    if not node.meta["val"].is_floating_point():
        _annotate(node, note)


def _annotate(node: Node, note: Any) -> None:
    note.input_qspec_map = dict.fromkeys(node.all_input_nodes, _MEASURED)
    note.output_qspec = _MEASURED
    note._annotated = True
    node.meta[ANNOTATION] = note


def _forget_grouped(node: Node, note: Any) -> None:
    if len(node.args) > 6 and node.args[6] != 1:
        _forget(node, note)


def _raise(node: Node, note: Any) -> None:
    raise NotImplementedError(f"no rule for {node.target}")


CONV, LINEAR = "nn.Conv2d/static*/ptq/*", "nn.Linear/static*/ptq/*"
fault("weight along the wrong axis", "conv2d", _set_input(1, _ALONG_INPUTS), "OBS-13", claims=CONV)
fault("cat does not share", "aten.cat", _set_output(_MEASURED), "OBS-02", claims="torch.cat/*/ptq/*")
fault("int32 bias forgotten", "linear", _set_input(2, None), "NUM-04", claims=LINEAR, int32_bias=True)
fault("weight one step wider than claimed", "linear", _set_input(1, _WIDE), "DTY-03", claims=LINEAR)
fault("weight per tensor", "linear", _set_input(1, _PER_TENSOR), "OBS-13", claims=LINEAR)
fault("weight forgotten", "conv2d", _set_input(1, None), "OBS-13", claims=CONV)
fault("activations of another dtype", "add", _set_output(_SIGNED), "DTY-01", claims="operator.add/*/ptq/*")
fault("scales smaller than claimed", "add", _set_output(_FINE), "DTY-04", claims="operator.add/*/ptq/*")
fault("dynamic where static is claimed", "linear", _set_input(0, _DYNAMIC), "DTY-07", claims=LINEAR)
fault("static where dynamic is claimed", "linear", _set_output(_MEASURED), "DTY-07", claims="nn.Linear/dynamic*/ptq/*")
fault("fixed qparams are measured", "sigmoid", _set_output(_MEASURED), "DTY-05", claims="nn.Sigmoid/*/ptq/*")
fault("one of two inputs forgotten", "add", _set_input(1, None), "OBS-01", claims="operator.add/*/ptq/*")
fault("observed before relu", "linear", _observe_before_relu, "OBS-01", claims="nn.Linear+nn.ReLU/*/ptq/*")
fault("taken as one though used elsewhere", "relu", _always_with_relu, "PAT-06", claims="nn.Linear+nn.ReLU/*/ptq/*")
fault("integers are annotated", "add", _annotate_integers, "OBS-10", claims="operator.add/*/ptq/*")
fault("max_pool2d left in float", "max_pool2d", _forget, "OBS-01", claims="nn.MaxPool2d/*/ptq/*")
fault("grouped convolutions left in float", "conv2d", _forget_grouped, "OBS-01", claims=CONV)
fault("fake quantizes without training", "linear", _set_input(0, _TRAINED), "QAT-01", claims=LINEAR)
fault("raises on an op that is claimed", "max_pool2d", _raise, "LOW-01", claims="nn.MaxPool2d/*/ptq/*")
fault(
    "annotates what no entry claims",
    "softmax",
    _annotate,
    "DTY-02",
    claims="model/unclaimed_ops/activations/ptq/static",
)

MUTANTS += [
    Mutant(
        group="annotation", name="its Quantizer cannot be had", rules=("LOW-01",), make=Unlicensed, claims=(LINEAR,)
    ),
    Mutant(
        group="annotation",
        name="enlarges the weights that it is to annotate",
        rules=("NUM-03", "NUM-04"),
        make=lambda: QuantizedPrograms(lambda honest: Enlarging(honest, "no op", _annotate)),
        claims=(LINEAR,),
    ),
    *(
        Mutant(
            group="annotation",
            make=partial(make, int32_bias=bias),
            name=f"honest Quantizer, {'int32' if bias else 'float'} bias, {make.representation.value}",
        )
        for bias in (False, True)
        for make in (Quantized, QuantizedPrograms)
    ),
]
