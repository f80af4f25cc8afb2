"""Convert a prepared model to the reference model (rules CVT-01 to CVT-12).

One walk over the prepared graph writes the new one (``refimpl.convert.walk``).
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import GraphModule

from fx_quant_conformance.refimpl.config.custom_config import ConvertCustomConfig
from fx_quant_conformance.refimpl.config.forms import read_flag
from fx_quant_conformance.refimpl.convert.emit import Decomposed, Emitter, QuantizedTensors
from fx_quant_conformance.refimpl.convert.mapping import find_float_decisions
from fx_quant_conformance.refimpl.convert.walk import ConvertWalk
from fx_quant_conformance.refimpl.errors import ModelError, warn_user
from fx_quant_conformance.refimpl.graph.invariants import check_graph
from fx_quant_conformance.refimpl.graph.modes import MODE_DIFFERENCE
from fx_quant_conformance.refimpl.graph.modules import remove_qconfig
from fx_quant_conformance.refimpl.graph.tracing import CONVERTED, add_notes, draft_of, finish, no_collection, notes_of
from fx_quant_conformance.refimpl.prepare.equalize import EQUALIZATION, convert_equalization
from fx_quant_conformance.refimpl.prepare.grid_losses import find_losses, warn_of_losses
from fx_quant_conformance.refimpl.prepare.infinite import find_infinite_matches
from fx_quant_conformance.refimpl.prepare.plan import GRID_LOSSES, LEFT_FLOAT, PLAN, Plan
from fx_quant_conformance.refimpl.prepare.prepare import PREPARED, Prepared, references_of


def convert_to_reference_fx(
    graph_module: GraphModule,
    convert_custom_config: object | None = None,
    _remove_qconfig: bool = True,
    qconfig_mapping: object | None = None,
    backend_config: object | None = None,
) -> GraphModule:
    """Convert a prepared model to the reference model on torch's quantized tensors. (CVT-01)

    In the reference model every quantized op is written as dequantize, float op, quantize, with the qparams that were
    observed. The prepared model is not changed, and may be a copy, or saved and loaded (CVT-12).

    `convert_custom_config`: a ConvertCustomConfig. `_remove_qconfig`: leave no ``qconfig`` attributes (CVT-08).
    `qconfig_mapping`: prepare's, with None in the place of some values: these parts are left in float (CVT-05).
    `backend_config`: a BackendConfig; None: prepare's (CVT-10).

    Raises ModelError for a model that prepare_fx did not make, QConfigError for a mapping or observer that does not
    fit, ConfigError where the config cannot be executed.
    """
    is_bare = read_flag("_remove_qconfig", _remove_qconfig)
    form = QuantizedTensors
    return _warned(_convert(graph_module, convert_custom_config, qconfig_mapping, backend_config, is_bare, form))


def convert_to_reference_decomposed_fx(
    graph_module: GraphModule,
    convert_custom_config: object | None = None,
    qconfig_mapping: object | None = None,
    backend_config: object | None = None,
) -> GraphModule:
    """Convert a prepared model to the reference model on plain integer tensors. (CVT-07)

    It has ``torch.ops.quantized_decomposed`` ops, whose arguments are the qparams, the range and the plain dtype, such
    as ``torch.uint8``. Arguments and errors are those of convert_to_reference_fx; ``qconfig`` attributes stay.
    """
    form = Decomposed
    return _warned(_convert(graph_module, convert_custom_config, qconfig_mapping, backend_config, False, form))


def convert_unwarned(
    prepared: GraphModule, custom_config: object | None, qconfig_mapping: object | None, backend_config: object | None
) -> GraphModule:
    """Convert as convert_to_reference_fx does, for lowering: with QConfigs, and without warnings of grids."""
    return _convert(prepared, custom_config, qconfig_mapping, backend_config, False, QuantizedTensors)


def _warned(model: GraphModule) -> GraphModule:
    """Return a reference model, with warnings of what its grids lose. (OBS-19)"""
    warn_of_losses(notes_of(model)[GRID_LOSSES])
    return model


_convert_to_reference_decomposed_fx = convert_to_reference_decomposed_fx


@no_collection()
def _convert(
    prepared: GraphModule,
    custom_config: object | None,
    qconfig_mapping: object | None,
    backend_config: object | None,
    is_bare: bool,
    form: type[Emitter],
    is_left: bool = False,
) -> GraphModule:
    notes = notes_of(prepared)
    plan, state = notes.get(PLAN), notes.get(PREPARED)
    if not isinstance(plan, Plan) or not isinstance(state, Prepared):
        raise ModelError(f"convert: {type(prepared).__name__} was not made by refimpl's prepare_fx or prepare_qat_fx")
    if CONVERTED in notes:
        raise ModelError(f"convert: {type(prepared).__name__} was converted already, and convert takes a prepared one")
    if difference := notes.get(MODE_DIFFERENCE):  # rule: QAT-04
        warn_user(
            f"convert: forward has other ops in training than in deployment, first at {difference}; the result has "
            "those of the mode that the model was prepared in. Let a module decide by its mode, as nn.Dropout does"
        )
    if backend_config is not None:
        state = replace(state, references=references_of(backend_config))
    custom = ConvertCustomConfig.of(custom_config)
    preserved = {name: getattr(prepared, name) for name in custom.preserved_attributes if hasattr(prepared, name)}
    source = prepared
    if notes.get(EQUALIZATION):
        source = draft_of(prepared)
        convert_equalization(source)  # rule: EQL-01
    floating = find_float_decisions(plan, state.mapping, qconfig_mapping)
    infinite = find_infinite_matches(prepared, plan)
    floating |= infinite.keys()  # rule: OBS-18
    if is_left:  # rule: CVT-05
        floating = frozenset(decision.node for decision in plan.decisions)

    def convert_child(child: GraphModule, is_left: bool) -> GraphModule:
        return _convert(child, custom, None, None, False, form, is_left)

    walk = ConvertWalk(source, plan, state, custom, floating, form, convert_child)
    graph, attributes = walk.write()
    model = finish(attributes, graph, prepared, preserved=preserved or None)
    losses = find_losses(prepared.graph, plan, floating, walk.find_width)
    add_notes(model, {CONVERTED: True, LEFT_FLOAT: infinite, GRID_LOSSES: losses})
    check_graph(model, "convert")
    return remove_qconfig(model) if is_bare else model  # rule: CVT-08
