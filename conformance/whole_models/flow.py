"""Whole models through the flow: a mapping that asks for each op's claim; then prepare, calibrate, convert.

Rules QCM-02, DTY-02, QAT-01, QAT-02.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from conformance.claims.claim import NO_WEIGHT, Claim, Flow
from conformance.claims.inputs import Batch
from conformance.claims.kinds import Kind
from conformance.claims.qconfigs import describe_misfit, qconfig_for
from conformance.machine.fault import raise_first
from conformance.stages.bench import Bench
from conformance.stages.fixed_grids import check_fixed_grids
from conformance.stages.meaning import run_in_float32, tensors_of
from conformance.stages.ranges import check_ranges
from conformance.stages.state import run_flow, show_graph
from conformance.stages.statistics import measure_decibels
from conformance.stages.unrounded import without_observers
from conformance.whole_models.flow_checks import check_prepared, check_reference, check_roundings
from refimpl import QConfig, QConfigMapping, prepare_fx, prepare_qat_fx
from refimpl.observers import is_quantized_dtype
from refimpl.patterns import Leaf, is_match_all
from reports.numbers import Number

TRAINING_STEPS = 3
RATE = 0.01
_KINDS = {Kind.STATIC: 0, Kind.FIXED: 0, Kind.DYNAMIC: 1, Kind.WEIGHT_ONLY: 2}
_Rank: TypeAlias = tuple[int, bool, bool, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSetup:
    """How a whole model is quantized: the flow ("ptq", "qat"), the dtype of activations, the weight scheme.

    ``is_exported``: in PT2E, as torch.export captures the model.
    """

    flow: Flow
    activation: torch.dtype
    scheme: str
    is_exported: bool = False

    def __str__(self) -> str:
        flow = "pt2e" if self.is_exported else self.flow
        return f"{flow}/{str(self.activation).removeprefix('torch.')}/{self.scheme}"


def activation_dtypes_of(claims: Iterable[Claim]) -> tuple[torch.dtype, ...]:
    """List the dtypes of activations with which weights are claimed to be quantized statically, in their order."""
    static = (claim.dtypes for claim in claims if claim.kind is Kind.STATIC)
    weighted = (dtypes.input_dtype for dtypes in static if is_quantized_dtype(dtypes.weight_dtype))
    return tuple(dict.fromkeys(dtype for dtype in weighted if dtype is not None))


def make_mapping(claims: Iterable[Claim], setup: ModelSetup, model: nn.Module) -> QConfigMapping:
    """Return a mapping with a key for the first op of each claimed pattern: the QConfig of the claim that fits best.

    Module classes that the model does not have are left out.

    Static with the setup's dtype of activations, else dynamic, else weight-only; with its weight scheme where that is
    claimed (transposed convolutions per tensor, as is usual). Everything else is left in float. An op without a weight
    also gets a weight constructor: it decides for a pattern that it ends (QCM-06).
    """
    present = {type(module) for module in model.modules()}
    chosen: dict[Leaf, tuple[_Rank, Claim]] = {}
    for claim in claims:
        rank = _rank(claim, setup)
        root = next(leaf for leaf in claim.ops if not is_match_all(leaf))
        is_absent = isinstance(root, type) and root not in present
        is_better = rank is not None and not is_absent and (root not in chosen or rank < chosen[root][0])
        if rank is not None and is_better and describe_misfit(claim) is None:
            chosen[root] = rank, claim
    best = sorted(chosen.values(), key=lambda ranked: ranked[0])
    weight = next((_qconfig_of(claim, setup).weight for _, claim in best if claim.scheme == setup.scheme), None)
    mapping = QConfigMapping()
    for root, (_, claim) in chosen.items():
        qconfig = _qconfig_of(claim, setup)
        if weight is not None and claim.scheme == NO_WEIGHT:
            qconfig = qconfig._replace(weight=weight)
        mapping.set_object_type(root, qconfig)
        given = claim.preparation
        if given.qconfigs is not None and claim.kind is Kind.FIXED:  # what stands before it: OBS-14
            mapping.set_global(given.choose_input_qconfig(claim.dtypes, is_qat=setup.flow == "qat"))
    return mapping


def _qconfig_of(claim: Claim, setup: ModelSetup) -> QConfig:
    """Return the QConfig of a claim; a static one is trained in QAT even where no class for training is named."""
    is_static = _KINDS[claim.kind] == 0
    return qconfig_for(replace(claim, flow=setup.flow) if is_static else claim)


def _rank(claim: Claim, setup: ModelSetup) -> _Rank | None:
    """Rank how well a claim fits a setup, best first; None: not at all."""
    kind = _KINDS.get(claim.kind)
    if kind is None or (kind == 0 and claim.dtypes.input_dtype != setup.activation):
        return None
    scheme = setup.scheme.replace("channel", "tensor") if claim.weight_axis else setup.scheme
    is_longer = isinstance(claim.entry.normal_pattern, tuple)
    return kind, is_longer, claim.scheme != scheme, claim.flow != setup.flow


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedModel:
    """A backend's reference model, which is a float model but for its roundings.

    ``float_db``: for each output, the ratio of the float model's (in QAT, of the trained one's) to the error, in dB.
    """

    reference: GraphModule
    float_db: list[Number]


def quantize_model(
    bench: Bench,
    model: nn.Module,
    claims: Sequence[Claim],
    setup: ModelSetup,
    batches: Sequence[Batch],
    train: Callable[[nn.Module], object] | None = None,
    *,
    mapping: QConfigMapping | None = None,
    is_bounded: bool = True,
) -> QuantizedModel:
    """Take a float model to the backend's reference model, calibrated on `batches`; in QAT it is trained before.

    ``train``: None: a few steps towards smaller outputs. ``mapping``: None: that of `make_mapping`. ``is_bounded``: as
    in `Bench.convert`. Raises FaultFound for what prepare or convert refuses, for a model that is not the float model
    any more (`flow_checks`), for another grid than one that a claim fixes (`check_fixed_grids`), and, in PTQ, for a
    grid that does not fit what calibration has seen (`check_ranges`).
    """
    is_qat = setup.flow == "qat"
    prepare = prepare_qat_fx if is_qat else prepare_fx
    custom = bench.preparation.prepare
    can_clip = is_qat or mapping is not None or bench.preparation.qconfigs is not None
    original = copy.deepcopy(model).eval()
    if mapping is None:
        mapping = make_mapping([replace(each, preparation=bench.preparation) for each in claims], setup, model)
    copies = [tuple(each.clone() for each in batch) for batch in batches]  # ops in place change them
    prepared = run_flow(
        "OBS-15", lambda: prepare(model.train(is_qat), mapping, copies[0], custom, backend_config=bench.config)
    )  # fmt: skip
    floating = without_observers(prepared)
    raise_first(show_graph(prepared, check_prepared(original, floating, copies[0], is_qat=is_qat)))
    if is_qat:
        (train or partial(_train, batches=batches))(prepared)
        floating = without_observers(prepared)
    prepared.eval()
    with torch.no_grad():
        for batch in copies:
            prepared(*(each.clone() for each in batch))
    reference = run_flow("CVT-01", lambda: bench.convert(prepared))
    faults = itertools.chain(
        check_fixed_grids(reference), check_reference(floating, reference, copies[0]),
        check_roundings(floating, reference, can_clip=can_clip), () if is_qat else check_ranges(reference, copies),
    )  # fmt: skip
    raise_first(show_graph(reference, faults))
    if not is_bounded:
        reference = run_flow("CVT-01", lambda: bench.convert(prepared, is_bounded=False))
    outputs = (run_in_float32(each, copies[0]) for each in (floating, reference))
    return QuantizedModel(reference=reference, float_db=measure_decibels(*outputs))


def _train(prepared: nn.Module, batches: Sequence[Batch]) -> None:
    for step in range(TRAINING_STEPS):
        outputs = tensors_of(prepared(*batches[step % len(batches)]))
        descend(prepared, torch.stack([output.square().mean() for output in outputs]).sum(), RATE)


def descend(model: nn.Module, loss: Tensor, rate: float) -> None:
    """Take one step of gradient descent, if anything leads to the loss.

    (torch.optim would do, but to import it takes longer than all else here.)
    """
    if not loss.requires_grad:
        return
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter.sub_(rate * gradient)
