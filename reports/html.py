"""The HTML report: one self-contained file, readable without JavaScript, failures first.

`build_report` makes all data that the template shows; the template only lays it out. Text from a backend stays text,
and has a largest length (`reports.page`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from fx_quant_conformance.reports.causes import find_cause
from fx_quant_conformance.reports.coverage import RuleRow, collect_rules
from fx_quant_conformance.reports.decision import count_unreached, format_no_failure, list_untried
from fx_quant_conformance.reports.deployments import DeploymentView, view_deployments
from fx_quant_conformance.reports.diff import Differences, compare_runs
from fx_quant_conformance.reports.evidence import Table, make_table, tabulate_values
from fx_quant_conformance.reports.findings import WaiverRow, collect_waivers, find_waiver_key
from fx_quant_conformance.reports.heatmap import HeatMap, make_heat_map
from fx_quant_conformance.reports.page import ID_WIDTH, anchor, render_page
from fx_quant_conformance.reports.plots import Plot, make_plots
from fx_quant_conformance.reports.results import Results, counts_of, leading_check, message_of, rank_row
from fx_quant_conformance.reports.schema import Check, ClaimResult, Measurement, ModelResult
from fx_quant_conformance.reports.text import cut, format_lsb, join_lines
from fx_quant_conformance.reports.verdicts import Verdict

MOST_ROWS = 2000
"""Largest number of claims that the page lays out as a table; of more, its script shows some of the rows at a time."""
MOST_EVIDENCE = 500
"""Largest number of claims whose evidence is on the page; results.jsonl has that of the others."""
MOST_CHANGES = 500
MESSAGE_WIDTH = 100
"""Largest number of characters of a message in a row of the list."""
MOST_NAMED = 50
"""Largest number of claims that a group names without their evidence."""
_OUTCOMES = ("error", "fail", "pass", "skip")  # the first that occurs at a stage is the stage's outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimView:
    """A claim with everything that is shown about it."""

    claim: ClaimResult
    checks: tuple[Check, ...]
    anchor: str
    column: str
    """The D number of its dtype config."""
    fingerprints: Mapping[str, Table]
    """How its kernels compute, as tables by the subject of the measurement."""
    waiver: int
    """The number of its row in the list of waivers; 0 without one."""

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
        return message_of(self.claim, self.lead)

    @property
    def notable_checks(self) -> tuple[Check, ...]:
        """The checks that get a paragraph: failed, or with evidence; the leading one first."""
        notable = [c for c in self.checks if c.failed or c.evidence or c is self.lead]
        return tuple(sorted(notable, key=lambda c: (c is not self.lead, c.verdict.rank)))

    @property
    def cells(self) -> tuple[str, ...]:
        """The texts of the claim's row behind its verdict: distance, what is allowed, seconds and stages."""
        allowed = next((check.allowed for check in self.checks if check.allowed), "-")
        return format_lsb(self.claim.max_lsb), cut(allowed, ID_WIDTH), str(round(self.claim.seconds, 2)), self.stages

    @property
    def short_message(self) -> str:
        """The message in a line, of a claim that does not pass."""
        return "" if self.claim.passes else join_lines(cut(self.message, MESSAGE_WIDTH))

    @property
    def stages(self) -> str:
        """The stages that did not pass, by outcome; the outcome of a stage is that of the worst rule checked there."""
        outcomes_by_stage: dict[str, list[str]] = {}
        for check in self.checks:
            outcomes_by_stage.setdefault(check.stage, []).append(check.outcome)
        worst = {stage: min(outcomes, key=_OUTCOMES.index) for stage, outcomes in outcomes_by_stage.items()}
        by_outcome = {o: [stage for stage, outcome in worst.items() if outcome == o] for o in _OUTCOMES if o != "pass"}
        texts = [f"{outcome}: {', '.join(stages)}" for outcome, stages in by_outcome.items() if stages]
        text = "; ".join(texts) or (f"all {len(outcomes_by_stage)} pass" if outcomes_by_stage else "no checks")
        return text + ("; execution shown by numbers" if self.claim.execution == "numbers" else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Claims with one cause or reason, in words."""

    title: str
    views: tuple[ClaimView, ...]

    @property
    def verdicts(self) -> dict[Verdict, int]:
        """Number of claims with each verdict, worst first."""
        return counts_of(view.claim.verdict for view in self.views)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Groups of claims under a heading."""

    name: str
    title: str
    groups: tuple[Group, ...]

    @property
    def total(self) -> int:
        """Number of claims."""
        return sum(len(group.views) for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that the page shows of a run."""

    results: Results
    no_failure: str
    """What is said where no claim is listed as a failure."""
    untried: tuple[str, ...]
    """What the run does not show."""
    unreached: int
    """The number of claims that it did not reach."""
    views: tuple[ClaimView, ...]
    failures: Section
    others: tuple[Section, ...]
    unexercised: Section
    unshown: Section
    detailed: frozenset[str]
    """The IDs of the claims with their evidence."""
    columns: Mapping[str, str]
    """The dtype configs by D number."""
    heat_map: HeatMap
    models: tuple[ModelResult, ...]
    deployments: tuple[DeploymentView, ...]
    accuracy: Mapping[str, Mapping[str, object]]
    """What was measured of a model, by its ID."""
    measurements: Mapping[str, Table]
    plots: tuple[Plot, ...]
    rules: tuple[RuleRow, ...]
    waivers: Mapping[Hashable, WaiverRow]
    detection: Table
    baseline: Differences | None
    waiver_numbers: Mapping[str, int]
    """The number of the row of waivers, by the ID of what is waived."""

    @property
    def is_long(self) -> bool:
        """Whether the list of claims is too long for a table."""
        return len(self.views) > MOST_ROWS


def render_html(results: Results, baseline: Results | None = None) -> str:
    """Return the report of a run as one HTML file, with the differences from an earlier run if one is given.

    The page makes no request and is readable without JavaScript. A pure function of the two: same runs, same text.
    """
    report = build_report(results, baseline)
    return render_page("report.html.j2", report=report, most_changes=MOST_CHANGES, most_named=MOST_NAMED)


def build_report(results: Results, baseline: Results | None = None) -> Report:
    """Sort the results into the parts of the page."""
    configs = list(dict.fromkeys(claim.dtype_config for claim in results.claims))
    columns = {config: f"D{number}" for number, config in enumerate(configs, start=1)}
    waivers = collect_waivers(results)
    places = {key: number for number, key in enumerate(waivers, start=1)}
    numbers = {row.id: places[find_waiver_key(row.waiver)] for row in results.judged if row.waived and row.waiver}
    checks, fingerprints = results.checks_by_claim(), _group_by_claim(results.measurements)
    views = {
        claim.claim: ClaimView(
            claim=claim,
            checks=checks[claim.claim],
            anchor=anchor(claim.claim),
            column=columns[claim.dtype_config],
            fingerprints=fingerprints.get(claim.claim, {}),
            waiver=numbers.get(claim.claim, 0),
        )
        for claim in results.claims
    }
    worst_first = sorted(views.values(), key=lambda view: rank_row(view.claim))
    fails = {claim.claim for claim in results.failures()}
    failures = _group("failures", "Failures", [view for view in worst_first if view.claim.claim in fails], waivers)
    waived = _group("waived", "Waived", [view for view in worst_first if view.claim.waived], waivers)
    tolerated = _group(
        "tolerated",
        "Tolerated: not correctly rounded, but within the declared tolerance",
        [view for view in worst_first if view.claim.verdict is Verdict.TOLERATED and not view.claim.waived],
        waivers,
    )
    models = tuple(sorted(results.models, key=lambda model: (model.passes, *rank_row(model))))
    return Report(
        results=results,
        no_failure=format_no_failure(results),
        untried=tuple(list_untried(results)),
        unreached=count_unreached(results),
        views=tuple(views.values()),
        failures=failures,
        others=tuple(section for section in (waived, tolerated) if section.total),
        unexercised=_by_reason("unexercised", results.unexercised(), views),
        unshown=_by_reason("unshown", results.unshown(), views),
        detailed=_choose_detailed((failures, waived, tolerated)),
        columns={number: config for config, number in columns.items()},
        heat_map=make_heat_map(results.claims, configs),
        models=models,
        deployments=view_deployments(models),
        accuracy={row.subject: row.values for row in results.measurements if row.topic == "accuracy"},
        measurements=_tabulate_measurements(results.measurements),
        plots=make_plots(results),
        rules=collect_rules(results),
        waivers=waivers,
        waiver_numbers=numbers,
        detection=make_table([{"faults of": name, **row} for name, row in sorted(results.header.detection.items())]),
        baseline=None if baseline is None else compare_runs(baseline, results),
    )


def _group(name: str, title: str, views: Sequence[ClaimView], waivers: Mapping[Hashable, WaiverRow]) -> Section:
    """Group claims, which come the worst first, by cause: the cause of the worst claim first."""
    groups: dict[Hashable, list[ClaimView]] = {}
    for view in views:
        groups.setdefault(find_cause(view.claim, view.checks), []).append(view)
    titles = {key: row.title for key, row in waivers.items()}
    return Section(
        name=name,
        title=title,
        groups=tuple(
            Group(title=titles.get(key, group[0].message), views=tuple(group)) for key, group in groups.items()
        ),
    )


def _by_reason(name: str, groups: Mapping[str, Sequence[ClaimResult]], views: Mapping[str, ClaimView]) -> Section:
    return Section(
        name=name,
        title=name.capitalize(),
        groups=tuple(
            Group(title=reason, views=tuple(views[claim.claim] for claim in claims))
            for reason, claims in groups.items()
        ),
    )


def _choose_detailed(sections: Sequence[Section]) -> frozenset[str]:
    """Choose the claims with evidence: of each section the first claim of each group, then the others."""
    order = [
        view.claim.claim
        for section in sections
        for part in (slice(None, 1), slice(1, None))
        for group in section.groups
        for view in group.views[part]
    ]
    return frozenset(list(dict.fromkeys(order))[:MOST_EVIDENCE])


def _group_by_claim(measurements: Sequence[Measurement]) -> dict[str, dict[str, Table]]:
    """Return the measurements that are about claims, as tables by their subjects, by the claims' IDs."""
    groups: dict[str, dict[str, Table]] = {}
    for row in measurements:
        for name in row.claims:
            groups.setdefault(name, {})[row.subject] = tabulate_values(row.values)
    return groups


def _tabulate_measurements(measurements: Sequence[Measurement]) -> dict[str, Table]:
    """Return a table of each topic, a row for each subject; a model's accuracy is shown with the model."""
    topics: dict[str, list[Mapping[str, object]]] = {}
    for row in measurements:
        if row.topic != "accuracy":
            topics.setdefault(row.topic, []).append({"subject": row.subject, **row.values})
    return {
        topic: make_table(rows) for topic, rows in sorted(topics.items(), key=lambda each: each[0] != "fingerprint")
    }
