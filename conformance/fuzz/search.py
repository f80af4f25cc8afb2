"""Fuzz: drawn graphs of claimed patterns, compared with the oracle; what fails is shrunk and becomes a script.

A job ``model/fuzz/<n>/<setup>`` draws graphs (`conformance.fuzz.graph`) with Hypothesis until one fails, and shrinks it
as long as it fails in the same way. A graph is judged like a whole model. A crash or a hang of the backend's process is
a failure of that graph, which shrinks like any other. The run's seed decides everything: shrinking ends after a
number of runs, not of seconds. A pattern that a waiver covers is not drawn: it would hide all else. (NUM-03, LOW-04)
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import torch
from torch.fx import GraphModule

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.backends.names import format_error
from fx_quant_conformance.conformance.claims.build import build_model
from fx_quant_conformance.conformance.claims.claim import Claim, enumerate_claims
from fx_quant_conformance.conformance.claims.effort import PROFILES
from fx_quant_conformance.conformance.claims.inputs import Batch
from fx_quant_conformance.conformance.fuzz.graph import (
    Choose,
    Drawing,
    DrawnCall,
    DrawnGraph,
    patterns_of,
    subgraph_of,
    waived_patterns,
)
from fx_quant_conformance.conformance.machine.child import Ending
from fx_quant_conformance.conformance.machine.fault import FaultFound
from fx_quant_conformance.conformance.machine.workplace import LostProcess, WorkResult, fault_of_lost_work
from fx_quant_conformance.conformance.pipeline.job import Job
from fx_quant_conformance.conformance.reproducers.script import Failure, script_of
from fx_quant_conformance.conformance.reproducers.spelling import NoScriptError
from fx_quant_conformance.conformance.reproducers.standalone import fails_standalone
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.whole_models.jobs import unit_of
from fx_quant_conformance.conformance.whole_models.judging import (
    JudgedModel,
    draw_reference,
    judge_run,
    make_failed_check,
    verify_model,
)
from fx_quant_conformance.conformance.whole_models.setups import EXTENTS, ModelSetup, setups_of
from fx_quant_conformance.conformance.whole_models.subgraphs import cut_subgraphs
from fx_quant_conformance.conformance.whole_models.units import ModelUnit
from fx_quant_conformance.refimpl import BackendConfig
from fx_quant_conformance.reports.schema import Check, ModelResult, evidence
from fx_quant_conformance.reports.verdicts import FAULTY, PASSING, Verdict

SHARES = 4
"""Jobs per setup. The first draws from all patterns; the others draw from half of them each, and no number as an
operand, so that a fault that is found often does not hide others for long."""
LIMIT = 20.0
"""Seconds for one graph; most take a few hundredths."""
MOST_RUNS = 100
"""Maximal number of runs for shrinking."""
HANG = 20
"""Number of runs that one which hangs counts as."""
_NOTHING = "nothing was drawn: waivers cover every pattern"


def jobs(config: BackendConfig, capabilities: Capabilities, profile: str) -> tuple[Job, ...]:
    """List the jobs of a profile: only stress has any."""
    if not PROFILES[profile].graphs:
        return ()
    claims = enumerate_claims(config, capabilities)
    return tuple(
        Job(id=f"model/fuzz/{number}/{setup}", run=partial(_run, number, setup, claims))
        for setup in setups_of(claims, capabilities, EXTENTS[profile])
        for number in range(SHARES)
        if patterns_of(claims, setup)
    )


def _run(number: int, setup: ModelSetup, claims: tuple[Claim, ...], bench: Bench) -> Iterator[ModelResult]:
    """Draw graphs until one fails; shrink it, and write the script."""
    started = time.perf_counter()
    name = f"model/fuzz/{number}/{setup}"
    waived = waived_patterns(claims, setup, bench.waived)
    patterns = {name: ops for name, ops in patterns_of(claims, setup).items() if name not in waived}
    drawing = partial(
        Drawing,
        patterns=_share(patterns, number),
        capabilities=bench.capabilities,
        is_trained=setup.flow == "qat",
        has_numbers=number == 0,
    )
    search = Search(bench, name, claims, setup)
    graph = search.find_smallest(drawing, Random(bench.seed_for(name))) if patterns else None
    check, script = (search.check_without_failure(), "") if graph is None else search.reproduce(graph)
    if waived:
        shown = evidence({**check.evidence, "not_drawn_for_they_are_waived": sorted(waived)})
        check = replace(check, evidence=shown)
    yield JudgedModel(check=check).make_row(time.perf_counter() - started, script=script)


def _share(patterns: Mapping[str, Sequence[Any]], number: int) -> Mapping[str, Sequence[Any]]:
    """Return all patterns for the first job; for each other job about half of them, chosen by their names."""
    digests = {name: hashlib.sha256(f"{number}/{name}".encode()).digest() for name in patterns}
    chosen = {name: ops for name, ops in patterns.items() if digests[name][0] % 2}
    return chosen if number and chosen else patterns


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The result for one graph."""

    check: Check
    is_internal: bool = False
    """Whether the suite itself failed."""

    @property
    def kind(self) -> tuple[Verdict, str]:
        """In which way the graph failed: shrinking must preserve it."""
        return self.check.verdict, self.check.rule

    @property
    def fails(self) -> bool:
        """Whether it counts against backend or suite; a graph that cannot be judged or is left in float does not."""
        return self.check.verdict in FAULTY or self.is_internal


