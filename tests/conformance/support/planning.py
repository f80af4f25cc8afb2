"""Claims of the native configs, and the cases that are planned for them."""

from __future__ import annotations

from functools import cache
from typing import Any

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.backends.torch_engines.tables import native_config
from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.claim import Claim, enumerate_claims
from fx_quant_conformance.conformance.claims.kinds import Kind
from fx_quant_conformance.conformance.claims.plan import plan_cases


@cache
def claims_of(name: str) -> tuple[Claim, ...]:
    """The claims of a native config, with one weight scheme."""
    return enumerate_claims(native_config(name), Capabilities())  # type: ignore[arg-type]


def claim_on(pattern: str, backend: str = "qnnpack", *, flow: str = "ptq", kind: Kind = Kind.STATIC) -> Claim:
    found = (claim for claim in claims_of(backend) if (claim.pattern, claim.flow) == (pattern, flow))
    return next(claim for claim in found if claim.kind is kind)


def planned(claim: Claim, limit: int | None = None, **capabilities: Any) -> tuple[Case, ...]:
    cases = plan_cases(claim, Capabilities(**capabilities), limit=limit)
    assert not isinstance(cases, str), cases
    return cases


def names_of(claim: Claim, limit: int | None = None, **capabilities: Any) -> list[str]:
    return [case.name for case in planned(claim, limit, **capabilities)]
