"""The HTML report: one self-contained file, readable without JavaScript, failures first.

This module makes all data that the template shows; the template only lays it out. Text from a backend stays text, and
has a largest length (`reports.page`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from reports.causes import find_cause, group
from reports.coverage import RuleRow, WaiverRow, collect_rules, collect_waivers, find_slowest
from reports.decision import count_unreached, describe_no_failure, list_untried
from reports.deployments import DeploymentView, view_deployments
from reports.diff import Differences, compare_runs
from reports.evidence import Table, make_table, tabulate_values
from reports.heatmap import HeatMap, make_heat_map
from reports.page import ID_WIDTH, anchor, render_page
from reports.plots import make_plots
from reports.results import Results, counts_of, leading_check
from reports.schema import Check, ClaimResult, Measurement, ModelResult, Waiver
from reports.text import cut, join_lines, spell_lsb
from reports.verdicts import Verdict

MOST_ROWS = 2000
"""Largest number of claims that are listed as a table; of more, the page's script shows some as rows."""
MOST_CHANGES = 500
MESSAGE_WIDTH = 100
"""Largest number of characters of a message in a row of the list."""
MOST_HIDDEN = 50
"""Largest number of claims that a cause or a reason lists without evidence."""
_ROOM, _ROOM_PER_CLAIM, _ROW, _LEAST = 4_750_000, 475, 345, 150_000
"""In bytes: size that a page may have, or that a claim of a longer page may take; size of a claim without its ID, and
least space for evidence."""
_WITH_SCRIPTS, _WHOLE, _MOST_EVIDENCE = 1_000_000, 2_600_000, 4_000_000
"""In bytes: from where on evidence goes without the texts of scripts, from where on only with what each red claim must
show (numbers, path of the script, command), and where it ends."""
_OUTCOMES = ("error", "fail", "pass", "skip")  # the first that occurs at a stage is the stage's outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimView:
    """A claim with everything that is shown about it; `column` is the D number of its dtype config.

    ``fingerprints``: how its kernels compute, as tables by the subject of the measurement. ``waiver``: the number of
    its waiver in the list of waivers; 0 without one.
    """

    claim: ClaimResult
    checks: tuple[Check, ...]
    anchor: str
    column: str
    fingerprints: Mapping[str, Table] = field(default_factory=dict)
    waiver: int = 0

    @property
    def lead(self) -> Check | None:
        """The check that decides the verdict; None if all simply pass."""
        return leading_check(self.checks)

    @property
    def rule(self) -> str:
        """The rule of the leading check, in one line."""
        return cut(join_lines(self.lead.rule), ID_WIDTH) if self.lead else ""

    @property
    def message(self) -> str:
        """The message of the leading check, or the claim's own reason."""
        return (self.lead.message if self.lead else "") or self.claim.reason

    @property
    def allowed(self) -> str:
        """What a right result may be off by, in output steps, as far as the results file says it whole."""
        return next((check.allowed for check in self.checks if check.allowed), "")

    @property
    def notable_checks(self) -> tuple[Check, ...]:
        """The checks that get a paragraph: failed, or with evidence; the leading one first."""
        notable = [c for c in self.checks if c.failed or c.evidence or c is self.lead]
        return tuple(sorted(notable, key=lambda c: (c is not self.lead, c.verdict.rank)))

    @property
    def fields(self) -> tuple[str, ...]:
        """The texts of the claim's row, none with a tab: those of the columns, and the message if it does not pass."""
        claim = self.claim
        texts = (
            cut(claim.claim, ID_WIDTH), self.column, claim.flow, cut(claim.scheme, ID_WIDTH),
            ("WAIVED · " if claim.waived else "") + claim.verdict, spell_lsb(claim.max_lsb),
            cut(self.allowed, ID_WIDTH) or "-", str(round(claim.seconds, 2)),
            self.stages + ("; execution shown by numbers" if claim.execution == "numbers" else ""),
            "" if claim.passes else cut(self.message, MESSAGE_WIDTH),
        )  # fmt: skip
        return tuple(map(join_lines, texts))

    @property
    def stages(self) -> str:
        """The stages that did not pass, by outcome; the outcome of a stage is that of the worst rule checked there."""
        outcomes_by_stage: dict[str, list[str]] = {}
        for check in self.checks:
            outcomes_by_stage.setdefault(check.stage, []).append(check.outcome)
        worst = {stage: min(outcomes, key=_OUTCOMES.index) for stage, outcomes in outcomes_by_stage.items()}
        by_outcome = {o: [stage for stage, outcome in worst.items() if outcome == o] for o in _OUTCOMES if o != "pass"}
        texts = [f"{outcome}: {', '.join(stages)}" for outcome, stages in by_outcome.items() if stages]
        return "; ".join(texts) or (f"all {len(outcomes_by_stage)} pass" if outcomes_by_stage else "no checks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Claims with one cause; ``cards`` are those that are laid out with their evidence."""

    views: tuple[ClaimView, ...]
    cards: tuple[Markup, ...]

    @property
    def message(self) -> str:
        """What they have in common: the waiver's reason, or the message of the first."""
        waiver = self.views[0].claim.waiver
        return waiver.reason if waiver else self.views[0].message

    @property
    def verdicts(self) -> dict[Verdict, int]:
        """Number of claims with each verdict, worst first."""
        return counts_of(view.claim.verdict for view in self.views)

    @property
    def hidden(self) -> tuple[ClaimView, ...]:
        """The claims whose evidence did not fit."""
        return self.views[len(self.cards) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Claims with their evidence, laid out by cause."""

    title: str
    name: str
    causes: tuple[Cause, ...]

    @property
    def total(self) -> int:
        """Number of claims, shown or not."""
        return sum(len(cause.views) for cause in self.causes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Data of the template in addition to the results.

    ``no_failure``: what is said where no claim is listed as a failure. ``untried``: what the run does not show.
    ``unreached``: number of claims that it did not reach.
    """

    no_failure: str
    untried: tuple[str, ...]
    unreached: int
    views: tuple[ClaimView, ...]
    is_long: bool
    failures: Section
    others: tuple[Section, ...]
    detailed: frozenset[str]
    unexercised: Mapping[str, tuple[ClaimView, ...]]
    unshown: Mapping[str, tuple[ClaimView, ...]]
    columns: Mapping[str, str]
    heat_map: HeatMap
    models: tuple[ModelResult, ...]
    deployments: tuple[DeploymentView, ...]
    accuracy: Mapping[str, Mapping[str, object]]
    measurements: Mapping[str, Table]
    plots: tuple[Markup, ...]
    rules: tuple[RuleRow, ...]
    waivers: tuple[WaiverRow, ...]
    waiver_numbers: Mapping[Waiver, int]
    slowest: tuple[ClaimResult, ...]
    detection: Table
    baseline: Differences | None


def render_html(results: Results, baseline: Results | None = None) -> str:
    """Return the report of a run as one HTML file, with the differences from an earlier run if one is given.

    The page makes no request and is readable without JavaScript. A pure function of the two: same runs, same text.
    """
    report = build_report(results, baseline)
    return render_page(
        "report.html.j2", results=results, report=report, most_changes=MOST_CHANGES, most_hidden=MOST_HIDDEN
    )


def build_report(results: Results, baseline: Results | None = None) -> Report:
    """Sort the results into the parts of the page."""
    columns = _number_configs(results)
    configs = {number: config for config, number in columns.items()}
    checks = results.checks_by_claim()
    fingerprints = _group_by_claim(results.measurements)
    waivers = collect_waivers(results)
    numbers = {row.waiver: number for number, row in enumerate(waivers, start=1)}
    views = {
        claim.claim: ClaimView(
            claim=claim,
            checks=checks[claim.claim],
            anchor=anchor(claim.claim),
            column=columns[claim.dtype_config],
            fingerprints=fingerprints.get(claim.claim, {}),
            waiver=numbers.get(claim.waiver, 0) if claim.waiver else 0,
        )
        for claim in results.claims
    }
    worst_first = sorted(views.values(), key=lambda view: view.claim.verdict.rank)
    plots = tuple(Markup(render_page("plot.html.j2", plot=plot)) for plot in make_plots(results))
    room = max(_ROOM, _ROOM_PER_CLAIM * len(views)) - sum(_ROW + len(name) for name in views)
    left = room - sum(len(plot.encode()) for plot in plots)
    budget = EvidenceBudget(room=max(_LEAST, min(_MOST_EVIDENCE, left)))
    failures = budget.lay_out("Failures", "failures", [views[claim.claim] for claim in results.failures()])
    waived = budget.lay_out("Waived", "waived", [view for view in worst_first if view.claim.waived])
    quality = budget.lay_out(
        "Quality, allowed: functions within 1 LSB, but not correctly rounded", "quality",
        [view for view in worst_first if view.claim.allowed],
    )  # fmt: skip
    topics = _group_by_topic(results.measurements)
    models = tuple(sorted(results.models, key=lambda model: (model.passes, model.verdict.rank, model.model)))
    return Report(
        no_failure=describe_no_failure(results),
        untried=tuple(list_untried(results)),
        unreached=count_unreached(results),
        views=tuple(views.values()),
        is_long=len(views) > MOST_ROWS,
        failures=failures,
        others=tuple(section for section in (waived, quality) if section.total),
        detailed=frozenset(budget.shown),
        unexercised=_view_groups(results.unexercised(), views),
        unshown=_view_groups(results.unshown(), views),
        columns=configs,
        heat_map=make_heat_map(results.claims, list(columns)),
        models=models,
        deployments=view_deployments(models),
        accuracy={row.subject: row.values for row in results.measurements if row.topic == "accuracy"},
        measurements={topic: make_table(rows) for topic, rows in topics.items()},
        plots=plots,
        rules=collect_rules(results),
        waivers=waivers,
        waiver_numbers=numbers,
        slowest=find_slowest(results),
        detection=make_table([{"faults of": name, **row} for name, row in sorted(results.header.detection.items())]),
        baseline=None if baseline is None else compare_runs(baseline, results),
    )


@dataclass(slots=True, kw_only=True)
class EvidenceBudget:
    """Lays out claims with their evidence, as long as they fit; `shown` are the IDs of those laid out.

    ``room``: bytes that there are; ``used``: bytes so far. The first claims show everything, the next ones no text of a
    script, the others only what is short.
    """

    room: int
    used: int = 0
    shown: set[str] = field(default_factory=set)

    def lay_out(self, title: str, name: str, views: Sequence[ClaimView]) -> Section:
        """Lay out as many of the views as fit: of each cause the first claim, then the others, in their order."""
        groups = sorted(
            group(views, lambda view: find_cause(view.claim, view.checks)),
            key=lambda each: (each[0].claim.verdict.rank, -len(each)),
        )
        begun = [(each, self._lay_out(each[:1])) for each in groups]
        causes = tuple(Cause(views=each, cards=(*cards, *self._lay_out(each[len(cards) :]))) for each, cards in begun)
        return Section(title=title, name=name, causes=causes)

    def _lay_out(self, views: Sequence[ClaimView]) -> list[Markup]:
        cards: list[Markup] = []
        for view in views:
            detail = "brief" if self.used > _WHOLE else "no script" if self.used > _WITH_SCRIPTS else "all"
            text = render_page("claim.html.j2", view=view, detail=detail)
            if self.used + len(text.encode()) > self.room:
                break
            self.used += len(text.encode())
            cards.append(Markup(text))
            self.shown.add(view.claim.claim)
        return cards


def _view_groups(
    groups: Mapping[str, Sequence[ClaimResult]], views: Mapping[str, ClaimView]
) -> dict[str, tuple[ClaimView, ...]]:
    return {reason: tuple(views[claim.claim] for claim in claims) for reason, claims in groups.items()}


def _number_configs(results: Results) -> dict[str, str]:
    """Number the dtype configs D1, D2, …"""
    configs = dict.fromkeys(claim.dtype_config for claim in results.claims)
    return {config: f"D{number}" for number, config in enumerate(configs, start=1)}


def _group_by_claim(measurements: Iterable[Measurement]) -> dict[str, dict[str, Table]]:
    """Return the measurements that are about claims, as tables by their subjects, by the claims' IDs."""
    groups: dict[str, dict[str, Table]] = {}
    for row in measurements:
        for name in row.claims:
            groups.setdefault(name, {})[row.subject] = tabulate_values(row.values)
    return groups


def _group_by_topic(measurements: Iterable[Measurement]) -> dict[str, tuple[Mapping[str, object], ...]]:
    """Return the rows of each topic, one for each subject; a model's accuracy is shown with the model."""
    topics: dict[str, tuple[Mapping[str, object], ...]] = {}
    for row in measurements:
        if row.topic != "accuracy":
            topics[row.topic] = (*topics.get(row.topic, ()), {"subject": row.subject, **row.values})
    return dict(sorted(topics.items(), key=lambda item: item[0] != "fingerprint"))
