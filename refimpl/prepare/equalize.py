"""Input-weight equalization of linear and convolution (rule EQL-01).

Where the channels of an op's input differ much in range, one scale for all fits few of them. Equalization multiplies
channel i by s[i] = sqrt(range of the weight's column i / range of channel i) and divides the column by it: the op
computes the same, and both ranges become their geometric mean. The factors go into the rows of the layer that computes
the input, if nothing but a ReLU stands between, else into a mul.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fx_quant_conformance.refimpl.config.qconfig import QConfig, QConfigMapping, QConfigResolver, as_qconfig_mapping
from fx_quant_conformance.refimpl.errors import QConfigError, warn_user
from fx_quant_conformance.refimpl.graph.graph_modules import free_names
from fx_quant_conformance.refimpl.graph.tracing import Places, attribute_of, is_observer, layer_of
from fx_quant_conformance.refimpl.legacy import nni, qint8
from fx_quant_conformance.refimpl.observers.observers import PerChannelMinMaxObserver
from fx_quant_conformance.refimpl.observers.qparams import PER_CHANNEL, PER_TENSOR, has_data, is_quantized_dtype
from fx_quant_conformance.refimpl.prepare.plan import Decision

EQUALIZATION = "refimpl_equalization"  # the key of a prepared model's meta that holds its Equalizations

# Ops that can be equalized: module class or function -> number of spatial dimensions after the input's channels.
SPATIAL_DIMENSIONS: Mapping[Any, int] = {
    nn.Linear: 0,
    nni.LinearReLU: 0,
    F.linear: 0,
    nn.Conv1d: 1,
    nni.ConvReLU1d: 1,
    F.conv1d: 1,
    nn.Conv2d: 2,
    nni.ConvReLU2d: 2,
    F.conv2d: 2,
    nn.Conv3d: 3,
    nni.ConvReLU3d: 3,
    F.conv3d: 3,
}
_POSITIONS = {"input": 0, "weight": 1, "bias": 2, "groups": 6}  # among the arguments of these functions
_RELUS = (nn.ReLU, F.relu, torch.relu, torch.relu_, "relu", "relu_")
_SCHEMES = dict(zip(PER_TENSOR, PER_CHANNEL, strict=False))  # per tensor -> per channel


class InputEqualizationObserver(PerChannelMinMaxObserver):
    """Keeps the range of every channel of an input, axis 1 or where its op has it; `qscheme` is per tensor. (EQL-01)"""

    def __init__(self, *, qscheme: torch.qscheme = torch.per_tensor_affine, **arguments: Any) -> None:
        if qscheme not in _SCHEMES:
            raise QConfigError(f"InputEqualizationObserver: qscheme must be per tensor, found {qscheme}")
        super().__init__(ch_axis=1, qscheme=_SCHEMES[qscheme], **arguments)

    def get_input_minmax(self) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest value of every channel; empty without data."""
        return self.min_val, self.max_val


class WeightEqualizationObserver(PerChannelMinMaxObserver):
    """Keeps the range of every column (axis 1) of a weight; arguments as for the input's observer. (EQL-01)"""

    def __init__(self, *, qscheme: torch.qscheme = torch.per_tensor_affine, **arguments: Any) -> None:
        super().__init__(ch_axis=1, qscheme=_SCHEMES.get(qscheme, qscheme), **{"dtype": qint8} | arguments)

    def get_weight_col_minmax(self) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest value of every column; empty without data."""
        return self.min_val, self.max_val


class EqualizationQConfig(NamedTuple):
    """How the channels of an op's input, and the columns of its weight, are observed for equalization. (EQL-01)

    A mapping of these is prepare_fx's `_equalization_config`. Taken by protocol; torch's fit.
    """

    input_activation: Callable[..., nn.Module] = nn.Identity
    """Makes an observer with ``get_input_minmax()``: two tensors (channels,)."""
    weight: Callable[..., nn.Module] = nn.Identity
    """Makes an observer with ``get_weight_col_minmax()``: two tensors (columns,)."""


default_equalization_qconfig = EqualizationQConfig(InputEqualizationObserver, WeightEqualizationObserver)


@dataclass(frozen=True, slots=True, kw_only=True)
class Equalization:
    """The decision about one op for which a mapping asks for equalization. (EQL-01)"""

    op: str
    source: str
    """The mapping's key."""
    reason: str
    """Why it is not equalized, or ""."""
    observer: str
    """The name of its input's equalization observer, or ""."""
    make_columns: Callable[..., nn.Module]
    """Makes its weight's observer for equalization."""
    make_weight: Callable[..., nn.Module]
    """Makes its weight's observer for qparams."""


