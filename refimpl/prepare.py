"""prepare_fx: fuse, decide, then insert the observers that were decided on (rules OBS-01 to OBS-15)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.ao.nn.intrinsic as nni
from torch import nn
from torch.fx import GraphModule, Node

from refimpl.backend_config import BackendConfig, as_backend_config
from refimpl.decide import Plan, Slot, make_plan
from refimpl.errors import ConfigError, ModelError, NotBuiltError
from refimpl.explain import PLAN
from refimpl.fuse import fuse
from refimpl.invariants import OBSERVER_PREFIX, check_graph
from refimpl.qconfig import QConfigMapping, as_qconfig_mapping
from refimpl.tracing import module_type, trace

PREPARED = "refimpl_prepared"  # the key under which a prepared model's meta keeps what convert needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What convert must know of prepare: the config and mapping in force."""

    backend_config: BackendConfig
    qconfig_mapping: QConfigMapping

    def __deepcopy__(self, memo: dict[int, Any]) -> Prepared:
        return self  # read, never changed: copies of a model share it


def prepare_fx(
    model: nn.Module,
    qconfig_mapping: object,
    example_inputs: tuple[Any, ...] | Any = None,
    prepare_custom_config: object | None = None,
    _equalization_config: object | None = None,
    backend_config: object | None = None,
) -> GraphModule:
    """Trace and fuse a float model in eval mode, and insert observers for static post-training quantization.

    The float model is not changed; its parameters are shared. Run the result on calibration inputs, then convert it.
    Raises ModelError for a model in train mode or one that cannot be traced, ConfigError or QConfigError for bad
    arguments, NotBuiltError for what refimpl does not execute yet.
    """
    if model.training:  # rule: FUS-01
        raise ModelError(
            f"prepare_fx needs a model in eval mode, found {type(model).__name__} in train mode: call .eval()"
        )
    if backend_config is None:
        raise ConfigError("prepare_fx: pass backend_config; refimpl has no default backend")
    for name, value in (
        ("prepare_custom_config", prepare_custom_config),
        ("_equalization_config", _equalization_config),
    ):
        if value is not None:
            raise NotBuiltError(f"prepare_fx: {name} is not built yet; found {value!r}")
    config = as_backend_config(backend_config)
    return prepare(trace(model), config, as_qconfig_mapping(qconfig_mapping))


def prepare(traced: GraphModule, config: BackendConfig, mapping: QConfigMapping) -> GraphModule:
    """Fuse a traced model, decide, and insert the observers. The traced model is used up."""
    fused = fuse(traced, config, is_qat=False)
    mapping = _for_fused_classes(mapping, fused)
    plan = make_plan(fused, config, mapping)
    prepared = insert_observers(fused, plan)
    prepared.meta[PREPARED] = Prepared(backend_config=config, qconfig_mapping=mapping)
    return prepared


def insert_observers(model: GraphModule, plan: Plan) -> GraphModule:
    """Act on a plan: one module per group of slots, one call per slot. Changes the graph of `model` and returns it."""
    nodes: dict[str, Node] = {node.name: node for node in model.graph.nodes}
    visible: dict[Node, Node] = {}
    for slot in plan.slots:
        name = f"{OBSERVER_PREFIX}{slot.group}"
        if not hasattr(model, name):
            model.add_module(name, slot.make())
        value = nodes[slot.value]
        _insert(model, slot, name, visible.get(value, value), nodes)
        if slot.consumers is None:
            visible[value] = next(reversed(visible.get(value, value).users))
    model.recompile()
    model.meta[PLAN] = plan
    check_graph(model, "prepare")
    return model


def _insert(model: GraphModule, slot: Slot, name: str, value: Node, nodes: Mapping[str, Node]) -> None:
    with model.graph.inserting_after(value):
        observer = model.graph.call_module(name, (value,))
    consumers = list(value.users) if slot.consumers is None else [nodes[user] for user in slot.consumers]
    for user in consumers:
        if user is not observer:
            user.replace_input_with(value, observer)


def _for_fused_classes(mapping: QConfigMapping, model: GraphModule) -> QConfigMapping:
    """Let object_type settings of a float class hold for the classes that it was fused into. (QCM-05)

    A setting of the fused class itself wins. Of the fused parts, the root decides, unless any is explicitly None.
    """
    by_type = dict(mapping.object_type_qconfigs)
    for module in model.modules():
        if isinstance(module, nni._FusedModule) and type(module) not in by_type:  # type: ignore[attr-defined]
            kinds = [module_type(part) for part in module.children()]
            settings = [by_type[kind] for kind in kinds if kind in by_type]
            if settings:
                by_type[type(module)] = None if None in settings else settings[0]  # rule: QCM-05, QCM-07
    result = QConfigMapping()
    vars(result).update(vars(mapping))
    result.object_type_qconfigs = by_type
    return result
