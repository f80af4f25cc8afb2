"""Whole models through the flow and compared with the oracle (rules NUM-03, QAT-02, LOW-04).

There is one job for each model (architectures.py) and each way to quantize it (flow.py); verify.py judges it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from backends.base import Capabilities
from conformance.claims.claim import Claim, Flow, enumerate_claims
from conformance.claims.inputs import draw_calibration_inputs, draw_static_inputs
from conformance.machine.fault import FaultFound
from conformance.oracle.grids import placeholder_grids
from conformance.pipeline.job import Job
from conformance.stages.bench import Bench
from conformance.whole_models import digits
from conformance.whole_models.architectures import ARCHITECTURES, Architecture
from conformance.whole_models.flow import ModelSetup, activation_dtypes_of, quantize_model
from conformance.whole_models.verify import make_failed_check, make_model_result, verify_model
from refimpl import BackendConfig
from refimpl.patterns import Leaf
from reports.numbers import Number
from reports.schema import Measurement, ModelResult

RunModel: TypeAlias = Callable[[tuple[Claim, ...], ModelSetup, Bench], Iterator[ModelResult | Measurement]]
"""Takes a model through the flow in one way."""
DIRECTED_INPUTS = 3
"""Directed inputs of a model: a random one, both ends in turn, close to the high end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """What a profile runs: models of any size or small ones, flows, how many of the weight schemes."""

    takes_all: bool
    flows: tuple[Flow, ...]
    schemes: int


EXTENTS = {
    "quick": Extent(takes_all=False, flows=("ptq",), schemes=1),
    "full": Extent(takes_all=True, flows=("ptq", "qat"), schemes=1),
    "stress": Extent(takes_all=True, flows=("ptq", "qat"), schemes=4),
}


def jobs(config: BackendConfig, capabilities: Capabilities, profile: str) -> tuple[Job, ...]:
    """List the jobs of a profile: one for each setup and each model whose needs the config claims.

    A model with needs that are claimed statically runs only in the dtypes of activations of such claims.
    """
    claims, extent = enumerate_claims(config, capabilities), EXTENTS[profile]
    claimed = {leaf for claim in claims for leaf in claim.ops}
    setups = setups_of(claims, capabilities, extent)
    static = {dtype: _static_leaves_of(claims, dtype) for dtype in activation_dtypes_of(claims)}
    anywhere = frozenset[Leaf]().union(*static.values())
    runs: list[tuple[str, frozenset[Leaf], RunModel]] = [
        (f"model/{each.name}", frozenset(each.needs), partial(_run, each))
        for each in ARCHITECTURES
        if (extent.takes_all or each.is_small) and claimed.issuperset(each.needs)
    ]
    if extent.takes_all and claimed.issuperset(digits.NEEDS):
        runs.append(("model/digits", frozenset(digits.NEEDS), digits.run))
    return tuple(
        Job(id=f"{name}/{setup}", run=partial(run, claims, setup))
        for name, needs, run in runs
        for setup in setups
        if needs.isdisjoint(anywhere) or not needs.isdisjoint(static[setup.activation])
    )


def _static_leaves_of(claims: Iterable[Claim], dtype: torch.dtype) -> frozenset[Leaf]:
    """Return the ops of patterns that are claimed statically with activations of a dtype."""
    static = [claim for claim in claims if claim.dtypes.input_dtype == dtype and not claim.dtypes.is_dynamic]
    return frozenset(leaf for claim in static for leaf in claim.ops)


def setups_of(claims: Iterable[Claim], capabilities: Capabilities, extent: Extent) -> list[ModelSetup]:
    """List the ways to quantize a whole model, up to an extent."""
    ways = itertools.product(extent.flows, activation_dtypes_of(claims), capabilities.weight_schemes[-extent.schemes :])
    return [ModelSetup(flow=flow, activation=activation, scheme=scheme) for flow, activation, scheme in ways]


def _run(
    architecture: Architecture, claims: tuple[Claim, ...], setup: ModelSetup, bench: Bench
) -> Iterator[ModelResult]:
    """Take one model through the flow and judge it."""
    started = time.perf_counter()
    name = f"model/{architecture.name}/{setup}"
    torch.default_generator.manual_seed(bench.seed_for(name))
    case, float_db = architecture.case(), list[Number]()
    try:
        made = quantize_model(bench, case.build(), claims, setup, draw_calibration_inputs(case))
        reference, float_db = made.reference, made.float_db
        torch.default_generator.manual_seed(bench.seed_for(name, "inputs"))
        drawn = draw_static_inputs(case, placeholder_grids(reference), directed=DIRECTED_INPUTS, random=1)
        check = verify_model(bench, name, reference, [batch for _, batch in drawn])
    except FaultFound as found:
        check = make_failed_check(name, found.fault)
    yield make_model_result(check, time.perf_counter() - started, float_db=float_db)
