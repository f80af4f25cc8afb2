"""Merging: what several Quantizers of one backend amount to, such as one for each flow, as one BackendConfig.

A BackendConfig has no words for a dtype config of one flow: an entry of a module that names its QAT module, and one of
an op without a weight, are claimed for both. What only one flow has is noted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass

from fx_quant_conformance.conformance.claims.claim import dtype_config_text, has_weight
from fx_quant_conformance.conformance.ops.fused_modules import MEMBERS
from fx_quant_conformance.conformance.pt2e.candidates import is_of_qat
from fx_quant_conformance.conformance.pt2e.claiming import NOT_ANNOTATED
from fx_quant_conformance.conformance.pt2e.derive import ProbeRow
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, DTypeConfig
from fx_quant_conformance.refimpl.config.patterns import pattern_name

_ONE_FLOW = "in one flow only, for which a config has no words"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one Quantizer amounts to."""

    name: str
    """What notes call it."""
    is_qat: bool
    """Whether it was asked for training."""
    config: BackendConfig
    rows: tuple[ProbeRow, ...]


@dataclass(frozen=True, slots=True)
class _Said:
    """What one part says of one pattern: an entry, which has one dtype config, or None and the row's reason."""

    part: Part
    row: ProbeRow
    entry: BackendPatternConfig | None

    @property
    def dtypes(self) -> tuple[DTypeConfig, ...]:
        return () if self.entry is None else tuple(self.entry.dtype_configs)


def merge_parts(name: str, parts: Sequence[Part]) -> tuple[BackendConfig, tuple[ProbeRow, ...]]:
    """Return one config of all parts, and one row for each pattern; entries are in the order of the rows.

    The dtype configs of a pattern are in the order of the parts. Where both flows were probed, an entry names its QAT
    module if both have the same dtype configs; else it has those of PTQ. An op without a weight has those that both
    flows have, and so has a fused module, if there are any: its parts claim PTQ by themselves. Notes say what is left
    out. Entries of QAT modules that no entry names are left out.
    """
    said = dict[str, list[_Said]]()
    for part in parts:
        entries = {pattern_name(entry.normal_pattern): entry for entry in part.config.configs}
        for row in part.rows:
            said.setdefault(row.pattern, []).append(_Said(part, row, entries.get(row.pattern)))
    schemes = tuple(sorted({scheme for part in parts for row in part.rows for scheme in row.schemes}))
    has_both = len({part.is_qat for part in parts}) > 1
    merged = [_merge(several, schemes, has_both) for several in said.values()]
    if not all(part.is_qat for part in parts):
        named = {entry.qat_module for entry, _ in merged if entry is not None}
        merged = [_leave_unnamed(entry, row, named) for entry, row in merged]
    config = BackendConfig(name).set_backend_pattern_configs([entry for entry, _ in merged if entry is not None])
    return config, tuple(row for _, row in merged)


def _merge(
    several: Sequence[_Said], schemes: tuple[str, ...], has_both: bool
) -> tuple[BackendPatternConfig | None, ProbeRow]:
    """Return the entry that the parts amount to, if any, and its row.

    ``schemes``: those of all patterns. ``has_both``: both flows were probed. A part without a row makes no claim.
    """
    pattern = several[0].row.pattern
    claims = [each for each in several if each.entry is not None]
    kinds = [each for each in claims if not each.dtypes[0].is_dynamic] or claims
    if not claims:
        return None, ProbeRow(pattern=pattern, reason=_join_reasons(several))
    assert kinds[0].entry is not None
    entry, notes = copy(kinds[0].entry), list(_merge_notes(claims))
    if len({each.entry.observation_type for each in kinds if each.entry is not None}) > 1:
        return None, ProbeRow(pattern=pattern, reason="the Quantizers observe its output in different ways")
    kept = _list_dtypes(claims)
    flows = [[each for each in several if each.part.is_qat is is_qat] for is_qat in (False, True)]
    if has_both and not is_of_qat(entry):
        in_ptq, in_qat = map(_list_dtypes, flows)
        kept = [dtypes for dtypes in in_ptq if dtypes in in_qat]
        trained = [each.entry.qat_module for each in flows[1] if each.entry is not None]
        is_fused = entry.normal_pattern in MEMBERS
        if has_weight(entry) and not (is_fused and kept):
            kept = in_ptq
        entry.qat_module = trained[0] if trained and set(kept) <= set(in_qat) else None
        if not kept:
            return None, ProbeRow(pattern=pattern, reason=f"{_ONE_FLOW}: {_join_reasons(several)}")
        if set(in_ptq) != set(in_qat):
            flow, others = ("training", flows[1]) if kept == in_ptq else ("PTQ", flows[0])
            notes.append(f"in {flow}: {_spell(_list_dtypes(others)) or _join_reasons(others) or NOT_ANNOTATED}")
    entry.dtype_configs = kept
    used = {dtypes: _list_schemes(each for each in claims if dtypes in each.dtypes) for dtypes in kept}
    notes += [f"{_spell([d])}: {', '.join(own)} only" for d, own in used.items() if 0 < len(own) < len(schemes)]
    return entry, ProbeRow(pattern=pattern, dtypes=_spell(kept), schemes=_list_schemes(claims), notes=tuple(notes))


def _leave_unnamed(
    entry: BackendPatternConfig | None, row: ProbeRow, named: Collection[object]
) -> tuple[BackendPatternConfig | None, ProbeRow]:
    """Leave out the entry of a QAT module that no entry names: it would be claimed for PTQ."""
    if entry is None or not is_of_qat(entry) or entry.normal_pattern in named:
        return entry, row
    return None, ProbeRow(pattern=row.pattern, reason="no entry names this QAT module")


def _list_dtypes(several: Iterable[_Said]) -> list[DTypeConfig]:
    return list(dict.fromkeys(dtypes for each in several for dtypes in each.dtypes))


def _list_schemes(several: Iterable[_Said]) -> tuple[str, ...]:
    return tuple(sorted({scheme for each in several for scheme in each.row.schemes}))


def _spell(several: Iterable[DTypeConfig]) -> str:
    return " and ".join(map(dtype_config_text, several))


def _merge_notes(claims: Sequence[_Said]) -> Iterator[str]:
    """Yield each note once, behind the names of the parts that have it, or the kind of claims, unless all do."""
    noted = dict[str, list[_Said]]()
    for each in claims:
        for note in each.row.notes:
            noted.setdefault(note, []).append(each)
    kinds: dict[str, list[_Said]] = {"static": [], "dynamic": []}
    for each in claims:
        kinds["dynamic" if each.dtypes[0].is_dynamic else "static"].append(each)
    for note, those in noted.items():
        kind = next((name for name, members in kinds.items() if members == those), "")
        names = kind or ", ".join(each.part.name for each in those)
        yield note if len(those) == len(claims) else f"{names}: {note}"


def _join_reasons(several: Sequence[_Said]) -> str:
    """Return the reasons, each behind the names of the parts that give it, unless all give the same."""
    given = dict[str, list[str]]()
    for each in several:
        given.setdefault(each.row.reason or _spell(each.dtypes), []).append(each.part.name)
    return "; ".join(text if len(given) == 1 else f"{', '.join(names)}: {text}" for text, names in given.items())
