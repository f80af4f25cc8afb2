"""What a claim's pattern is, read off the tables of ops and of the oracle."""

from __future__ import annotations

from typing import Any

from conformance.claims.claim import Claim
from conformance.ops.fused_modules import root_of
from conformance.ops.table import WEIGHTED
from conformance.oracle.error_bounds import MOVES
from conformance.oracle.table import rule_of
from refimpl import ObservationType
from refimpl.patterns import leaves


def moves_only(claim: Claim) -> bool:
    """Tell whether the pattern shares its observer and only moves or selects values. (NUM-05)"""
    shares = claim.entry.observation_type is ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
    return shares and all(map(op_moves, leaves(claim.entry.normal_pattern)))


def op_moves(op: Any) -> bool:
    """Tell whether an op only moves or selects values. (NUM-05)"""
    rule = rule_of(op)
    return rule is not None and rule.arithmetic == MOVES


def is_weighted_module(claim: Claim) -> bool:
    """Tell whether the pattern's root is a module that holds a weight, or a fused one with such a module inside.

    A vendor's own module is one if the entry names it as ``root_module``.
    """
    root = root_of(next(leaves(claim.entry.normal_pattern)))
    is_own_root = root is claim.entry.root_module and root in own_modules_of(claim)
    return isinstance(root, type) and (root in WEIGHTED or is_own_root)


def own_modules_of(claim: Claim) -> tuple[type, ...]:
    """Return the classes of a pattern's modules that are not torch's own: tracing would go into them."""
    kinds = [leaf for leaf in leaves(claim.entry.normal_pattern) if isinstance(leaf, type)]
    return tuple(kind for kind in kinds if not kind.__module__.startswith("torch."))
