"""BackendConfigQuantizer: prepare's decisions as annotations of an exported program, for torchao's PT2E flow.

torchao's ``prepare_pt2e`` asks a Quantizer which values of a program are observed, and by what. This one asks prepare:
the calls of modules, functions and methods are read from the program (refimpl.exported.calls), fused, matched and
decided about by the code of prepare_fx, and each observer that it would place becomes an annotation. docs/pt2e.md says
what PT2E cannot express. torchao is needed only here (the extra ``pt2e``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fx_quant_conformance.refimpl.config.custom_config import PrepareCustomConfig
from fx_quant_conformance.refimpl.config.native import config_or_native
from fx_quant_conformance.refimpl.config.qconfig import as_qconfig_mapping
from fx_quant_conformance.refimpl.errors import RefimplError
from fx_quant_conformance.refimpl.exported.calls import ANNOTATION, Calls, arguments_of, read_calls
from fx_quant_conformance.refimpl.exported.pt2e_changes import warn_of_changes
from fx_quant_conformance.refimpl.exported.pt2e_folds import order_nodes
from fx_quant_conformance.refimpl.fuse.fuse import fuse
from fx_quant_conformance.refimpl.graph.matching import find_matches
from fx_quant_conformance.refimpl.graph.tracing import Places, class_of, layer_of
from fx_quant_conformance.refimpl.legacy.dtypes import PLAIN_DTYPE
from fx_quant_conformance.refimpl.prepare.decide import Request, make_plan, qat_classes_of
from fx_quant_conformance.refimpl.prepare.dtype_choice import ObserverFacts, ObserverReader, is_observed_dtype
from fx_quant_conformance.refimpl.prepare.explain import DecisionLog
from fx_quant_conformance.refimpl.prepare.plan import Decision, Plan
from fx_quant_conformance.refimpl.prepare.prepare import references_of

try:
    from torchao.quantization.pt2e import FakeQuantizeBase, ObserverBase
    from torchao.quantization.pt2e.quantizer import (
        DerivedQuantizationSpec,
        QuantizationAnnotation,
        QuantizationSpec,
        Quantizer,
        SharedQuantizationSpec,
    )
except (ImportError, AttributeError) as error:  # torchao itself, or what it uses of a newer torch
    raise ImportError(
        f"refimpl.exported.pt2e needs torchao, and it cannot be imported with torch {torch.__version__} ({error}): "
        "pip install -c constraints.txt 'fx-quant-conformance[pt2e]'; torchao 0.18 needs torch 2.10 or newer"
    ) from error

_Point: TypeAlias = "Node | tuple[Node, Node]"  # a value, or a value on its way to a user


class BackendConfigQuantizer(Quantizer):  # type: ignore[misc]
    """Annotates an exported float program as a BackendConfig and a QConfigMapping say. (OBS-15)

    ``backend_config``: a BackendConfig; None: torch's native one. ``qconfig_mapping``: a QConfigMapping; torch's
    objects are taken as well. ``is_qat``: for ``prepare_qat_pt2e``. ``derives_bias``: the bias of a static op with a
    weight is int32, of scale s_x·s_w and zero point 0, as integer kernels hold it; a BackendConfig cannot ask for that,
    and the FX flow leaves it in float32. One quantizer may annotate several programs; ``explain`` is about the last.

    Raises ConfigError or QConfigError for bad arguments, and in ``annotate`` for a config that cannot be executed.
    """

    def __init__(
        self, backend_config: object, qconfig_mapping: object, *, is_qat: bool = False, derives_bias: bool = False
    ) -> None:
        super().__init__()
        self._derives_bias = derives_bias
        self._request = Request(
            config=config_or_native(backend_config),
            mapping=as_qconfig_mapping(qconfig_mapping),
            custom=PrepareCustomConfig(),
            is_qat=is_qat,
        )
        self._log: DecisionLog | None = None

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate the nodes of an exported program's module; return it. ``prepare_pt2e`` calls this.

        In QAT it warns of what torchao is going to change in the program (``find_changes``). In PTQ it comes too late:
        ``prepare_pt2e`` has folded the batch norms before.

        Raises ModelError for a graph module that was traced, or is prepared already.
        """
        calls = read_calls(model, self._request.config.configs)
        _fuse(calls, self._request)
        if self._request.is_qat:
            warn_of_changes(model, calls.parts.values())
        plan = _refuse_inexpressible(make_plan(calls.draft, self._request, calls.examples))
        notes = calls.draft.meta
        self._log = DecisionLog(plan=plan, fusions=notes["fusions"], not_fused=notes["not_fused"])
        requests = list(_list_requests(calls, plan, self._request))
        biases = list(_list_biases(calls, plan, requests)) if self._derives_bias else []
        _annotate(order_nodes(model, is_qat=self._request.is_qat), requests, biases)
        if self._request.is_qat:
            _name_inputs_and_weights(model)
        return model

    def validate(self, model: GraphModule) -> None:
        """Do nothing: what was annotated was decided by the config."""

    def explain(self) -> DecisionLog:
        """Return what was decided about each call of the program annotated last, as refimpl.explain does. (DTY-09)

        Raises RefimplError if none was annotated.
        """
        if self._log is None:
            raise RefimplError("the quantizer has annotated no program yet: call prepare_pt2e(program, quantizer)")
        return self._log