def place_equalization(model: GraphModule, decisions: Iterable[Decision], mapping: object) -> tuple[Equalization, ...]:
    """Insert equalization observers, in place, when all other observers are in; return the decisions, and note them.

    `mapping`: a QConfigMapping of EqualizationQConfigs. Warns of an op that it asks for and that is not equalized.
    Raises QConfigError for another value in it, or one that makes no such observers.
    """
    accepted = [decision for decision in decisions if decision.dtype_config and decision.qconfig]
    nodes = {node.name: node for node in model.graph.nodes}
    quantized = {nodes[name] for decision in accepted for name in decision.nodes}
    resolver, places = QConfigResolver(_as_qconfigs(mapping)), Places(model)
    items = []
    for decision in accepted:
        root = nodes[decision.root]
        qconfig, source = resolver.resolve(places.object_types_of(root), places.name_of(root), places.order_of(root))
        dimensions = _dimensions_of(places, root)
        if qconfig is None or dimensions is None:
            continue
        if reason := next(_find_refusals(places, root, qconfig, quantized), ""):
            warn_user(f"Cannot equalize {root.name} (asked for by {source}): {reason}")
        observer = "" if reason else _insert_observers(model, root, qconfig, dimensions)
        makers = {"make_columns": qconfig.weight, "make_weight": cast(QConfig, decision.qconfig).weight}
        items.append(Equalization(op=root.name, source=source, reason=reason, observer=observer, **makers))
    model.meta[EQUALIZATION] = tuple(items)
    return tuple(items)


def _as_qconfigs(mapping: object) -> QConfigMapping:
    """Return the mapping with a QConfig for every EqualizationQConfig, resolved as all are. (QCM-02)"""
    qconfigs = QConfigMapping()
    for name, values in vars(as_qconfig_mapping(mapping)).items():
        is_table = isinstance(values, Mapping)
        setattr(qconfigs, name, {k: _as_qconfig(v) for k, v in values.items()} if is_table else _as_qconfig(values))
    return qconfigs


def _as_qconfig(value: Any) -> QConfig | None:
    makers = [getattr(value, name, None) for name in EqualizationQConfig._fields]
    if value is not None and not all(callable(make) and not isinstance(make, nn.Module) for make in makers):
        raise QConfigError(f"expected an EqualizationQConfig of two constructors (no instances), found {value!r}")
    return None if value is None else QConfig(value.input_activation, value.weight)


def _dimensions_of(places: Places, node: Node) -> int | None:
    """Return the number of spatial dimensions of an op that can be equalized, else None."""
    module = places.module_of(node)
    return SPATIAL_DIMENSIONS.get(node.target if module is None else type(module))


def _find_refusals(places: Places, root: Node, qconfig: QConfig, quantized: set[Node]) -> Iterator[str]:
    """Yield the reasons not to equalize an op: scaling would change other results, or is not possible."""
    if nn.Identity in qconfig:
        yield "its EqualizationQConfig has no observer for the input or for the weight"
    observer, module = _argument_of(root, "input"), places.module_of(root)
    if not _is_observer(observer):
        yield f"its input {observer} is not observed"
        return
    value, measured = observer.args[0], cast(Any, places.modules[str(observer.target)])
    readers = [user for reader in value.users for user in (reader.users if _is_observer(reader) else (reader,))]
    for reader in (user for user in readers if user in quantized and user is not root):  # rule: EQL-01
        yield f"its input {value} is part of a branch: {reader}, quantized too, reads it"
    if len(observer.users) > 1:
        yield f"its input {value} is read, as it is quantized, by {', '.join(map(str, observer.users))}"
    is_static = is_quantized_dtype(measured.dtype) and not getattr(measured, "is_dynamic", False)
    has_range = hasattr(getattr(measured, "activation_post_process", measured), "min_val")
    if is_static and not (has_range and measured.qscheme not in PER_CHANNEL):
        yield f"the observer of its input, a {type(measured).__name__}, has no range of the whole tensor to adjust"
    if module is None and not (_is_observer(_argument_of(root, "weight")) and _find_constant(root, "weight")):
        yield "its weight is computed, not observed, or read by others"
    if places.is_shared_state(root):
        yield f"its module {root.target} is called at several places"
    if (_argument_of(root, "groups", 1) if module is None else getattr(layer_of(module), "groups", 1)) != 1:
        yield "it is grouped: a column of its weight serves several input channels"


