"""All mutants: ``python -m tests.mutation`` runs these (docs/detection-power.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from importlib import import_module

from fx_quant_conformance.conformance.claims.claim import enumerate_claims
from fx_quant_conformance.conformance.run.options import select_ids
from tests.mutants import config_faults as config_faults  # it and the next enter theirs into reference_faults.MUTANTS
from tests.mutants import (
    context_faults,
    evidence_faults,
    fixed_grid_faults,
    flow_faults,
    honest,
    pattern_faults,
    qparams_faults,
    reference_faults,
    requantize_kinds,
    runtimes,
)
from tests.mutants import model_faults as model_faults  # it enters its into flow_faults.MUTANTS
from tests.mutants import reference_run_faults as reference_run_faults
from tests.mutants.fault_table import FAULTS, RATIO, Fault
from tests.mutants.integer_faults import multiplier
from tests.mutants.integer_kernels import SAMPLE, IntegerBackend, Make, varied
from tests.mutation.mutant import Mutant
from tests.support.torchao import ABSENCE

LADDER = (12, 16)


def _integer(fault: Fault) -> Mutant:
    """A fault of integer kernels, on the claims in which its step runs: in all others the kernels are honest."""
    backend = IntegerBackend()
    every = enumerate_claims(backend.backend_config(), backend.capabilities())
    static = [claim for claim in every if claim.dtypes.input_dtype is not None and not claim.dtypes.is_dynamic]
    touched = [claim.id for claim in static if claim.pattern in fault.patterns]
    sampled = select_ids([claim.id for claim in every], SAMPLE)
    return Mutant(
        group=fault.group,
        name=fault.name,
        make=partial(IntegerBackend, fault.kernels, **fault.capabilities),
        rules=(fault.rule, *fault.also),
        claims=tuple(touched),
        size=fault.size,
        in_full=tuple(each for each in touched if each in sampled),
    )


def _integer_faults() -> Iterator[Mutant]:
    """Those that are found wherever they touch (tests/mutation/test_detection.py), and finer ones."""
    for fault in FAULTS:
        yield _integer(fault)
    for fault in requantize_kinds.FINE:
        yield _integer(fault)
    for name, kernels, size in _fine():
        yield _integer(Fault(group="scale", name=name, kernels=kernels, patterns=RATIO, size=size))


def _fine() -> Iterator[tuple[str, Make, float | None]]:
    for bits in LADDER:
        kernels = varied("rescale", lambda honest, total, ratio, e=2.0**-bits: honest(total, ratio * (1 + e)))
        yield f"rescale ratio off by 2^-{bits}", kernels, 2.0**-bits
    yield "15-bit multiplier", varied("rescale", multiplier(15)), None


def _quantizer_faults() -> Iterable[Mutant]:
    """Those of Quantizers, where torchao can be used: importing their module needs it."""
    return () if ABSENCE else import_module("tests.mutants.quantizer_faults").MUTANTS


MUTANTS: tuple[Mutant, ...] = (
    *_integer_faults(),
    *context_faults.MUTANTS,
    *reference_faults.MUTANTS,
    *flow_faults.MUTANTS,
    *pattern_faults.MUTANTS,
    *qparams_faults.MUTANTS,
    *fixed_grid_faults.MUTANTS,
    *evidence_faults.MUTANTS,
    *runtimes.MUTANTS,
    *honest.MUTANTS,
    *_quantizer_faults(),
)
