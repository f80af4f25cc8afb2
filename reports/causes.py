"""Claims grouped by cause: what one row of waivers covers, or one message but for its numbers, is read once."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence

from fx_quant_conformance.reports.findings import find_waiver_key
from fx_quant_conformance.reports.results import leading_check, message_of
from fx_quant_conformance.reports.schema import Check, ClaimResult

_NUMBER = re.compile(r"[-+]?\b\d+(?:\.\d+)?(?:e[-+]?\d+)?\b")
"""A number in a message; what is left without them is what two faults of one cause have in common."""


def find_cause(claim: ClaimResult, checks: Sequence[Check]) -> Hashable:
    """Return a key that is equal for claims with the same cause: waiver, or verdict, rule and message.

    The message counts without its numbers and without the case that it was seen in.
    """
    if claim.waiver is not None:
        return find_waiver_key(claim.waiver)
    lead = leading_check(checks)
    message = message_of(claim, lead)
    where = str(lead.evidence.get("where", "")) if lead else ""
    return (
        claim.verdict,
        lead.rule if lead else "",
        _NUMBER.sub("#", message.replace(f"{where}: ", "") if where else message),
    )