# -- fusing --------------------------------------------------------------------------------------------------------


def _fuse(calls: Calls, request: Request) -> None:
    """Fuse the calls; a fused call stands for the nodes of all of its parts. (FUS-01)"""
    entries = [entry for entry in request.config.configs if entry.fuser_method is not None]
    matches = find_matches(calls.draft.graph, Places(calls.draft), entries)
    names = [([node.name for node in match.nodes], match.root.name, match.last.name) for match in matches]
    fuse(calls.draft, request.config, is_qat=request.is_qat, examples=calls.examples)
    left = {node.name for node in calls.draft.graph.nodes}
    for nodes, root, last in names:
        if left.isdisjoint(set(nodes) - {root}):
            calls.values[root] = calls.values[last]
            calls.parts[root] = tuple(part for name in nodes for part in calls.parts[name])


# -- what is observed ----------------------------------------------------------------------------------------------


def _refuse_inexpressible(plan: Plan) -> Plan:
    """Leave in float what is quantized with a weight that PT2E has no words for; the decision says so."""
    words = {decision.node: _format_inexpressible(decision) for decision in plan.decisions}
    decisions = tuple(
        replace(each, dtype_config=None, reason=f"PT2E: {words[each.node]}") if words[each.node] else each
        for each in plan.decisions
    )
    refused = {name for decision in plan.decisions if words[decision.node] for name in decision.nodes}
    slots = (slot for slot in plan.slots if slot.role != "weight" or refused.isdisjoint(slot.consumers or ()))
    return replace(plan, decisions=decisions, slots=tuple(slots))


def _format_inexpressible(decision: Decision) -> str:
    """Say what of a decision's weight PT2E has no words for; "" if it can express it."""
    if decision.dtype_config is None or decision.qconfig is None:
        return ""
    observer: Any = decision.qconfig.weight()
    dtype = decision.dtype_config.weight_dtype
    if not is_observed_dtype(dtype) or dtype == torch.float16:
        return ""
    if dtype not in PLAIN_DTYPE:
        return f"a weight of {dtype} has no plain integer dtype"
    if getattr(observer, "qscheme", None) == torch.per_channel_affine_float_qparams:
        return "quantize_per_channel drops the fraction of a zero point, and the weight's zero points are real numbers"
    return ""


class _Request(NamedTuple):
    """One point that is observed."""

    point: _Point
    group: object
    """The points of one group are observed by one observer."""
    make: Callable[..., nn.Module]
    """Makes this observer."""


class _Bias(NamedTuple):
    """A bias on its way to its op, and the points of the input and the weight from which its scale is derived."""

    point: tuple[Node, Node]
    sources: tuple[_Point, _Point]


def _list_requests(calls: Calls, plan: Plan, request: Request) -> Iterator[_Request]:
    """Yield what a plan observes, as points of the program: a slot's values and edges, and the roots' weights."""
    for slot in plan.slots:
        value = calls.values[slot.value]
        if slot.consumers is None:
            yield _Request(value, slot.group, slot.make)
            continue
        for part in (part for name in slot.consumers for part in calls.parts[name]):
            if value in part.all_input_nodes:
                yield _Request((value, part), slot.group, slot.make)
    references, trained = references_of(request.config), qat_classes_of(request.config) if request.is_qat else {}
    for decision in plan.decisions:
        for weight, user in _find_weights(calls, decision, references):
            assert decision.qconfig is not None and decision.target is not None
            make, layer = decision.qconfig.weight, class_of(calls.draft.get_submodule(decision.target))
            yield _Request((weight, user), (weight, user), make if layer in trained else partial(_make_observer, make))


