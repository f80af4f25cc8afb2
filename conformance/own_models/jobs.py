"""The jobs of ``--model``: one for each model that is handed in."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import torch

from fx_quant_conformance.backends.base import Capabilities, Representation
from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.machine.fault import Fault
from fx_quant_conformance.conformance.machine.messages import Begin
from fx_quant_conformance.conformance.oracle.grids import place_on_grids
from fx_quant_conformance.conformance.own_models.capturing import capture, find_obstacle, translate_mapping
from fx_quant_conformance.conformance.own_models.given import (
    GivenModel,
    ModelSpecError,
    load_given,
    settle,
)
from fx_quant_conformance.conformance.own_models.measuring import measure_model
from fx_quant_conformance.conformance.pipeline.job import Job
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.whole_models.judging import JudgedModel, judge_model, make_failed_check
from fx_quant_conformance.conformance.whole_models.setups import ModelSetup, activation_dtypes_of
from fx_quant_conformance.conformance.whole_models.units import ModelUnit
from fx_quant_conformance.reports.schema import ModelResult
from fx_quant_conformance.reports.selection import OWN
from fx_quant_conformance.reports.verdicts import Verdict

JUDGED_BATCHES = 2
"""Number of batches, the example inputs first, on which the model and its patterns are judged."""


def jobs(
    specs: Sequence[str], claims: tuple[Claim, ...], capabilities: Capabilities, representation: Representation
) -> tuple[Job, ...]:
    """Return jobs for each spec of a single model, ``model/own/<spec>/<setup>``.

    In PTQ, one for each dtype of activations with which weights are claimed statically (float32 if there is none, where
    only dynamic and weight-only claims count), with the last weight scheme. A model with a QConfigMapping of its own is
    quantized by that in each. A backend that takes exported programs has them through PT2E as well.
    """
    dtypes = activation_dtypes_of(claims) or (torch.float32,)
    setups = [
        ModelSetup(flow="ptq", activation=dtype, scheme=capabilities.weight_schemes[-1], is_exported=is_exported)
        for is_exported in ((False, True) if representation is Representation.EXPORTED else (False,))
        for dtype in dtypes
    ]
    return tuple(
        Job(id=name, run=partial(_run, name, spec, claims, setup))
        for spec in dict.fromkeys(specs)
        for setup in setups
        for name in (f"{OWN}{spec}/{setup}",)
    )


def _run(
    name: str, spec: str, claims: tuple[Claim, ...], setup: ModelSetup, bench: Bench
) -> Iterator[Begin | ModelResult]:
    """Take a model to the backend; yield its row once it is judged, and again with what else is measured.

    Each step, in which the user's code runs, is announced. What is wrong with the model itself leaves it UNEXERCISED.
    """
    seed, started = bench.seed_for("model/own", spec), time.perf_counter()
    torch.default_generator.manual_seed(seed)
    try:
        yield Begin(stage="load")
        given = settle(load_given(spec, seed))
        yield Begin(stage="capture")
        unit = _make_unit(bench, name, claims, setup, given)
        judged = yield from judge_model(bench, unit)
    except ModelSpecError as error:
        fault = Fault(rule="", verdict=Verdict.UNEXERCISED, message=str(error))
        judged = JudgedModel(check=make_failed_check(name, fault))
    yield judged.make_row(time.perf_counter() - started)
    if judged.quantized is not None:
        yield Begin(stage="measure")
        deployment = measure_model(bench, given, judged.quantized.reference, setup, judged.check)
        yield replace(judged.make_row(time.perf_counter() - started), deployment=deployment)


def _make_unit(bench: Bench, name: str, claims: Sequence[Claim], setup: ModelSetup, given: GivenModel) -> ModelUnit:
    """Capture the model as prepare takes it, with the mapping that it has itself. Raises ModelSpecError.

    What torch.fx cannot trace, or takes as one op that no entry names, torch.export captures.
    """
    model, mapping = copy.deepcopy(given.model), given.qconfig_mapping
    obstacle = "" if setup.is_exported else find_obstacle(model, bench.config)
    if setup.is_exported or obstacle:
        try:
            model = capture(given, bench.config)
        except ModelSpecError as error:
            raise ModelSpecError(f"{obstacle}; {error}" if obstacle else str(error)) from error
        mapping = None if mapping is None else translate_mapping(model, mapping)
    others = (batch for batch in given.calibration if not all(map(torch.equal, batch, given.example_inputs)))
    judged = [given.example_inputs, *islice(others, JUDGED_BATCHES - 1)]
    return ModelUnit(
        id=name,
        model=model,
        claims=claims,
        setup=setup,
        mapping=mapping,
        is_bounded=False,
        takes_apart=True,
        calibration=list(given.calibration) or [given.example_inputs],
        draw=lambda reference: [place_on_grids(reference, batch) for batch in judged],
    )
