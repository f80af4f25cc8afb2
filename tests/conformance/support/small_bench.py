"""A bench that is quick to run, and claims to run on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from fx_quant_conformance.conformance.claims.claim import Claim, enumerate_claims
from fx_quant_conformance.conformance.claims.effort import Effort
from fx_quant_conformance.conformance.stages.bench import Bench
from tests.mutants.integer_kernels import IntegerBackend


class Altered(IntegerBackend):
    """The honest integer backend, with single methods replaced."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        super().__init__()
        for name, method in methods.items():
            setattr(self, name, method)


def small_bench(backend: IntegerBackend | None = None, seed: int = 0) -> Bench:
    """A bench that tries two cases of a claim, on three inputs each."""
    bench = Bench(backend or Altered(), seed=seed, profile="quick")
    bench.effort = Effort(cases=2, directed=3, further=3, random=0)
    return without_shares(bench)


def without_shares(bench: Bench) -> Bench:
    """A bench for which each claim is the only one on its op, and shares its cases with none."""
    bench.shares = {}
    return bench


@cache
def small_claims() -> dict[str, Claim]:
    backend = IntegerBackend()
    return {claim.id: claim for claim in enumerate_claims(backend.backend_config(), backend.capabilities())}


def claim_on(pattern: str, flow: str = "ptq", dtype: str = "static:in=quint8") -> Claim:
    found = small_claims().values()
    return next(c for c in found if c.pattern == pattern and c.flow == flow and c.dtype_config.startswith(dtype))


ADD, CAT = "operator.add", "torch.cat"
