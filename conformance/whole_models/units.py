"""A model that is judged as one unit, and its way through the flow to a reference model. (QAT-01, QAT-02)"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import nn
from torch.fx import GraphModule

from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.claims.inputs import Batch
from fx_quant_conformance.conformance.machine.fault import raise_first
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.fixed_grids import check_fixed_grids
from fx_quant_conformance.conformance.stages.meaning import run_in_float32
from fx_quant_conformance.conformance.stages.ranges import check_ranges
from fx_quant_conformance.conformance.stages.state import run_flow, show_graph
from fx_quant_conformance.conformance.stages.statistics import measure_decibels
from fx_quant_conformance.conformance.stages.unrounded import without_observers
from fx_quant_conformance.conformance.whole_models.flow_checks import (
    blame_hooks,
    check_prepared,
    check_reference,
    check_repeats,
    check_roundings,
)
from fx_quant_conformance.conformance.whole_models.setups import ModelSetup, make_mapping
from fx_quant_conformance.conformance.whole_models.training import train_briefly
from fx_quant_conformance.refimpl import QConfigMapping, prepare_fx, prepare_qat_fx
from fx_quant_conformance.reports.numbers import Number


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUnit:
    """A model that is judged as a whole: one of the suite's, a drawn one, or one that is handed in."""

    id: str
    model: nn.Module
    """The float model."""
    setup: ModelSetup
    claims: Sequence[Claim]
    """Those of the config, of which the mapping is made."""
    calibration: Sequence[Batch]
    draw: Callable[[GraphModule], Sequence[Batch]]
    """Gives the inputs on which a reference model is judged."""
    mapping: QConfigMapping | None = None
    """Its own; None: that of `make_mapping`."""
    train: Callable[[nn.Module, Sequence[Batch]], object] = train_briefly
    """Trains the prepared model in QAT, with the calibration batches."""
    is_bounded: bool = True
    """As in `Bench.convert`."""
    takes_apart: bool = False
    """Whether it is always judged pattern by pattern as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedModel:
    """A backend's reference model, which is a float model but for its roundings."""

    reference: GraphModule
    float_db: list[Number]
    """For each output, the ratio of the float model's (in QAT, of the trained one's) to the error, in dB."""


def quantize_model(bench: Bench, unit: ModelUnit) -> QuantizedModel:
    """Take a float model to the backend's reference model; in QAT it is trained before it is calibrated.

    Raises FaultFound for what prepare or convert refuses, for a model that is not the float model any more
    (`flow_checks`), for another grid than one that a claim fixes (`check_fixed_grids`), and, in PTQ, for a grid that
    does not fit what calibration has seen (`check_ranges`).
    """
    model, setup, is_qat = unit.model, unit.setup, unit.setup.flow == "qat"
    prepare, custom = (prepare_qat_fx if is_qat else prepare_fx), bench.preparation.prepare
    original = copy.deepcopy(model).eval()
    claims = [replace(each, preparation=bench.preparation) for each in unit.claims]
    mapping = unit.mapping or make_mapping(claims, setup, model)
    batches = [tuple(each.clone() for each in batch) for batch in unit.calibration]  # ops in place change them
    prepared = run_flow(
        "OBS-15", lambda: prepare(model.train(is_qat), mapping, batches[0], custom, backend_config=bench.config)
    )
    floating = without_observers(prepared)
    raise_first(show_graph(prepared, check_prepared(original, floating, batches[0], is_qat=is_qat)))
    if is_qat:
        unit.train(prepared, unit.calibration)
        floating = without_observers(prepared)
    state = {name: buffer.clone() for name, buffer in floating.named_buffers()}
    prepared.eval()
    with torch.no_grad():
        for batch in batches:
            prepared(*(each.clone() for each in batch))
        for name, buffer in prepared.named_buffers():
            if name in state and not torch.equal(buffer, state[name]):  # the reference model begins as the float model
                buffer.copy_(state[name])
    reference = run_flow("CVT-01", lambda: bench.convert(prepared))
    can_clip = is_qat or unit.mapping is not None or bench.preparation.qconfigs is not None
    faults = chain(
        check_fixed_grids(reference),
        check_reference(floating, reference, batches[0]),
        check_roundings(floating, reference, can_clip=can_clip),
        () if is_qat else check_ranges(reference, batches),
    )
    raise_first(show_graph(reference, blame_hooks(original, faults)))
    if not unit.is_bounded:
        reference = run_flow("CVT-01", lambda: bench.convert(prepared, is_bounded=False))
    raise_first(check_repeats(reference, batches[0]))
    outputs = (run_in_float32(each, batches[0]) for each in (floating, reference))
    return QuantizedModel(reference=reference, float_db=measure_decibels(*outputs))