def _make_observer(make: Callable[..., nn.Module]) -> nn.Module:
    """Make what sees a weight and passes it on in float, as prepare does with a layer that it does not train."""
    made = make()
    return getattr(made, "activation_post_process", made)


def _find_weights(calls: Calls, decision: Decision, references: Collection[type]) -> Iterator[tuple[Node, Node]]:
    """Yield the weights of a decision's root module that its reference module quantizes. (CVT-02)"""
    dtypes = decision.dtype_config
    if dtypes is None or decision.target is None or not is_observed_dtype(dtypes.weight_dtype):
        return
    if class_of(layer_of(calls.draft.get_submodule(decision.target))) not in references:
        return
    for part in calls.parts[decision.root]:  # the layer's own op is the first; a batch norm has weights as well
        bias = arguments_of(part).get("bias")  # torchao names one that it makes of a batch norm after the weight
        held = [value for value in part.all_input_nodes if value.op == "get_attr" and value is not bias]
        weights = [value for value in held if str(value.target).rpartition(".")[2].startswith("weight")]
        if weights:
            yield from ((weight, part) for weight in weights)
            return


def _list_biases(calls: Calls, plan: Plan, requests: Collection[_Request]) -> Iterator[_Bias]:
    """Yield the biases of static ops whose input and weight are observed."""
    observed = {request.point for request in requests}
    for decision in plan.decisions:
        if decision.dtype_config is None or decision.dtype_config.is_dynamic:
            continue
        parts = calls.parts[decision.root]
        ends = ((value, part) for part in parts for value in part.all_input_nodes if value.op != "get_attr")
        source = next((point for end in ends for point in (end, end[0]) if point in observed), None)
        if source is None:
            continue
        for part in parts:
            named = arguments_of(part)
            weight, bias = named.get("weight"), named.get("bias")
            if isinstance(weight, Node) and isinstance(bias, Node) and (weight, part) in observed:
                yield _Bias((bias, part), (source, (weight, part)))


# -- annotations ---------------------------------------------------------------------------------------------------


def _annotate(order: dict[Node, float], requests: Collection[_Request], biases: Collection[_Bias]) -> None:
    """Write the annotations: in that order, the first point of a group has the spec that the others share."""
    found = {request.point: request for request in requests}
    first: dict[object, _Point] = {}
    reader = ObserverReader()
    for point in sorted(found, key=lambda each: _rank(each, order)):
        _, group, make = found[point]
        spec = _make_spec(make, reader) if group not in first else SharedQuantizationSpec(first[group])
        first.setdefault(group, point)
        node = point if isinstance(point, Node) else point[1]
        if isinstance(point, Node):
            _note(node).output_qspec = spec
        else:
            _note(node).input_qspec_map[point[0]] = spec
    for (bias, node), sources in biases:
        made: Any = found[sources[1]].make()
        is_per_channel = hasattr(getattr(made, "activation_post_process", made), "ch_axis")
        channels = len(bias.meta["val"]) if is_per_channel else None
        _note(node).input_qspec_map[bias] = _derive_spec(sources, channels)


def _note(node: Node) -> Any:
    """Return a node's annotation; it is made if it is absent."""
    return node.meta.setdefault(ANNOTATION, QuantizationAnnotation(allow_implicit_sharing=False, _annotated=True))


def _name_inputs_and_weights(model: GraphModule) -> None:
    """Let each annotation of a layer's op begin with its input and its weight; None: nothing is observed on the way.

    torchao takes the first two for those where it trains a convolution and its batch norm.
    """
    for node in model.graph.nodes:
        note, arguments = node.meta.get(ANNOTATION), arguments_of(node)
        first = [arguments.get(name) for name in ("input", "weight")]
        if note is not None and all(isinstance(value, Node) for value in first):
            own = note.input_qspec_map
            note.input_qspec_map = {**{value: own.get(value) for value in first}, **own}


