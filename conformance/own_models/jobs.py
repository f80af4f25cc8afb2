"""The jobs of ``--model``: one for each model that is handed in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from backends.base import Capabilities, Representation
from conformance.claims.claim import Claim
from conformance.machine.messages import Begin
from conformance.own_models.deployment import deploy
from conformance.own_models.given import load_given
from conformance.pipeline.job import Job
from conformance.stages.bench import Bench
from conformance.whole_models.flow import ModelSetup, activation_dtypes_of
from reports.schema import ModelResult
from reports.selection import OWN


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
    seed = bench.seed_for("model/own", spec)
    torch.default_generator.manual_seed(seed)
    yield from deploy(bench, name, claims, setup, partial(load_given, spec, seed))