def _argument_of(node: Node, name: str, default: Any = None) -> Any:
    """Return an argument of a function, given by position or by keyword (PAT-08); "input" also of a module."""
    return node.kwargs.get(name, dict(enumerate(node.args)).get(_POSITIONS[name], default))


def _is_observer(value: Any) -> bool:
    if not isinstance(value, Node) or value.op != "call_module":
        return False
    model = value.graph.owning_module
    return model is not None and is_observer(str(value.target), model.get_submodule(str(value.target)))


def _find_constant(node: Node, name: str) -> Node | None:
    """Return the get_attr that an argument of a function reads, also through observers, if nothing else reads it."""
    value = _argument_of(node, name)
    while _is_observer(value) and len(value.users) == 1:
        value = value.args[0]
    return value if isinstance(value, Node) and value.op == "get_attr" and len(value.users) == 1 else None


def _insert_observers(model: GraphModule, root: Node, qconfig: QConfig, dimensions: int) -> str:
    """Insert the equalization observers of an op; return the name of its input's."""
    makers = {"weight": (qconfig.weight, "get_weight_col_minmax"), "input": (qconfig.activation, "get_input_minmax")}
    if root.op == "call_module":
        del makers["weight"]
    else:  # where torch's tools look for the weight of a function
        root.meta["target_dtype_info"] = {f"{part}_index": _POSITIONS[part] for part in ("weight", "bias")}
    name, device = "", next(model.parameters(), torch.empty(0)).device
    for argument, (make, protocol) in makers.items():
        observer, value = make(), _argument_of(root, argument)
        if not hasattr(observer, protocol):
            raise QConfigError(f"_equalization_config for {root.name}: {type(observer).__name__} has no {protocol}()")
        if isinstance(observer, InputEqualizationObserver):
            observer.ch_axis = -1 - dimensions
        name = next(free_names(model, f"{value.name}_equalization_process_"))
        model.add_module(name, observer.to(device).train(model.training))
        with model.graph.inserting_after(value):
            root.replace_input_with(value, model.graph.call_module(name, (value,)))
    return name


def convert_equalization(model: GraphModule) -> None:
    """Equalize a draft before its observers become quantizes, in place; equalization's observers are removed.

    Modules and tensors shared with other models are not changed. Warns of an observer without data, whose factors are
    1. Raises QConfigError for one whose channels are not the weight's columns.
    """
    plan = {item.observer: item for item in model.meta.get(EQUALIZATION, ()) if not item.reason}
    at = {next(iter(node.users)): node for node in model.graph.nodes if str(node.target) in plan}
    places, makers = Places(model), {op: plan[str(node.target)].make_weight for op, node in at.items()}
    columns = {op: _compute_factors(model, op, node, plan[str(node.target)]) for op, node in at.items()}
    rows: dict[Node, Tensor] = {}
    for op, node in at.items():
        observer: Any = node.args[0]
        value: Any = observer.args[0]
        _adjust_range(model, observer, places.modules[str(node.target)], columns[op])
        layer = _find_layer_before(places, value, makers)
        if layer is not None:
            rows[layer] = columns[op]  # rule: EQL-01
            continue
        name = next(free_names(model, f"{value.name}_equalization_scale"))
        model.register_buffer(name, columns[op].reshape(-1, *[1] * (_dimensions_of(places, op) or 0)))
        with model.graph.inserting_before(observer):
            scaled = model.graph.call_function(torch.mul, (value, model.graph.get_attr(name)))
        observer.replace_input_with(value, scaled)
    for added in [*at.values(), *(_argument_of(op, "weight") for op in at if op.op == "call_function")]:
        added.replace_all_uses_with(added.args[0])
        model.graph.erase_node(added)
    for op in {**columns, **rows}:
        _rescale(model, op, columns.get(op), rows.get(op), makers.get(op))


