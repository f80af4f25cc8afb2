"""All mutants: ``python -m conformance.mutation`` runs these (docs/detection-power.md)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import config_faults
import flow_faults
import honest
import reference_faults
from integer_faults import FAULTS, Fault, multiplier, varied
from integer_kernels import CLAIMS, IN_FULL, IntegerBackend

from conformance.claims import enumerate_claims
from conformance.mutation.mutant import Mutant
from conformance.options import select_ids

LADDER = (12, 16)


def _touched(fault: Fault) -> tuple[str, ...]:
    """Of the claims of the full profile those in which the fault's step runs; in all others the kernels are honest."""
    backend = IntegerBackend()
    claims = enumerate_claims(backend.backend_config(), backend.capabilities())
    chosen = select_ids([claim.id for claim in claims], IN_FULL)
    return tuple(claim.id for claim in claims if claim.id in chosen and claim.pattern in fault.patterns)


def _integer_faults() -> Iterator[Mutant]:
    """Those that are found wherever they touch (tests/conformance/test_detection.py), and finer ones."""
    for fault in FAULTS:
        make = partial(IntegerBackend, fault.kernels, **fault.capabilities)
        yield Mutant(
            group=fault.group, name=fault.name, make=make, rules=(fault.rule, *fault.also), claims=CLAIMS,
            in_full=_touched(fault), size=fault.size,
        )  # fmt: skip
    for bits in LADDER:
        kernels = varied("rescale", lambda honest, total, ratio, e=2.0**-bits: honest(total, ratio * (1 + e)))
        yield Mutant(
            group="scale", name=f"rescale ratio off by 2^-{bits}", make=partial(IntegerBackend, kernels),
            rules=("NUM-03",), claims=CLAIMS, in_full=IN_FULL, size=2.0**-bits,
        )  # fmt: skip
    yield Mutant(
        group="scale", name="15-bit multiplier", make=partial(IntegerBackend, varied("rescale", multiplier(15))),
        rules=("NUM-03",), claims=CLAIMS, in_full=IN_FULL,
    )  # fmt: skip


MUTANTS: tuple[Mutant, ...] = (
    *_integer_faults(),
    *reference_faults.MUTANTS,
    *config_faults.MUTANTS,
    *flow_faults.MUTANTS,
    *honest.MUTANTS,
)
