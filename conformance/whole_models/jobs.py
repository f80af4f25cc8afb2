"""Whole models through the flow and compared with the oracle (rules NUM-03, QAT-02, LOW-04).

There is one job for each model (architectures.py) and each way to quantize it (setups.py); judging.py judges it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import nn
from torch.fx import GraphModule

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.claim import Claim, enumerate_claims
from fx_quant_conformance.conformance.claims.inputs import Batch, draw_calibration_inputs, draw_static_inputs
from fx_quant_conformance.conformance.machine.messages import Begin
from fx_quant_conformance.conformance.oracle.grids import placeholder_grids
from fx_quant_conformance.conformance.pipeline.job import Job
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.whole_models import digits
from fx_quant_conformance.conformance.whole_models.architectures import ARCHITECTURES, Architecture
from fx_quant_conformance.conformance.whole_models.judging import judge_model
from fx_quant_conformance.conformance.whole_models.setups import EXTENTS, ModelSetup, activation_dtypes_of, setups_of
from fx_quant_conformance.conformance.whole_models.units import ModelUnit
from fx_quant_conformance.refimpl import BackendConfig
from fx_quant_conformance.refimpl.config.patterns import Leaf
from fx_quant_conformance.reports.schema import Measurement, ModelResult

RunModel: TypeAlias = Callable[[tuple[Claim, ...], ModelSetup, Bench], Iterator[Begin | ModelResult | Measurement]]
"""Takes a model through the flow in one way."""
DIRECTED_INPUTS = 3
"""Directed inputs of a model: a random one, both ends in turn, close to the high end."""


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


def _run(
    architecture: Architecture, claims: tuple[Claim, ...], setup: ModelSetup, bench: Bench
) -> Iterator[Begin | ModelResult]:
    """Take one model through the flow and judge it."""
    started, name = time.perf_counter(), f"model/{architecture.name}/{setup}"
    torch.default_generator.manual_seed(bench.seed_for(name))
    case = architecture.case()
    unit = unit_of(name, case.build(), case, claims, setup)
    judged = yield from judge_model(bench, unit)
    yield judged.make_row(time.perf_counter() - started)


def unit_of(name: str, model: nn.Module, case: Case, claims: Sequence[Claim], setup: ModelSetup) -> ModelUnit:
    """Return the unit of a case's model, with calibration inputs from torch's generator."""
    return ModelUnit(
        id=name,
        model=model,
        calibration=draw_calibration_inputs(case),
        claims=claims,
        setup=setup,
        draw=partial(_draw, case),
    )


def _draw(case: Case, reference: GraphModule) -> list[Batch]:
    drawn = draw_static_inputs(case, placeholder_grids(reference), directed=DIRECTED_INPUTS, random=1)
    return [batch for _, batch in drawn]
