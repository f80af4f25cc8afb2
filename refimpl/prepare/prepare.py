"""prepare_fx and prepare_qat_fx: fuse, decide, then act on the decisions (rules OBS-01 to OBS-15, QAT, STD, CUS)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn.modules.conv import _ConvTransposeNd

from fx_quant_conformance.refimpl.config.backend_config import as_backend_config
from fx_quant_conformance.refimpl.config.custom_config import PrepareCustomConfig
from fx_quant_conformance.refimpl.config.forms import check_model
from fx_quant_conformance.refimpl.config.native import config_or_native
from fx_quant_conformance.refimpl.config.patterns import leaf_name
from fx_quant_conformance.refimpl.config.qconfig import QConfigMapping, as_qconfig_mapping, warn_unmatched_keys
from fx_quant_conformance.refimpl.errors import ConfigError, ModelError, blame, warn_user
from fx_quant_conformance.refimpl.fuse.fuse import fuse
from fx_quant_conformance.refimpl.graph.example_run import Examples
from fx_quant_conformance.refimpl.graph.graph_modules import Draft, can_be_saved
from fx_quant_conformance.refimpl.graph.in_place import trace_values
from fx_quant_conformance.refimpl.graph.invariants import check_graph
from fx_quant_conformance.refimpl.graph.modes import trace_modes
from fx_quant_conformance.refimpl.graph.modules import add_qconfig, copy_module, make_qat_module, swap_module
from fx_quant_conformance.refimpl.graph.tracing import (
    CONVERTED,
    TORCH_NOTES,
    Places,
    attribute_of,
    class_of,
    finish,
    keep_reads,
    list_reads,
    no_collection,
    notes_of,
)
from fx_quant_conformance.refimpl.observers.observers import Constructor, Observer, note_infinite
from fx_quant_conformance.refimpl.observers.qparams import is_quantized_dtype
from fx_quant_conformance.refimpl.prepare.decide import (
    Request,
    find_standalone,
    make_plan,
    qat_classes_of,
    quant_type_of,
)
from fx_quant_conformance.refimpl.prepare.equalize import place_equalization
from fx_quant_conformance.refimpl.prepare.plan import PLAN, Decision, Plan

PREPARED = "refimpl_prepared"  # the key of a prepared model's meta that holds its Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Convert's data from prepare, besides the plan. (CVT-12)"""

    references: Mapping[type[nn.Module], type[nn.Module]]
    mapping: QConfigMapping
    """It names types, so it can be pickled."""
    quantized_inputs: tuple[int, ...]
    quantized_outputs: tuple[int, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> Prepared:
        return self  # read, never changed: copies of a model share it

    def __reduce__(self) -> tuple[Any, ...]:
        kept = {root: kind for root, kind in self.references.items() if can_be_saved((root, kind))}  # rule: CVT-12
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        return partial(Prepared, **parts | {"references": kept}), ()


def references_of(config: object) -> dict[type[nn.Module], type[nn.Module]]:
    """Map root classes to reference classes: the two act only together. Takes torch's config as well. (CFG-11)"""
    return {  # rule: CFG-11
        entry.root_module: entry.reference_quantized_module
        for entry in as_backend_config(config).configs
        if entry.root_module is not None and entry.reference_quantized_module is not None
    }


def name_types(mapping: QConfigMapping) -> QConfigMapping:
    """Return the same mapping with readable names in the place of object types. (CVT-05, CVT-12)"""
    form = mapping.to_dict()
    form["object_type"] = [(leaf_name(kind), qconfig) for kind, qconfig in form["object_type"]]
    orders = form["module_name_object_type_order"]
    form["module_name_object_type_order"] = [(name, leaf_name(kind), *values) for name, kind, *values in orders]
    return QConfigMapping.from_dict(form)


def prepare_fx(
    model: nn.Module,
    qconfig_mapping: object,
    example_inputs: tuple[Any, ...] | Any = None,
    prepare_custom_config: object | None = None,
    _equalization_config: object | None = None,
    backend_config: object | None = None,
) -> GraphModule:
    """Trace and fuse a float model, and insert observers for post-training quantization, static, dynamic or mixed.

    `qconfig_mapping`: a QConfigMapping, which says what is quantized. `example_inputs`: the model's positional inputs,
    in a tuple or list, or the only one; a model in eval mode is run on copies of them once, for the ranks of its
    tensors, with a warning if that fails; None or (): not known. `prepare_custom_config`: a PrepareCustomConfig.
    `_equalization_config`: a QConfigMapping of EqualizationQConfigs; None: nothing is equalized (EQL-01).
    `backend_config`: a BackendConfig; None: torch's native one. Torch's objects and, with a FutureWarning, the dict
    forms are taken too (CFG-14).

    Returns a model to be run on calibration data, then converted; ``explain`` has its decision log. Ops that no
    pattern, QConfig or dtype config covers stay float without an error (DTY-06). The float model is not changed; its
    parameters are shared.

    Raises ModelError for a model that cannot be traced or fused, or example inputs that do not run where fusing needs
    a rank (FUS-06); ConfigError or QConfigError for bad arguments.
    """
    return _prepare(model, qconfig_mapping, example_inputs, prepare_custom_config, _equalization_config, backend_config)


def prepare_qat_fx(
    model: nn.Module,
    qconfig_mapping: object,
    example_inputs: tuple[Any, ...] | Any = None,
    prepare_custom_config: object | None = None,
    backend_config: object | None = None,
) -> GraphModule:
    """Trace and fuse a model, swap in QAT modules and insert fake quantizes, for training. (QAT-01, QAT-02)

    Arguments and errors are those of prepare_fx; the mapping is one for training, and the model in train mode. Returns
    a model to be trained, then converted. The float model's modules are not changed; its parameters are shared, and
    trained.
    """
    return _prepare(model, qconfig_mapping, example_inputs, prepare_custom_config, None, backend_config, is_qat=True)


@no_collection()
def _prepare(
    model: nn.Module,
    qconfig_mapping: object,
    example_inputs: Any,
    prepare_custom_config: object | None,
    equalization: object | None,
    backend_config: object | None,
    *,
    is_qat: bool = False,
) -> GraphModule:
    check_model("prepare", model)
    request = Request(
        config=config_or_native(backend_config),
        mapping=as_qconfig_mapping(qconfig_mapping),
        custom=PrepareCustomConfig.of(prepare_custom_config),
        is_qat=is_qat,
    )
    prepared = prepare(model, request, example_inputs, equalization=equalization)
    if backend_config is None:
        _warn_of_transposed(prepared)
    return prepared


def _warn_of_transposed(prepared: GraphModule) -> None:
    """Warn of a transposed convolution with weights per channel, which most engines of torch cannot pack. (LOW-01)"""
    for decision in prepared.meta[PLAN].decisions:
        module = prepared.get_submodule(decision.target) if decision.target and decision.dtype_config else None
        if isinstance(module, _ConvTransposeNd) and hasattr(decision.qconfig.weight(), "ch_axis"):  # rule: LOW-01
            warn_user(
                f"{decision.target} ({type(module).__name__}): the QConfig of {decision.source} observes its weight "
                "per channel, which fbgemm, x86 and onednn cannot pack: convert_fx leaves it in float there; take a "
                "weight observer per tensor, as the default mappings do"
            )


def prepare(
    model: nn.Module, request: Request, example_inputs: object, *, equalization: object | None = None
) -> GraphModule:
    """Take a model through tracing, fusing, deciding and inserting."""
    custom = request.custom
    leaf_names, leaf_classes = _find_leaves(custom)
    _refuse_prepared(model, leaf_names, leaf_classes)
    preserved = {name: getattr(model, name) for name in custom.preserved_attributes if hasattr(model, name)}
    draft = (trace_modes if request.is_qat else trace_values)(model, leaf_names, leaf_classes)
    targets = {node.target for node in draft.graph.nodes if node.op in ("call_function", "call_method")}
    examples = Examples(draft, example_inputs)
    if not model.training:
        examples.run()  # warns of inputs that do not run
    fuse(draft, request.config, is_qat=request.is_qat, examples=examples)
    orders = Places(draft).find_orders() if request.mapping.module_name_object_type_order_qconfigs else set()
    warn_unmatched_keys(request.mapping, model, targets, orders)  # rule: QCM-02 (calls are counted after fusing)
    plan = make_plan(draft, request, examples)
    _swap_modules(draft, plan, request)
    insert_observers(draft, plan)
    _check_dtypes(draft, plan, examples)
    equalized = () if equalization is None else place_equalization(draft, plan.decisions, equalization)  # rule: EQL-01
    check_graph(draft, "prepare")
    draft.meta[PREPARED] = Prepared(
        references=references_of(request.config),
        mapping=name_types(request.mapping),
        quantized_inputs=tuple(custom.input_quantized_indexes),
        quantized_outputs=tuple(custom.output_quantized_indexes),
    )
    prepared = finish(draft, draft.graph, draft, preserved)  # rule: CUS-03
    stacks = {node.name: node.meta.get("nn_module_stack") or {"": ("", type(model))} for node in prepared.graph.nodes}
    scopes = {name: next(reversed(stack.values())) for name, stack in stacks.items()}
    prepared.meta[TORCH_NOTES] = SimpleNamespace(  # as torch's tools read it; classes by name, as some cannot be saved
        node_name_to_scope={name: (scope, kind.__name__) for name, (scope, kind) in scopes.items()},
        equalization_node_name_to_qconfig={item.op: SimpleNamespace(weight=item.make_columns) for item in equalized},
    )
    return prepared


def _refuse_prepared(model: nn.Module, leaf_names: tuple[str, ...], leaf_classes: tuple[type, ...]) -> None:
    """Raise ModelError for a model that prepare or convert has made, or that would trace into a prepared one."""
    leaves: list[str] = []
    for name, part in model.named_modules():
        if name.startswith(tuple(leaves)) or name in leaf_names or type(part) in leaf_classes:
            leaves.append(f"{name}.")
        elif isinstance(part, GraphModule):
            notes = notes_of(part)
            stage = "converted" if CONVERTED in notes else "prepared" if {PREPARED, TORCH_NOTES} & notes.keys() else ""
            if stage == "prepared" or (stage and part is model):
                what = f"{type(model).__name__}'s submodule {name!r}" if name else type(model).__name__
                raise ModelError(f"prepare: {what} was {stage} already; give prepare the float model")


def _find_leaves(custom: PrepareCustomConfig) -> tuple[tuple[str, ...], tuple[type, ...]]:
    """Return the names and classes of the modules that are not traced into. (CUS-02, STD-01)"""
    observed = {kind for mapping in custom.float_to_observed_mapping.values() for kind in mapping}
    names = (*custom.non_traceable_module_names, *custom.standalone_module_names)
    return names, (*custom.non_traceable_module_classes, *custom.standalone_module_classes, *observed)


def _check_dtypes(model: Draft, plan: Plan, examples: Examples) -> None:
    """Warn of what is to be quantized and is not float32; raise ModelError where it can run in no form. (OBS-15)

    That is a weight of float64, or one with a bias. The dtypes of values are those of the example inputs only.
    """
    nodes, facts = {node.name: node for node in model.graph.nodes}, examples.known
    found: list[tuple[str, torch.dtype, bool]] = []  # with whether no form can run
    for decision in plan.decisions:
        if decision.target and decision.dtype_config and is_quantized_dtype(decision.dtype_config.weight_dtype):
            parameters = list(model.get_submodule(decision.target).named_parameters())
            has_bias, what = any("bias" in name for name, _ in parameters), f"the weight of {decision.target!r}"
            dtypes = [each.dtype for name, each in parameters if "weight" in name and each.dtype != torch.float32]
            found += ((what, dtype, has_bias or dtype == torch.float64) for dtype in dtypes)
    for slot in plan.slots:
        node, fact = nodes[slot.value], facts.get(nodes[slot.value])
        is_weight = node.op == "get_attr" and slot.role == "weight"
        dtype = attribute_of(model, str(node.target)).dtype if is_weight else getattr(fact, "dtype", torch.float32)
        if dtype == torch.float32 or not is_quantized_dtype(getattr(model._modules[slot.name], "dtype", None)):
            continue
        what = f"the weight {node.target!r}" if is_weight else f"{node.name!r}, with these example_inputs,"
        found.append((what, dtype, is_weight and dtype == torch.float64))
    odd = [row for row in found if row[1].is_floating_point]
    fatal = [row for row in odd if row[2]]
    if odd:
        what, dtype, _ = (fatal or odd)[0]
        more = f", and {len(odd) - 1} more are not float32" if len(odd) > 1 else ""
        text = f"prepare: {what} is {dtype}{more}; torch makes quantized tensors of float32 alone"
        if fatal:  # rule: OBS-15
            raise ModelError(f"{text}: call .float() on the model, or set None in the place of its QConfig")
        warn_user(f"{text}: a converted model can run in the decomposed form at most; call .float() on the model")


def _swap_modules(model: Draft, plan: Plan, request: Request) -> None:
    """Put observed, QAT and standalone modules in their places; set every module's QConfig. (QAT-01, CVT-08)

    The user's own modules are not changed: shallow copies get the QConfigs.
    """
    qat_classes = qat_classes_of(request.config) if request.is_qat else {}
    reads = list_reads(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    called = {node.name: str(node.target) for node in model.graph.nodes if node.op == "call_module"}
    for decision in plan.decisions:
        for target in (called[name] for name in decision.nodes if called.get(name) in modules):
            module = modules.pop(target)  # a module is swapped once
            qat_class = qat_classes.get(class_of(module))
            if decision.kind != "pattern" and decision.is_quantized:
                swap = _prepare_standalone if decision.kind == "standalone module" else _swap_custom
                replacement = swap(module, target, decision, request)
            elif qat_class is not None and decision.is_quantized and target == decision.target:
                replacement = make_qat_module(module, decision.qconfig, qat_class, where=target)  # rule: QAT-01
            else:
                replacement = add_qconfig(module, decision.qconfig)
            model.set_submodule(target, replacement)
    keep_reads(model, reads)


def _prepare_standalone(module: nn.Module, target: str, decision: Decision, request: Request) -> nn.Module:
    """Prepare a standalone module separately; its parent supplies the parts that its entry lacks. (STD-01)"""
    entry = find_standalone(request.custom, target, module)
    assert entry is not None
    inner = replace(  # rule: STD-01
        request,
        config=entry.backend_config or request.config,
        mapping=entry.qconfig_mapping or QConfigMapping().set_global(decision.qconfig),
        custom=entry.prepare_custom_config or PrepareCustomConfig(),
    )
    with blame(ModelError, f"standalone module {target!r}", "prepare"):
        prepared = prepare(module, inner, entry.example_inputs)
    result = next(node for node in reversed(prepared.graph.nodes) if node.op == "output").args[0]
    if inner.custom.output_quantized_indexes and not isinstance(result, Node):
        raise ConfigError(
            f"standalone module {target!r}: has output_quantized_indexes {inner.custom.output_quantized_indexes} and "
            f"returns {result}; only a module that returns one tensor can return it quantized"
        )
    return prepared


def _swap_custom(module: nn.Module, target: str, decision: Decision, request: Request) -> nn.Module:
    """Swap a custom module for its observed class. (CUS-01)"""
    assert decision.qconfig is not None
    to = request.custom.float_to_observed_mapping.get(quant_type_of(decision.qconfig), {}).get(class_of(module))
    if to is None:  # rule: CUS-01
        raise ConfigError(
            f"custom module {target!r}: float_to_observed_mapping has no class for {type(module).__name__} in the "
            f"QConfig's mode; found {request.custom.float_to_observed_mapping}"
        )
    return swap_module(module, decision.qconfig, to, where=target)


def insert_observers(model: Draft, plan: Plan) -> None:
    """Act on a plan, in place: one module per group of slots, one call per slot."""
    nodes: dict[str, Node] = {node.name: node for node in model.graph.nodes}
    visible: dict[Node, Node] = {}
    instances: dict[int, nn.Module] = {}
    first: dict[Any, nn.Module] = {}
    device = next((parameter.device for parameter in model.parameters()), None)
    for slot in plan.slots:
        if slot.group not in instances:
            instances[slot.group] = _make_observer(slot.make, first).train(model.training).to(device)
            _watch(instances[slot.group], slot.value)
        model.add_module(slot.name, instances[slot.group])
        value = visible.get(nodes[slot.value], nodes[slot.value])
        users = list(value.users) if slot.consumers is None else [nodes[user] for user in slot.consumers]
        with model.graph.inserting_after(value):
            observer = model.graph.call_module(slot.name, (value,))
        for user in users:
            user.replace_input_with(value, observer)
        if slot.consumers is None:
            visible[nodes[slot.value]] = observer
    model.meta[PLAN] = plan


def _watch(observer: nn.Module, value: str) -> None:
    """Let an observer name its value in warnings; torch's, whose range may not show it, note infinite values."""
    inner = getattr(observer, "activation_post_process", observer)
    if isinstance(inner, Observer):
        inner.observes = value
    elif hasattr(inner, "min_val"):
        like: Any = inner.min_val
        note = torch.zeros((), dtype=torch.bool, device=like.device)
        observer.register_buffer("saw_infinite", note, persistent=False)  # rule: OBS-18
        observer.register_forward_pre_hook(note_infinite)


def _make_observer(make: Any, first: dict[Any, nn.Module]) -> nn.Module:
    """Call a constructor. Its `first` observer is copied, which is faster, if all of it is refimpl's own."""
    if not isinstance(make, Constructor) or not isinstance(make.func, type):
        return make()  # type: ignore[no-any-return]
    if make not in first:
        first[make] = make()
        return first[make]
    is_own = all(type(part).__module__.startswith("fx_quant_conformance.refimpl.") for part in first[make].modules())
    return copy_module(first[make]) if is_own else make()
