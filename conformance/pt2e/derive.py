"""Deriving: the BackendConfig that a Quantizer amounts to, and a row for each pattern that it was probed with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch

from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.claim import dtype_config_text
from fx_quant_conformance.conformance.ops.fused_modules import root_of
from fx_quant_conformance.conformance.ops.table import WEIGHTED
from fx_quant_conformance.conformance.ops.variants import Arguments
from fx_quant_conformance.conformance.pt2e.candidates import (
    WITH_NUMBER,
    copy_entry,
    is_of_qat,
    list_compositions,
    list_entries,
    plan_candidate,
    probed_pattern,
)
from fx_quant_conformance.conformance.pt2e.claiming import (
    NO_INPUT,
    NOT_ANNOTATED,
    OUTPUT_LEFT,
    Derived,
    NoWordsError,
    derive_claim,
)
from fx_quant_conformance.conformance.pt2e.probe import Probe, Probed, Prober
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig
from fx_quant_conformance.refimpl.config.patterns import Pattern, pattern_name

_BETWEEN = "only between quantized ops"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRow:
    """What came of one pattern: its claim, or the reason why there is none."""

    pattern: str
    dtypes: str = ""
    """The dtype config's name, or ""."""
    schemes: tuple[str, ...] = ()
    """The schemes of the weight, if there is one."""
    notes: tuple[str, ...] = ()
    """What the config does not say of the claim."""
    reason: str = ""


def derive_config(
    quantizer: Any, name: str, *, is_qat: bool = False, globs: Sequence[str] = ("*",)
) -> tuple[BackendConfig, tuple[ProbeRow, ...]]:
    """Probe a torchao Quantizer with all patterns; return the config that it amounts to, and a row for each pattern.

    ``is_qat``: by prepare_qat_pt2e, in train mode; entries then name QAT modules. ``globs``: only patterns whose name
    matches one of these, such as ``nn.Conv2d*``. Entries are in the order of the rows. Compositions that none of
    torch's configs has are rows only if they are claimed. Raises ImportError without torchao.
    """
    entries = [entry for entry in list_entries() if _is_chosen(entry, globs) and (is_qat or not is_of_qat(entry))]
    prober = Prober(quantizer, is_qat=is_qat)
    outcomes = _derive(prober, entries, is_qat)
    roots = {pattern for pattern, outcome in outcomes.items() if isinstance(outcome, Derived)}
    compositions = [entry for entry in list_compositions(roots) if _is_chosen(entry, globs)]
    outcomes |= _derive(prober, compositions, is_qat)
    entries += [entry for entry in compositions if isinstance(outcomes[entry.normal_pattern], Derived)]
    counting = [
        entry
        for entry in entries
        if entry._num_tensor_args_to_observation_type and isinstance(outcomes[entry.normal_pattern], Derived)
    ]
    with_number = _derive(prober, counting, is_qat, WITH_NUMBER)
    config, rows = BackendConfig(name), list[ProbeRow]()
    for entry in entries:
        outcome = outcomes[entry.normal_pattern]
        if isinstance(outcome, Derived):
            completed = copy_entry(entry, is_qat=is_qat).set_observation_type(outcome.observation_type)
            if entry.normal_pattern in with_number:
                outcome = _count_tensors(completed, outcome, with_number[entry.normal_pattern])
            config.set_backend_pattern_config(completed.add_dtype_config(outcome.dtypes))
        rows.append(_make_row(entry, outcome))
    _name_roots(config)
    return config, tuple(rows)


def _count_tensors(entry: BackendPatternConfig, claim: Derived, with_number: Derived | str) -> Derived:
    """Set the observation types by the number of tensors; return the claim, with a note if it has two tensors only."""
    if isinstance(with_number, Derived) and with_number.dtypes == claim.dtypes:
        by_count = {1: with_number.observation_type, 2: claim.observation_type}
        entry._num_tensor_args_to_observation_type = entry._num_tensor_args_to_observation_type | by_count
        return claim
    reason = with_number if isinstance(with_number, str) else dtype_config_text(with_number.dtypes)
    return replace(claim, notes=(*claim.notes, f"with a number as operand: {reason}"))


