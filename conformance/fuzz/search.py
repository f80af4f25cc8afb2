"""Fuzz: drawn graphs of claimed patterns, compared with the oracle; what fails is shrunk and becomes a script.

A job ``model/fuzz/<n>/<setup>`` draws graphs (fuzz_graphs.py) with Hypothesis until one fails, and shrinks it as long
as it fails in the same way. A graph is judged as a whole model is (trial.py), in a child process, so that a crash or a
hang is a failure of that graph, which shrinks like any other. All follows from the run's seed: shrinking ends after a
number of runs, not of seconds. A pattern that a waiver covers is not drawn: it would hide all else.
(NUM-03, LOW-04)
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from backends.base import Capabilities
from conformance.claims.build import build_model
from conformance.claims.claim import Claim, enumerate_claims
from conformance.claims.effort import PROFILES
from conformance.claims.inputs import Batch, calibration_inputs, static_inputs
from conformance.fuzz.graph import (
    Choose,
    Drawing,
    DrawnCall,
    DrawnGraph,
    graph_of,
    patterns_of,
    subgraph_of,
    waived_patterns,
)
from conformance.machine.isolation import (
    CAN_FORK,
    Ending,
    Forked,
    InProcess,
    Isolation,
    WorkResult,
    verdict_of_lost_work,
)
from conformance.machine.messages import Begin
from conformance.oracle.grids import placeholder_grids
from conformance.pipeline.job import Job
from conformance.reproducers.script import Failure, NoScriptError, script_of
from conformance.reproducers.standalone import fails_alone
from conformance.stages.bench import Bench
from conformance.stages.meaning import tensors
from conformance.stages.stage import StageError
from conformance.whole_models.flow import RATE, ModelSetup, descend, reference_of
from conformance.whole_models.jobs import DIRECTED_INPUTS, EXTENTS, setups_of
from conformance.whole_models.subgraphs import subgraphs
from conformance.whole_models.verify import failed_check, model_result, run_and_judge, verify_model
from refimpl import BackendConfig
from reports.schema import Check, ModelResult, evidence
from reports.verdicts import PASSING, Verdict

SHARES = 4
"""Jobs of a setup. The first draws from all patterns, the others from half of them each, and no number as an operand:
a fault that is found often hides no other for long."""
LIMIT = 20.0
"""Seconds for one graph, of which most take a few hundredths."""
SERVED = 64
"""How many graphs one child may judge."""
MOST_RUNS = 100
"""Runs that shrinking may take; one that hangs counts as many."""
HANG = 20
_NOTHING = "nothing was drawn: waivers cover every pattern"


def jobs(config: BackendConfig, capabilities: Capabilities, profile: str) -> tuple[Job, ...]:
    """List the jobs of a profile: none but in stress."""
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
    patterns = [each for each in patterns_of(claims, setup) if each not in waived]
    drawing = partial(
        Drawing, patterns=_share(patterns, number), capabilities=bench.capabilities,
        is_trained=setup.flow == "qat", has_numbers=number == 0,
    )  # fmt: skip
    with contextlib.closing(Search(bench, name, claims, setup)) as search:
        graph = search.smallest(drawing, Random(bench.seed_for(name))) if patterns else None
        check, script = (search.nothing_failed(), "") if graph is None else search.reproduce(graph)
    if waived:
        shown = evidence({**check.evidence, "not_drawn_for_they_are_waived": sorted(waived)})
        check = replace(check, evidence=shown)
    yield model_result(check, time.perf_counter() - started, script=script)


def _share(patterns: Sequence[str], number: int) -> list[str]:
    """All patterns for the first job; for each other about half of them, by their names."""
    digests = (hashlib.sha256(f"{number}/{pattern}".encode()).digest()[0] for pattern in patterns)
    chosen = [pattern for pattern, digest in zip(patterns, digests, strict=True) if digest % 2]
    return chosen if number and chosen else list(patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What came of one graph. ``is_internal``: the suite itself failed."""

    check: Check
    is_internal: bool = False

    @property
    def kind(self) -> tuple[Verdict, str]:
        """In which way it failed: shrinking keeps to it."""
        return self.check.verdict, self.check.rule

    @property
    def fails(self) -> bool:
        """Whether it counts against the backend, or the suite.

        What the suite cannot judge, or the config leaves all in float, does not.
        """
        return self.check.verdict not in (*PASSING, Verdict.UNEXERCISED) or self.is_internal


@dataclass(kw_only=True)
class _Seen:
    """What was tried so far: each graph's judgement, by its text; the way of the first that failed, runs since then.

    ``in_float``: the first that only fell back to float. It ends no search, for something worse may come.
    """

    judgements: dict[str, Judgement] = field(default_factory=dict)
    in_float: DrawnGraph | None = None
    kind: tuple[Verdict, str] | None = None
    runs: int = 0


