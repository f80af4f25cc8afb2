"""What the suite says of a run, from its results file alone: nothing is run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backends.reference import ReferenceBackend
from conformance.__main__ import main
from conformance.run.description import describe
from conformance.run.session import open_run
from conformance.stages.stage import stages_of
from reports.codec import decode, loads
from reports.description import RunDescription
from reports.results import Results
from tests.conformance.support.fake_backends import fakes
from tests.conformance.support.suite_runs import options

STAGES = stages_of(ReferenceBackend())  # it gives no Quantizer

SPEC = "tests.conformance.support.fake_backends.fakes:Good"
LINEAR = "nn.Linear/static:in=quint8,w=qint8,b=float32,out=quint8/ptq/per_tensor_symmetric"


@pytest.fixture
def results(runs: Any) -> Callable[..., Results]:
    """The results of a claim that was refuted, and of one that was not, with other options where a test asks."""

    def make(**changes: Any) -> Results:
        header = {"backend": "good", "options": {"backend": SPEC, "allow_quality": False}} | changes
        rows = [*runs.refuted(LINEAR, max_lsb=1.0), runs.check("other"), runs.claim("other")]
        made: Results = runs.results(rows, **header)
        return made

    return make


def test_the_run_is_opened_as_its_header_says(results: Callable[..., Results], tmp_path: Path) -> None:
    given = {
        "backend": SPEC,
        "allow_quality": True,
        "claim_timeout": 5.0,
        "max_examples": 2,
        "isa": "avx2",
        "claim": ["x"],
    }
    said = describe(results(profile="stress", seed=9, options=given), None)
    run = open_run(options(tmp_path, profile="stress"), fakes.Good())
    assert said.error == "" and said.stages == list(STAGES) and said.random == 24 and said.opened is not None
    opened = said.opened
    assert [claim.claim for claim in opened.claims] == [claim.id for claim in run.claims]
    assert [(job.id, job.topic, job.subject) for job in opened.jobs] == [(j.id, j.topic, j.subject) for j in run.jobs]
    assert (opened.header.seed, opened.header.profile, opened.header.claims) == (9, "stress", len(run.claims))
    assert opened.allowed == []
    words = f"--backend={SPEC} --seed=9 --profile=stress --max-examples=2 --claim-timeout=5 --allow-quality --isa=avx2"
    assert opened.claims[0].repro == f"pytest --pyargs conformance {words} --claim {opened.claims[0].claim}"


@pytest.mark.parametrize(
    ("expires", "waived", "problem"),
    [("2025-01-02", [LINEAR], None), ("2025-01-01", [], "expired on 2025-01-01")],
)
def test_waivers_count_as_on_the_day_of_the_run(
    results: Callable[..., Results], tmp_path: Path, expires: str, waived: list[str], problem: str | None
) -> None:
    """Which was 2025-01-02; that of an earlier waiver is long over."""
    path = tmp_path / "npu.toml"
    path.write_text(
        f'[[waiver]]\nclaim = "{LINEAR}"\nverdict = "REFUTED"\nrule = "NUM-03"\nreason = "r"\nexpires = {expires}\n'
    )
    opened = describe(results(), path).opened
    assert opened is not None and list(opened.waivers) == waived
    assert [problem in each for each in opened.problems if problem] == ([True] if problem else [])
    assert opened.header.waivers == {}, "the backend's own file, not the run's"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"options": {"backend": "no_such.module:Npu"}}, "module 'no_such.module' does not import"),
        ({"options": {"backend": SPEC.replace("Good", "ConfigRaises")}}, "backend_config() raised KeyError"),
        ({"profile": "exhaustive"}, "no profile of the suite is 'exhaustive'; it has quick, full, stress"),
    ],
)
def test_a_run_that_cannot_be_opened_says_why(
    results: Callable[..., Results], changes: dict[str, Any], told: str
) -> None:
    said = describe(results(**changes), None)
    assert said.opened is None and told in said.error and said.stages == list(STAGES)


def test_waivers_that_cannot_be_read_say_why(results: Callable[..., Results], tmp_path: Path) -> None:
    said = describe(results(), tmp_path / "none.toml")
    assert said.opened is None and "none.toml: cannot be read" in said.error


def test_the_command_writes_what_reports_read(runs: Any, capsys: Any) -> None:
    header = {"backend": "good", "options": {"backend": SPEC}, "claims_in_config": 2}
    path, target = runs.lines([runs.check(LINEAR), runs.claim(LINEAR)], **header), runs.directory / "said.json"
    assert main(["describe", str(path), "-o", str(target)]) == 0
    said = decode(loads(target.read_text()), {RunDescription.kind: RunDescription})
    assert isinstance(said, RunDescription) and said.opened is not None and said.opened.header.backend == "good"
    assert json.loads(target.read_text())["kind"] == "description"
    assert main(["describe", str(path) + "x", "-o", str(target)]) == 2
    assert "cannot be read" in capsys.readouterr().err