def _rank(point: _Point, order: dict[Node, float]) -> tuple[float, int, int]:
    """Return a point's place in the order in which torchao reads annotations: a node's inputs, then its output."""
    if isinstance(point, Node):
        return order[point], 1, 0
    value, user = point
    return order[user], 0, user.all_input_nodes.index(value)


def _derive_spec(sources: tuple[_Point, _Point], channels: int | None) -> Any:
    """Return the spec of an int32 bias of scale s_x·s_w. ``channels``: of its scales; None: it has one."""
    return DerivedQuantizationSpec(
        derived_from=list(sources),
        derive_qparams_fn=partial(_multiply_scales, channels or 1),
        dtype=torch.int32,
        quant_min=-(2**31),
        quant_max=2**31 - 1,
        ch_axis=None if channels is None else 0,
        qscheme=torch.per_tensor_symmetric if channels is None else torch.per_channel_symmetric,
    )


def _multiply_scales(channels: int, observers: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Return the products of the scales of input and weight, one for each channel, and zero points of 0.

    The weight of a transposed convolution has scales for the channels of one group, which all groups share.
    """
    (x_scale, _), (weight_scale, _) = (observer.calculate_qparams() for observer in observers)
    products: Tensor = x_scale * weight_scale
    scale = products.repeat(channels // len(products))
    return scale, torch.zeros_like(scale, dtype=torch.int32)


def _make_spec(make: Callable[..., nn.Module], reader: ObserverReader) -> Any:
    facts = reader.read(make)
    return QuantizationSpec(
        dtype=facts.dtype,
        observer_or_fake_quant_ctr=_Maker(make),
        quant_min=facts.quant_min,
        quant_max=facts.quant_max,
        is_dynamic=facts.is_dynamic and facts.dtype != torch.float16,
    )


@dataclass(frozen=True, slots=True)
class _Maker:
    """A constructor as torchao calls it, with a spec's numbers, which the QConfig's own constructor knows already."""

    make: Callable[..., nn.Module]
    __name__ = "BackendConfigObserver"

    def with_args(self, **numbers: Any) -> _Maker:
        return self

    def __call__(self) -> nn.Module:
        made = self.make()
        return _FakeQuantize(made) if hasattr(made, "fake_quant_enabled") else _Observer(made)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Maker:
        return self


_READ = ("dtype", "quant_min", "quant_max", "qscheme", "ch_axis", "is_dynamic", "eps")
"""What convert_pt2e reads of an observer."""


class _Adapted:
    """The parts that both kinds of adapters have in common."""

    inner: Any
    """The QConfig's observer."""
    dtype: torch.dtype | None
    is_dynamic: bool
    scale: float
    zero_point: int

    def _adopt(self, inner: nn.Module) -> None:
        self.inner = inner
        observer: Any = getattr(inner, "activation_post_process", inner)
        for name in _READ:
            value = getattr(inner, name, getattr(observer, name, None))
            if value is not None:
                setattr(self, name, float(value) if name == "eps" else value)
        if (fixed := ObserverFacts.of(inner).fixed) is not None:  # for who reads the prepared program
            self.scale, self.zero_point = fixed
        if self.dtype == torch.float16:
            self.is_dynamic = False  # a cast while running, which PT2E writes as it does a static one

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)

    def calculate_qparams(self, **_: Any) -> Any:
        return self.inner.calculate_qparams()


class _Observer(_Adapted, ObserverBase):  # type: ignore[misc]
    """A QConfig's observer, as torchao recognizes one."""

    def __init__(self, inner: nn.Module) -> None:
        ObserverBase.__init__(self, None)
        self._adopt(inner)


class _FakeQuantize(_Adapted, FakeQuantizeBase):  # type: ignore[misc]
    """A QConfig's fake quantize, as torchao recognizes one."""

    def __init__(self, inner: nn.Module) -> None:
        FakeQuantizeBase.__init__(self)
        self._adopt(inner)

    def enable_fake_quant(self, enabled: bool = True) -> None:
        """Switch the QConfig's own fake quantize on or off."""
        self.inner.enable_fake_quant(enabled)

    def enable_observer(self, enabled: bool = True) -> None:
        """Switch the observer of the QConfig's own fake quantize on or off."""
        self.inner.enable_observer(enabled)
