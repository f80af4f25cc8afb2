"""prepare_fx: fuse, decide, then insert the observers that were decided on (rules OBS-01 to OBS-15)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from torch.fx import GraphModule, Node

from refimpl.backend_config import BackendConfig
from refimpl.decide import Plan, Slot, make_plan
from refimpl.errors import reject_unbuilt
from refimpl.explain import PLAN
from refimpl.fuse import checked_config, fuse
from refimpl.invariants import OBSERVER_PREFIX, check_graph
from refimpl.patterns import pattern_name
from refimpl.qconfig import QConfigMapping, as_qconfig_mapping
from refimpl.tracing import Draft, no_collection, trace

PREPARED = "refimpl_prepared"  # the key under which a prepared model's meta keeps what convert needs


class Claim(NamedTuple):
    """What convert reads of a config's entry. (CVT-12)

    Unlike the entry itself it can be pickled: torch's fuser methods, and some functions in its patterns, are closures.
    """

    pattern: str
    dtype_configs: list[dict[str, Any]]
    root_module: type[nn.Module] | None
    reference_quantized_module: type[nn.Module] | None


def claims_of(config: BackendConfig) -> tuple[Claim, ...]:
    """Return a config's claims in order: two configs with the same claims convert alike. (CVT-10, CVT-12)"""
    return tuple(
        Claim(
            pattern_name(entry.normal_pattern),
            [dtype_config.to_dict() for dtype_config in entry.dtype_configs],
            entry.root_module,
            entry.reference_quantized_module,
        )
        for entry in config.configs
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What convert must know of prepare: the config's claims and the mapping in force."""

    claims: tuple[Claim, ...]
    qconfig_mapping: QConfigMapping

    def __deepcopy__(self, memo: dict[int, Any]) -> Prepared:
        return self  # read, never changed: copies of a model share it


@no_collection()
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
    config = checked_config("prepare_fx", model, backend_config)
    reject_unbuilt("prepare_fx", prepare_custom_config=prepare_custom_config, _equalization_config=_equalization_config)
    is_sequence = isinstance(example_inputs, (tuple, list))
    inputs = None if example_inputs is None else tuple(example_inputs) if is_sequence else (example_inputs,)
    return prepare(trace(model), config, as_qconfig_mapping(qconfig_mapping), inputs)


def prepare(
    traced: Draft, config: BackendConfig, mapping: QConfigMapping, example_inputs: tuple[Any, ...] | None = None
) -> GraphModule:
    """Fuse a traced model, decide, and insert the observers. The traced model is used up."""
    fuse(traced, config, is_qat=False, example_inputs=example_inputs)
    insert_observers(traced, make_plan(traced, config, mapping))
    traced.meta[PREPARED] = Prepared(claims=claims_of(config), qconfig_mapping=mapping)
    return traced.finish()


def insert_observers(model: Draft, plan: Plan) -> None:
    """Act on a plan, in place: one module per group of slots, one call per slot."""
    nodes: dict[str, Node] = {node.name: node for node in model.graph.nodes}
    visible: dict[Node, Node] = {}
    for slot in plan.slots:
        name = f"{OBSERVER_PREFIX}{slot.group}"
        if not hasattr(model, name):
            model.add_module(name, slot.make().train(model.training))
        value = nodes[slot.value]
        _insert(model, slot, name, visible.get(value, value), nodes)
        if slot.consumers is None:
            visible[value] = next(reversed(visible.get(value, value).users))
    model.meta[PLAN] = plan
    check_graph(model, "prepare")


def _insert(model: GraphModule, slot: Slot, name: str, value: Node, nodes: Mapping[str, Node]) -> None:
    with model.graph.inserting_after(value):
        observer = model.graph.call_module(name, (value,))
    consumers = list(value.users) if slot.consumers is None else [nodes[user] for user in slot.consumers]
    for user in consumers:
        if user is not observer:
            user.replace_input_with(value, observer)
