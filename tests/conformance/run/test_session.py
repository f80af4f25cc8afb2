"""A run as it is opened: claims, waivers, header, and the IDs of its tests."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fx_quant_conformance.backends.base import Backend, Capabilities, Representation
from fx_quant_conformance.conformance.machine.child import Ending
from fx_quant_conformance.conformance.run.judging import open_workplaces
from fx_quant_conformance.conformance.run.opening import open_run
from fx_quant_conformance.conformance.run.session import Run, open_session, param_id, run_of
from fx_quant_conformance.conformance.run.setup import Setup
from fx_quant_conformance.conformance.stages.config import plan_claim
from tests.conformance.support.endings import is_gone
from tests.conformance.support.fake_backends import fakes
from tests.conformance.support.suite_runs import options


def test_parameter_ids_are_unique_and_left_as_they_are_by_pytest() -> None:
    texts = ["a[0..1]/x", "größe", "gr\\xf6\\xdfe", "two\nlines", "a::b"]
    ids = [param_id(text) for text in texts]
    assert len(set(ids)) == len(ids)
    assert all(i.isascii() and i.isprintable() and "\\" not in i for i in ids)
    assert ids[0] == "a[0..1]/x"


@pytest.mark.parametrize(
    ("backend", "parts"),
    [
        (fakes.ConfigRaises(), "backend good: backend_config\\(\\) raised KeyError: 'linear table'"),
        (fakes.NoConfig(), "what backend_config\\(\\) returned cannot be read: ConfigError: expected"),
        (fakes.ClaimsNothing(), "backend good: backend_config\\(\\) claims nothing"),
        (fakes.BadCapabilities(), "backend good: capabilities\\(\\) raised ValueError: .*per_group"),
    ],
)
def test_a_config_that_cannot_be_had_is_a_usage_error(tmp_path: Path, backend: Backend, parts: str) -> None:
    with pytest.raises(pytest.UsageError, match=parts):
        open_run(options(tmp_path), backend)


def test_a_config_may_come_as_torchs_own_or_as_a_dict(tmp_path: Path) -> None:
    class AsDict(fakes.Good):
        representation = Representation.DECOMPOSED

        def backend_config(self) -> Any:
            return super().backend_config().to_dict()

    ours, theirs = (open_run(options(tmp_path), backend) for backend in (fakes.Good(), AsDict()))
    assert [c.id for c in ours.claims] == [c.id for c in theirs.claims]
    assert ours.make_header().config_sha256 == theirs.make_header().config_sha256


@pytest.mark.slow
def test_waivers_come_from_the_backend_the_option_or_nowhere(tmp_path: Path) -> None:
    own, given = tmp_path / "own.toml", tmp_path / "given.toml"
    table = '[[waiver]]\nclaim = "{0}"\nverdict = "REFUTED"\nrule = "NUM-03"\nreason = "{0}"\nurl = "https://a.b"\n'
    own.write_text(table.format("own"))
    given.write_text(table.format("given"))
    backend = fakes.Good()
    backend.waivers = own
    runs = [open_run(options(tmp_path, **o), backend) for o in ({}, {"waivers": given}, {"no_waivers": True})]
    assert [[entry.claim for entry in run.waivers.entries] for run in runs] == [["own"], ["given"], []]
    assert [run.make_header().waivers.get("file") for run in runs] == ["own.toml", "given.toml", None]
    assert len(runs[0].make_header().waivers["sha256"]) == 64
    assert runs[0].waivers.complete and not open_run(options(tmp_path, profile="quick"), backend).waivers.complete


def test_a_waiver_file_that_cannot_be_read_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(pytest.UsageError, match=r"none\.toml: cannot be read"):
        open_run(options(tmp_path, waivers=tmp_path / "none.toml"), fakes.Good())


def test_the_header_says_which_arguments_a_backend_declares_not_to_take(tmp_path: Path) -> None:
    def small(sizes: tuple[int, ...]) -> bool:
        """At most 1,024 columns.

        Larger ones do not fit the memory.
        """
        return sizes[-1] <= 1024

    class Limited(fakes.Good):
        def capabilities(self) -> Capabilities:
            return Capabilities(limits={"nn.Linear": {"shape": small, "bias": (True,), "_unbatched": (False,)}})

    said = {"nn.Linear": {"shape": "At most 1,024 columns", "bias": "True", "unbatched": "False"}}
    assert open_run(options(tmp_path), Limited()).make_header().limits == said
    assert open_run(options(tmp_path), fakes.Good()).make_header().limits == {}


def test_a_limit_without_effect_is_a_usage_error(tmp_path: Path) -> None:
    """Before, the run went on, and its header said that other values were not tried."""

    class Mistaken(fakes.Good):
        def capabilities(self) -> Capabilities:
            return Capabilities(limits={"nn.Linear": {"in_feature": (8,)}})

    with pytest.raises(pytest.UsageError, match=r"backend .*: Capabilities\.limits.*'in_feature'.*'in_features'"):
        open_run(options(tmp_path), Mistaken())


def test_of_claims_whose_cases_are_counted_those_with_the_most_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = options(tmp_path, profile="quick")
    opened = open_run(chosen, fakes.Good())
    assert {unit.cases for unit in opened.make_outline().units} == {0}
    outline = opened.make_outline(counts_cases=True)
    claims = [unit for unit in outline.units if unit.kind == "claim"]
    assert [unit.cases for unit in claims] == [len(plan_claim(opened.make_bench(), each)) for each in opened.claims]
    few, many = (replace(unit, cases=number) for unit, number in zip(claims[:2], (3, 7), strict=True))
    run = Run.of(Setup(options=chosen, text=""), replace(outline, units=(few, many)))
    assert [param.values for param in run.make_params("claim")] == [(many,), (few,)]
    monkeypatch.setattr("fx_quant_conformance.conformance.run.opening.plan_claim", lambda bench, claim: 1 // 0)
    assert {unit.cases for unit in opened.make_outline(counts_cases=True).units} == {0}, "its own check says why"


@pytest.mark.slow
def test_the_processes_that_open_a_run_do_its_first_work_and_are_not_new_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """What they do not complete is done again in new ones, with their warm-up."""
    fresh = dict[str, list[bool]]()
    for name, tired_of in (("Good", ""), ("TiredOfTalking", "lower"), ("TiredOfTalking", "warm_up")):
        monkeypatch.setenv("TIRED_OF", tired_of)
        run = open_session(options(tmp_path, backend=f"{fakes.__name__}:{name}", profile="quick"))
        worker, judge = openers = run.openers.worker, run.openers.judge
        assert worker is not None and judge is not None
        with closing(open_workplaces(run)) as places:
            assert (run.openers.worker, run.openers.judge) == (None, None)
            assert places.run(run.outline.units[0].id).ending is Ending.DONE
            fresh[tired_of] = [each.served < 2 for each in openers if each is not None]
    assert fresh == {"": [False, False], "lower": [False, False], "warm_up": [True, False]}
    assert [each for each in recwarn if "warm_up" in str(each.message)] == []


@pytest.mark.slow
def test_processes_that_no_work_needs_end_with_the_places(tmp_path: Path) -> None:
    run = open_session(options(tmp_path, backend=f"{fakes.__name__}:Good", profile="quick"))
    pids = [each.pid for each in (run.openers.worker, run.openers.judge) if each is not None]
    open_workplaces(run).close()
    assert len(pids) == 2 and all(map(is_gone, pids))


def test_outside_of_a_run_there_is_no_run(pytestconfig: pytest.Config) -> None:
    with pytest.raises(pytest.UsageError, match="pytest --pyargs fx_quant_conformance --backend=NAME"):
        run_of(pytestconfig)