def _find_tensor(model: GraphModule, op: Node, name: str) -> Any:
    """Return an op's weight or bias; None for one that it lacks or that the graph computes."""
    if op.op == "call_module":
        return getattr(layer_of(model.get_submodule(str(op.target))), name)
    return attribute_of(model, str(constant.target)) if (constant := _find_constant(op, name)) else None


@torch.no_grad()
def _compute_factors(model: GraphModule, op: Node, node: Node, item: Equalization) -> Tensor:
    """Return the factors of the input's channels, one per column of the weight; 1 where a range is 0. (EQL-01)"""
    observer: Any = model.get_submodule(str(node.target))
    meter, weight = item.make_columns(), _find_tensor(model, op, "weight")
    meter.to(weight.device)(weight)
    (low, high), (bottom, top) = observer.get_input_minmax(), meter.get_weight_col_minmax()  # type: ignore[operator]
    if not has_data(low, high):
        warn_user(f"{node.target} has seen no data: {op.name} is equalized by factors of 1")
        return torch.ones_like(bottom, dtype=weight.dtype)
    rank = len(getattr(observer, "equalization_shape", ())) or weight.dim()  # torch's: it takes axis 1 for channels
    if low.shape != bottom.shape or rank != weight.dim():
        raise QConfigError(
            f"{node.target}, a {type(observer).__name__}, saw {low.numel()} channels of {rank} axes, the weight of "
            f"{op.name} has {bottom.numel()} columns: refimpl's InputEqualizationObserver knows the channels' axis"
        )
    scale = torch.sqrt((top - bottom) / (high - low))  # rule: EQL-01
    return torch.where(scale.isfinite() & (scale > 0), scale, 1).to(weight.dtype)


def _adjust_range(model: GraphModule, observer: Node, channels: Any, scale: Tensor) -> None:
    """Give the observer of an op's input, in a copy, the range of the scaled input."""
    copied = copy.deepcopy(model.get_submodule(str(observer.target)))
    inner: Any = getattr(copied, "activation_post_process", copied)
    low, high = channels.get_input_minmax()
    if has_data(low, high) and hasattr(inner, "min_val"):
        inner.min_val, inner.max_val = (low * scale).min(), (high * scale).max()  # rule: EQL-01
        model.set_submodule(str(observer.target), copied)


def _find_layer_before(places: Places, value: Node, equalized: Iterable[Node]) -> Node | None:
    """Return the layer whose rows can take the factors of `value`: it, and a ReLU of it, have no other user."""
    if value.op.startswith("call") and places.object_type_of(value) in _RELUS and len(value.users) == 1:
        value = _argument_of(value, "input")
    if _dimensions_of(places, value) is None or len(value.users) != 1 or places.is_shared_state(value):
        return None
    if value.op == "call_module":
        return value
    is_own = _find_constant(value, "weight") and (_argument_of(value, "bias") is None or _find_constant(value, "bias"))
    return value if is_own and (value in equalized or not _is_observer(_argument_of(value, "weight"))) else None


def _rescale(model: GraphModule, op: Node, column: Tensor | None, row: Tensor | None, make_weight: Any) -> None:
    """Divide the columns of an op's weight by `column`; multiply its rows, and its bias, by `row`. (EQL-01)"""
    module = copy.deepcopy(model.get_submodule(str(op.target))) if op.op == "call_module" else None
    for name, divisor in (("weight", column), ("bias", None)):
        tensor = _find_tensor(model, op, name)
        if tensor is None:
            continue
        scaled = tensor.detach()
        if divisor is not None:
            scaled = scaled * divisor.reciprocal().reshape(1, -1, *[1] * (scaled.dim() - 2))
        if row is not None:
            scaled = scaled * row.reshape(-1, *[1] * (scaled.dim() - 1))
        if module is not None:
            setattr(layer_of(module), name, nn.Parameter(scaled))
            continue
        constant: Any = _find_constant(op, name)
        constant.target = next(free_names(model, f"{constant.name}_equalized"))
        model.register_buffer(constant.target, scaled)
    if module is not None:
        model.set_submodule(str(op.target), module)
    elif _is_observer(weight := _argument_of(op, "weight")):  # the old weight's range is not the new one's
        model.set_submodule(str(weight.target), make_weight().to(_find_tensor(model, op, "weight").device))
