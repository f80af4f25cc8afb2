"""The HTML report: one self-contained file, readable without JavaScript, failures first.

All that the template shows is made here as data; the template only lays it out. The page forbids itself any
request and any script but its own, so text that comes from a backend stays text.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from jinja2 import Environment, PackageLoader, StrictUndefined

from reports.results import Check, Claim, Fact, Model, Results, Verdict, leading_check
from reports.terminal import lsb

OUTPUTS_SHOWN = 48
VALUE_WIDTH = 160
_OWN_PLACE = {"case", "expected", "found", "index", "qparams", "attribution", "float_ops"}
_OUTCOMES = ("error", "fail", "pass", "skip")  # the first that occurs at a stage is the stage's outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimView:
    """A claim with everything that is shown about it; `column` is its dtype config's D number."""

    claim: Claim
    checks: tuple[Check, ...]
    anchor: str
    column: str

    @property
    def label(self) -> str:
        """What tells it from the other claims of its pair."""
        return self.claim.scheme if self.claim.flow == "ptq" else f"{self.claim.scheme} {self.claim.flow}"

    @property
    def lead(self) -> Check | None:
        return leading_check(self.checks)

    @property
    def message(self) -> str:
        return (self.lead.message if self.lead else "") or self.claim.reason

    @property
    def told(self) -> tuple[Check, ...]:
        """The checks worth a paragraph: failed, or with evidence; the leading one first."""
        notable = [c for c in self.checks if c.failed or c.evidence or c is self.lead]
        return tuple(sorted(notable, key=lambda c: (c is not self.lead, c.verdict.rank)))

    @property
    def stages(self) -> dict[str, str]:
        """Stage → outcome, over all the rules checked at that stage."""
        found: dict[str, list[str]] = {}
        for check in self.checks:
            found.setdefault(check.stage, []).append(check.outcome)
        return {stage: min(outcomes, key=_OUTCOMES.index) for stage, outcomes in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Rows under named columns; what a row lacks is an empty cell."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the template gets beside the results."""

    claims: tuple[ClaimView, ...]
    failures: tuple[ClaimView, ...]
    waived: tuple[ClaimView, ...]
    quality: tuple[ClaimView, ...]
    unexercised: Mapping[str, tuple[ClaimView, ...]]
    columns: Mapping[str, str]
    matrix: Mapping[str, Mapping[str, tuple[ClaimView, ...]]]
    models: tuple[Model, ...]
    measured: Mapping[str, tuple[Mapping[str, object], ...]]


def render_html(results: Results) -> str:
    """The report as HTML; a pure function of the results."""
    environment = _environment()
    style, script = (environment.get_template(f"report.{kind}.j2").render() for kind in ("css", "js"))
    return environment.get_template("report.html.j2").render(
        results=results, report=build_report(results), style=style, script=script,
        style_hash=_csp_hash(style), script_hash=_csp_hash(script),
    )  # fmt: skip


def anchor(claim_id: str) -> str:
    """The fragment under which a claim or model is found in every report."""
    return "c-" + hashlib.sha256(claim_id.encode(errors="surrogatepass")).hexdigest()[:12]


def build_report(results: Results) -> Report:
    """The results, sorted into the parts of the page."""
    columns = _columns(results)
    checks = results.checks_by_claim()
    views = {claim.claim: _view(claim, checks[claim.claim], columns) for claim in results.claims}
    worst_first = sorted(views.values(), key=lambda view: view.claim.verdict.rank)
    return Report(
        claims=tuple(views.values()),
        failures=tuple(views[claim.claim] for claim in results.failures()),
        waived=tuple(view for view in worst_first if view.claim.waived),
        quality=tuple(v for v in worst_first if v.claim.verdict is Verdict.QUALITY and not v.claim.waived),
        unexercised={
            reason: tuple(views[claim.claim] for claim in claims) for reason, claims in results.unexercised().items()
        },
        columns={number: config for config, number in columns.items()},
        matrix=_matrix(views.values()),
        models=tuple(sorted(results.models, key=lambda model: (model.green, model.verdict.rank, model.model))),
        measured=_measured(results.facts),
    )


def _columns(results: Results) -> dict[str, str]:
    """Dtype config → its number D1, D2, … in the order of the file."""
    configs = dict.fromkeys(claim.dtype_config for claim in results.claims)
    return {config: f"D{number}" for number, config in enumerate(configs, start=1)}


def _view(claim: Claim, checks: tuple[Check, ...], columns: Mapping[str, str]) -> ClaimView:
    return ClaimView(claim=claim, checks=checks, anchor=anchor(claim.claim), column=columns[claim.dtype_config])


def _matrix(views: Iterable[ClaimView]) -> dict[str, dict[str, tuple[ClaimView, ...]]]:
    """Pattern → column number → the claims of that pair."""
    matrix: dict[str, dict[str, tuple[ClaimView, ...]]] = {}
    for view in views:
        row = matrix.setdefault(view.claim.pattern, {})
        row[view.column] = (*row.get(view.column, ()), view)
    return matrix


def _measured(facts: Iterable[Fact]) -> dict[str, tuple[Mapping[str, object], ...]]:
    """Topic → a row for each subject, both in one order whichever worker finished first."""
    topics: dict[str, tuple[Mapping[str, object], ...]] = {}
    for fact in sorted(facts, key=lambda fact: (fact.topic, fact.subject)):
        topics[fact.topic] = (*topics.get(fact.topic, ()), {"subject": fact.subject, **fact.values})
    return topics


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("reports"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"lsb": lsb, "grid": _grid, "outputs": _outputs, "duration": _duration}
    environment.filters |= {"details": _details, "qparams": _qparams, "value": _value, "anchor": anchor}
    return environment


def _csp_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _grid(rows: Sequence[Mapping[str, object]]) -> Grid:
    """Rows of unlike keys as one table: what a row is about first, then keys as they first occur."""
    keys = dict.fromkeys(key for row in rows for key in row)
    columns = tuple(sorted(keys, key=lambda key: key not in ("node", "tensor")))
    return Grid(columns=columns, rows=tuple(tuple(_value(row.get(c, "")) for c in columns) for row in rows))


def _qparams(qparams: Mapping[str, Mapping[str, object]]) -> Grid:
    return _grid([{"tensor": name, **values} for name, values in qparams.items()])


def _outputs(evidence: Mapping[str, Sequence[object]]) -> Grid:
    """Expected beside found, with the difference where both are numbers."""
    columns = [evidence.get(key, ()) for key in ("index", "expected", "found")]
    rows = []
    for index, expected, found in zip_longest(*(column[:OUTPUTS_SHOWN] for column in columns), fillvalue=""):
        numbers = isinstance(expected, (int, float)) and isinstance(found, (int, float))
        difference = f"{float(found) - float(expected):+.6g}" if numbers else ""  # type: ignore[arg-type]
        rows.append((_value(index), _value(expected), _value(found), difference))
    return Grid(columns=("index", "expected", "found", "difference"), rows=tuple(rows))


def _details(evidence: Mapping[str, object]) -> dict[str, str]:
    """The evidence that is long text, or of a kind this page does not know, by its name."""
    rest = {key: value for key, value in evidence.items() if key not in _OWN_PLACE and value}
    return {k: v if isinstance(v, str) else json.dumps(v, indent=1) for k, v in rest.items()}


def _value(value: object) -> str:
    """A value for a table cell; a long one is cut and says how long it was."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) <= VALUE_WIDTH:
        return text
    size = f"{len(value)} values" if isinstance(value, list) else f"{len(text)} characters"
    return f"{text[:VALUE_WIDTH]}… ({size})"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)} min {rest:.0f} s" if minutes else f"{rest:.1f} s"
