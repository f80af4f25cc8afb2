"""What a claim's pattern is, read off the tables of ops and of the oracle."""

from __future__ import annotations

from conformance.claims.claim import Claim
from conformance.ops.table import WEIGHTED, root_of
from conformance.oracle.error_bounds import MOVES
from conformance.oracle.table import ROWS
from refimpl import ObservationType
from refimpl.patterns import leaves


def moves_only(claim: Claim) -> bool:
    """Tell whether the pattern shares its observer and only moves or selects values. (NUM-05)"""
    shares = claim.entry.observation_type is ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
    return shares and all(leaf in ROWS and ROWS[leaf].verifier == MOVES for leaf in leaves(claim.entry.normal_pattern))


def is_weighted_module(claim: Claim) -> bool:
    """Tell whether the pattern's root is a module that holds a weight, alone or inside of a fused one."""
    root = root_of(next(leaves(claim.entry.normal_pattern)))
    return isinstance(root, type) and root in WEIGHTED