def _is_chosen(entry: BackendPatternConfig, globs: Sequence[str]) -> bool:
    name = pattern_name(entry.normal_pattern)
    return any(fnmatchcase(name, glob) for glob in globs)


def _name_roots(config: BackendConfig) -> None:
    """Let entries of fused modules name the root module and its reference, where no entry of the config does.

    Convert asks all entries together. torch's configs name them once, in the root's own entry, which may be missing.
    """
    named = {entry.root_module for entry in config.configs}
    own = {entry.normal_pattern: entry for entry in list_entries()}
    for entry in config.configs:
        root = root_of(entry.normal_pattern)
        if root in WEIGHTED and root is not entry.normal_pattern and root not in named:
            entry.root_module = own[root].root_module
            entry.reference_quantized_module = own[root].reference_quantized_module


def _make_row(entry: BackendPatternConfig, outcome: Derived | str) -> ProbeRow:
    name = pattern_name(entry.normal_pattern)
    if isinstance(outcome, str):
        return ProbeRow(pattern=name, reason=outcome)
    schemes = (outcome.scheme,) if outcome.scheme else ()
    return ProbeRow(pattern=name, dtypes=dtype_config_text(outcome.dtypes), schemes=schemes, notes=outcome.notes)


def _derive(
    prober: Prober, entries: Sequence[BackendPatternConfig], is_qat: bool, changes: Arguments = MappingProxyType({})
) -> dict[Pattern, Derived | str]:
    """Return for each entry, by its normal pattern, its claim or the reason why there is none.

    ``changes``: arguments of the root that are not those of its base. Each pattern is probed alone. Those that leave
    something open are probed again between ops that are quantized.
    """
    patterns = {probed_pattern(entry): f"p{number}" for number, entry in enumerate(entries)}
    planned = {name: plan_candidate(pattern, changes) for pattern, name in patterns.items()}
    probes = {name: Probe.of(case) for name, case in planned.items() if isinstance(case, Case)}
    outcomes: dict[str, Derived | str] = {name: case for name, case in planned.items() if isinstance(case, str)}
    by_name = {patterns[probed_pattern(entry)]: entry for entry in reversed(entries)}
    for name, places in prober.probe(probes).items():
        outcomes[name] = _judge(by_name[name], places.alone, is_qat)
        if places.between is not None and _is_open(outcomes[name]):
            outcomes[name] = _choose(outcomes[name], _judge(by_name[name], places.between, is_qat))
    return {entry.normal_pattern: outcomes[patterns[probed_pattern(entry)]] for entry in entries}


def _judge(entry: BackendPatternConfig, probed: Probed, is_qat: bool) -> Derived | str:
    if probed.reading is None:
        return probed.failure
    names_weight = any(dtypes.weight_dtype is torch.float32 for dtypes in entry.dtype_configs)
    try:
        return derive_claim(entry, probed.reading, is_qat=is_qat, names_weight=names_weight)
    except NoWordsError as reason:
        return str(reason)


def _is_open(outcome: Derived | str) -> bool:
    """Tell whether a pattern between others may show more than alone."""
    return isinstance(outcome, str) and (outcome in (NOT_ANNOTATED, OUTPUT_LEFT) or NO_INPUT in outcome)


def _choose(alone: Derived | str, between: Derived | str) -> Derived | str:
    """Return the outcome of a pattern that was open alone."""
    if isinstance(between, Derived) and alone != OUTPUT_LEFT:
        return replace(between, notes=(_BETWEEN, *between.notes))
    says_nothing = isinstance(between, str) and (between == NOT_ANNOTATED or NO_INPUT in between)
    return alone if says_nothing else between


def count_claims(rows: Iterable[ProbeRow]) -> int:
    """Return how many rows are claims."""
    return sum(1 for row in rows if not row.reason)