class Search:
    """Judges the graphs of one job, each once."""

    def __init__(self, bench: Bench, name: str, claims: tuple[Claim, ...], setup: ModelSetup) -> None:
        self._bench, self._name, self._claims, self._setup = bench, name, claims, setup
        self._isolation: Isolation = (
            Forked(self._serve, limit=LIMIT, share=SERVED) if CAN_FORK else InProcess(self._serve)
        )
        self._seen = _Seen()

    def close(self) -> None:
        """End the child that is left."""
        self._isolation.close()

    # -- drawing and shrinking -----------------------------------------------------------------------------------------

    def smallest(self, drawing: Callable[..., Drawing], random: Random) -> DrawnGraph | None:
        """Draw graphs until one fails; return the smallest that was found to fail in the same way, or None."""
        import hypothesis  # loading it takes longer than many a job of other profiles
        from hypothesis import strategies

        @strategies.composite
        def graphs(draw: Any) -> DrawnGraph:
            return drawing(choose=_choosing(partial(draw, strategies.booleans()))).graph()

        settings = hypothesis.settings(
            database=None, deadline=None, derandomize=False, print_blob=False, verbosity=hypothesis.Verbosity.quiet,
            phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink), max_examples=self._bench.effort.graphs,
        )  # fmt: skip
        with contextlib.suppress(hypothesis.errors.NoSuchExample):
            return self._reduced(hypothesis.find(graphs(), self._fails, settings=settings, random=random))
        if self._seen.in_float is None:
            return None
        self._seen.kind = self._seen.judgements[self._seen.in_float.text()].kind
        return self._reduced(self._seen.in_float)

    def _reduced(self, graph: DrawnGraph) -> DrawnGraph:
        """Leave calls out as long as the rest fails in the same way: first all but one, then one after the other.

        What they gave becomes an input. Hypothesis cannot do that: to it, the later choices depend on the earlier ones.
        """
        self._seen.runs = 0
        subsets = [[call] for call in graph.calls]
        found = next((part for part in self._parts(graph, subsets) if self._fails(part)), None)
        while found is None:
            subsets = [[call for call in graph.calls if call is not other] for other in reversed(graph.calls)]
            smaller = next((part for part in self._parts(graph, subsets) if self._fails(part)), None)
            found, graph = (graph, graph) if smaller is None else (None, smaller)
        return found

    def _parts(self, graph: DrawnGraph, subsets: Sequence[Sequence[DrawnCall]]) -> Iterator[DrawnGraph]:
        return (part for subset in subsets if (part := subgraph_of(graph, subset)) is not None)

    def _fails(self, graph: DrawnGraph) -> bool:
        """Tell whether a graph fails as the first one did. What shrinking has no runs left for, passes."""
        seen, text = self._seen, graph.text()
        if not graph.calls or (text not in seen.judgements and seen.runs >= MOST_RUNS):
            return False
        if text not in seen.judgements:
            judgement = seen.judgements[text] = self._judge(text)
            if seen.kind is not None:
                seen.runs += HANG if judgement.check.verdict is Verdict.TIMEOUT else 1
        judgement = seen.judgements[text]
        if judgement.fails and seen.kind is None and judgement.check.verdict is Verdict.FALLBACK:
            seen.in_float = seen.in_float or graph
        elif judgement.fails and seen.kind is None:
            seen.kind = judgement.kind
        return judgement.fails and judgement.kind == seen.kind

    # -- judging -------------------------------------------------------------------------------------------------------

    def _judge(self, text: str) -> Judgement:
        work = self._isolation.run(f"judge {text}")
        if work.ending is Ending.DONE:
            return Judgement(check=_last_check(work))
        return Judgement(check=self._lost(work), is_internal=work.ending is Ending.ERROR)

    def _serve(self, name: str) -> Iterator[Begin | Check]:
        """Judge a graph; or find where in it the fault shows, and say before each attempt that it begins."""
        task, _, text = name.partition(" ")
        try:
            reference, batches = self._reference(graph_of(text))
        except StageError as error:
            yield failed_check(self._name, error)
            return
        if task == "judge":
            yield verify_model(self._bench, self._name, reference, batches)
            return
        for model, batch, moves_only in _attempts(reference, batches):
            yield Begin(stage="numerics")
            check = run_and_judge(self._bench, self._name, model, [batch], moves_only=moves_only)
            if check.verdict is Verdict(task.partition("-")[2]):
                yield check
                return

    def _reference(self, graph: DrawnGraph) -> tuple[GraphModule, list[Batch]]:
        """The reference model of a graph, and what it is run on. Raises StageError for what the flow refuses."""
        torch.default_generator.manual_seed(graph.seed)
        case = graph.case()
        model, calibration = build_model(case), calibration_inputs(case)
        train = partial(_train, batches=calibration)
        reference = reference_of(self._bench, model, self._claims, self._setup, calibration, train)
        drawn = static_inputs(case, placeholder_grids(reference), directed=DIRECTED_INPUTS, random=1)
        return reference, [batch for _, batch in drawn]

    # -- results -------------------------------------------------------------------------------------------------------

    def nothing_failed(self) -> Check:
        """Return the check of a job in which no graph failed: UNEXERCISED if none was judged."""
        checks = [judgement.check for judgement in self._seen.judgements.values()]
        judged = [check for check in checks if check.verdict in PASSING]
        verdict = Verdict.worst(check.verdict for check in judged)
        quality = next((check.message for check in judged if check.verdict is Verdict.QUALITY), "")
        distances = [check.max_lsb for check in judged if isinstance(check.max_lsb, float)]
        return Check(
            claim=self._name, stage="numerics", rule="NUM-03", outcome="pass" if judged else "skip", verdict=verdict,
            message=quality if judged else "; ".join(dict.fromkeys(check.message for check in checks)) or _NOTHING,
            max_lsb=max(distances, default=None), cases=len(checks),
            evidence=evidence({"graphs": len(checks), "unexercised": len(checks) - len(judged)}),
        )  # fmt: skip

    def reproduce(self, graph: DrawnGraph) -> tuple[Check, str]:
        """Return the check of a graph that failed, and its script ("" if none can be written)."""
        judgement, graphs = self._seen.judgements[graph.text()], len(self._seen.judgements)
        check, script = judgement.check, ""
        shown: dict[str, object] = {**check.evidence, "graph": str(graph), "graphs": graphs}
        message = f"in a graph of {len(graph.calls)} patterns: {check.message}"
        if not judgement.is_internal:
            try:
                script = self._script(graph, check)
            except NoScriptError as error:
                message = f"{message} (no script: {error})"
        if script:
            shown["script_fails_alone"] = fails = fails_alone(script, self._bench.spec)
            message += "" if fails else " (the script does not fail on its own: a bug of the suite)"
        reproduced = replace(
            check, outcome="fail", message=message, slack_lsb=None, cases=graphs, evidence=evidence(shown)
        )  # fmt: skip
        return reproduced, script

    def _script(self, graph: DrawnGraph, check: Check) -> str:
        """Write the script of a graph that failed. Raises NoScriptError."""
        failure = self._locate(graph, check.verdict)
        return script_of(failure, self._bench, name=self._name, message=check.message)

    def _locate(self, graph: DrawnGraph, verdict: Verdict) -> Failure:
        """Find the model and the one batch that fail so: a pattern, or else the whole. Raises NoScriptError."""
        work = self._isolation.run(f"locate-{verdict.value} {graph.text()}")
        attempts = [message for message in work.messages if isinstance(message, Begin)]
        if not attempts:
            raise NoScriptError("the flow ends before the backend is asked")
        if work.ending is Ending.DONE and isinstance(work.messages[-1], Begin):
            raise NoScriptError("not reproducible when batches run one at a time")
        check = _last_check(work) if work.ending is Ending.DONE else self._lost(work)
        model, batch, _ = list(_attempts(*self._reference(graph)))[len(attempts) - 1]
        return Failure(model=model, batch=batch, check=check)

    def _lost(self, work: WorkResult) -> Check:
        """Return the check of a graph in which the process died or hung, or the suite failed."""
        verdict, message, shown = verdict_of_lost_work(work)
        return Check(
            claim=self._name, stage="numerics", rule="", outcome="error", verdict=verdict, message=message,
            evidence=shown,
        )  # fmt: skip