class Search:
    """Judges the graphs of one job, each once.

    ``_judgements``: by graph, as text. ``_kind``: in which way the first graph failed. ``_runs``: those since then.
    ``_in_float``: the first graph that only fell back to float; it does not end the search, as a worse one may come.
    """

    def __init__(self, bench: Bench, name: str, claims: tuple[Claim, ...], setup: ModelSetup) -> None:
        self._bench, self._name, self._claims, self._setup = bench, name, claims, setup
        self._judgements: dict[str, Judgement] = {}
        self._in_float: DrawnGraph | None = None
        self._kind: tuple[Verdict, str] | None = None
        self._runs = 0

    # -- drawing and shrinking -----------------------------------------------------------------------------------------

    def find_smallest(self, drawing: Callable[..., Drawing], random: Random) -> DrawnGraph | None:
        """Draw graphs until one fails; return the smallest found that fails in the same way, or None."""
        import hypothesis  # loading it takes longer than many a job of other profiles
        from hypothesis import strategies

        @strategies.composite
        def graphs(draw: Any) -> DrawnGraph:
            return drawing(choose=make_chooser(partial(draw, strategies.booleans()))).draw()

        settings = hypothesis.settings(
            database=None,
            deadline=None,
            derandomize=False,
            print_blob=False,
            verbosity=hypothesis.Verbosity.quiet,
            phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
            max_examples=self._bench.effort.graphs,
        )
        with contextlib.suppress(hypothesis.errors.NoSuchExample):
            return self._reduce(hypothesis.find(graphs(), self._fails, settings=settings, random=random))
        if self._in_float is None:
            return None
        self._kind = self._judgements[self._in_float.to_json()].kind
        return self._reduce(self._in_float)

    def _reduce(self, graph: DrawnGraph) -> DrawnGraph:
        """Remove calls as long as the graph fails in the same way: first all but one, then one after the other.

        Their results become inputs. Hypothesis cannot do that: to it, the later choices depend on the earlier ones.
        """
        self._runs = 0
        single = self._find_failing(graph, [[call] for call in graph.calls])
        if single is not None:
            return single
        smaller: DrawnGraph | None = graph
        while smaller is not None:
            graph = smaller
            without_one = [[call for call in graph.calls if call is not removed] for removed in reversed(graph.calls)]
            smaller = self._find_failing(graph, without_one)
        return graph

    def _find_failing(self, graph: DrawnGraph, subsets: Sequence[Sequence[DrawnCall]]) -> DrawnGraph | None:
        candidates = (subgraph_of(graph, subset) for subset in subsets)
        return next((each for each in candidates if each is not None and self._fails(each)), None)

    def _fails(self, graph: DrawnGraph) -> bool:
        """Tell whether a graph fails as the first one did. A graph for which shrinking has no runs left passes."""
        text = graph.to_json()
        if not graph.calls or (text not in self._judgements and self._runs >= MOST_RUNS):
            return False
        if text not in self._judgements:
            self._judgements[text] = self._judge(graph)
            if self._kind is not None:
                self._runs += HANG if self._judgements[text].check.verdict is Verdict.TIMEOUT else 1
        judgement = self._judgements[text]
        if judgement.fails and self._kind is None and judgement.check.verdict is Verdict.FALLBACK:
            self._in_float = self._in_float or graph
        elif judgement.fails and self._kind is None:
            self._kind = judgement.kind
        return judgement.fails and judgement.kind == self._kind

    # -- judging -------------------------------------------------------------------------------------------------------

    def _judge(self, graph: DrawnGraph) -> Judgement:
        """Judge a graph; once more in a new process of the backend if one that had judged others is lost."""
        try:
            return self._try(
                lambda: verify_model(self._bench, self._name, *draw_reference(self._bench, self._make_unit(graph)))
            )
        except LostProcess as lost:
            return self._judge_lost(lost) if lost.is_alone else self._judge(graph)

    def _try(self, judge: Callable[[], Check]) -> Judgement:
        """Judge something within its own limit. Raises LostProcess."""
        self._bench.executor.allow(LIMIT)
        try:
            return Judgement(check=judge())
        except FaultFound as found:
            return Judgement(check=make_failed_check(self._name, found.fault))
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            return Judgement(check=self._describe(Ending.ERROR, format_error(error), text), is_internal=True)

    def _judge_lost(self, lost: LostProcess) -> Judgement:
        return Judgement(check=self._describe(lost.ending, str(lost), lost.text))

    def _describe(self, ending: Ending, message: str, text: str) -> Check:
        """Return a check that says that the backend's process died or hung, or that the suite failed."""
        fault = fault_of_lost_work(WorkResult(ending=ending, message=message, text=text))
        return Check(
            claim=self._name,
            stage="numerics",
            rule="",
            outcome="error",
            verdict=fault.verdict,
            message=fault.message,
            evidence=evidence(fault.evidence),
        )

    def _make_unit(self, graph: DrawnGraph) -> ModelUnit:
        torch.default_generator.manual_seed(graph.seed)
        case = graph.to_case()
        return unit_of(self._name, build_model(case), case, self._claims, self._setup)

    # -- results -------------------------------------------------------------------------------------------------------

    def check_without_failure(self) -> Check:
        """Return the check of a job in which no graph failed: UNEXERCISED if none was judged."""
        checks = [judgement.check for judgement in self._judgements.values()]
        judged = [check for check in checks if check.verdict in (*PASSING, Verdict.UNSHOWN)]
        verdict = Verdict.worst(check.verdict for check in judged)
        message = next((check.message for check in judged if check.verdict is verdict), "")
        otherwise = Verdict.worst(str(check.evidence.get("otherwise", check.verdict)) for check in judged)
        shown = {} if otherwise is verdict else {"otherwise": otherwise.value}
        distances = [check.max_lsb for check in judged if isinstance(check.max_lsb, float)]
        return Check(
            claim=self._name,
            stage="numerics",
            rule="NUM-03",
            outcome="pass" if judged else "skip",
            verdict=verdict,
            message=message if judged else "; ".join(dict.fromkeys(check.message for check in checks)) or _NOTHING,
            max_lsb=max(distances, default=None),
            cases=len(checks),
            evidence=evidence({"graphs": len(checks), "unexercised": len(checks) - len(judged), **shown}),
        )

    def reproduce(self, graph: DrawnGraph) -> tuple[Check, str]:
        """Return the check of a graph that failed, and its script ("" if none can be written)."""
        judgement, graphs, script = self._judgements[graph.to_json()], len(self._judgements), ""
        check = judgement.check
        shown: dict[str, object] = {**check.evidence, "graph": str(graph), "graphs": graphs}
        message = f"in a graph of {len(graph.calls)} patterns: {check.message}"
        if not judgement.is_internal:
            try:
                failure = self._locate(graph, check.verdict)
                script = script_of(failure, self._bench, name=self._name, message=check.message)
            except NoScriptError as error:
                message = f"{message} (no script: {error})"
        if script:
            shown["script_fails_alone"] = fails = fails_standalone(script)
            message += "" if fails else " (the script does not fail on its own: a bug of the suite)"
        check = replace(check, outcome="fail", message=message, slack_lsb=None, cases=graphs, evidence=evidence(shown))
        return check, script

    def _locate(self, graph: DrawnGraph, verdict: Verdict) -> Failure:
        """Find a model and one batch with this verdict: a pattern, or else the whole. Raises NoScriptError."""
        try:
            attempts = list(_list_attempts(self._bench, self._make_unit(graph)))
        except FaultFound as found:
            raise NoScriptError("the flow ends before the backend is asked") from found
        for model, batch, moves_only in attempts:
            try:
                judged = self._try(
                    lambda model=model, batch=batch, moves_only=moves_only: judge_run(  # type: ignore[misc]
                        self._bench, self._name, model, [batch], moves_only=moves_only
                    )
                )
            except LostProcess as lost:
                judged = self._judge_lost(lost)
            if judged.check.verdict is verdict:
                return Failure(model=model, batch=batch, check=judged.check)
        raise NoScriptError("not reproducible when batches run one at a time")


def _list_attempts(bench: Bench, unit: ModelUnit) -> Iterator[tuple[GraphModule, Batch, bool]]:
    """Yield where a fault may show: each pattern on each batch, then the whole model; and whether it only moves.

    Raises FaultFound for what the flow refuses.
    """
    reference, batches = draw_reference(bench, unit)
    for subgraph in cut_subgraphs(reference, batches):
        yield from ((subgraph.model, batch, subgraph.moves_only) for batch in subgraph.batches)
    yield from ((reference, batch, False) for batch in batches)


def make_chooser(coin: Any) -> Choose:
    """Return a function that chooses between options by flips of a coin; the first option takes no heads.

    Integers would not do: Hypothesis draws some of them from constants of all loaded modules.
    """

    def choose(options: Sequence[Any]) -> Any:
        number = 0
        for _ in range((len(options) - 1).bit_length()):
            number = 2 * number + coin()
        return options[number % len(options)]

    return choose