def _attempts(reference: GraphModule, batches: Sequence[Batch]) -> Iterator[tuple[GraphModule, Batch, bool]]:
    """Where a fault may show: each pattern on each batch, then the whole model; and whether that only moves."""
    cut = subgraphs(reference, batches)
    yield from ((each.model, batch, each.moves_only) for each in cut for batch in each.batches)
    yield from ((reference, batch, False) for batch in batches)


def _train(prepared: nn.Module, batches: Sequence[Batch]) -> None:
    """Take a few steps towards smaller outputs; relative ones, so that large values do not diverge."""
    for batch in batches:
        loss = torch.stack([output.square().mean() for output in tensors(prepared(*batch))]).sum()
        descend(prepared, loss / (1 + loss.detach()), RATE)


def _choosing(coin: Any) -> Choose:
    """Choose between options by flips of a coin, none of them heads for the first.

    Not by integers: Hypothesis draws some of those from constants that it finds in whatever modules are loaded.
    """

    def choose(options: Sequence[Any]) -> Any:
        number = 0
        for _ in range((len(options) - 1).bit_length()):
            number = 2 * number + coin()
        return options[number % len(options)]

    return choose


def _last_check(work: WorkResult) -> Check:
    """Return the check that a child sent."""
    return next(message for message in reversed(work.messages) if isinstance(message, Check))
