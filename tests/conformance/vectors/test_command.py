"""A command as backend: what it does wrong is the verdict of its case, and the others are not harmed."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import pytest

from fx_quant_conformance.conformance.run.judging import open_workplaces, rows_of
from fx_quant_conformance.conformance.run.options import Options
from fx_quant_conformance.conformance.run.session import open_session
from fx_quant_conformance.conformance.vectors.command import CommandError, read_settings
from fx_quant_conformance.conformance.vectors.files import remove
from fx_quant_conformance.reports.results import read_results
from fx_quant_conformance.reports.schema import Judged
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.vectors.board import REFUSES
from tests.conformance.vectors.bundles import answer_bundle, make_options, write_bundle
from tests.support.warm_python import run_python

CLAIMS = tuple(
    f"{op}/static:in=quint8,w=*,b=*,out=quint8/ptq/no_weight"
    for op in (
        "torch.add",
        "torch.mul",
        "torch.cat",
        "nn.ReLU",
        "nn.MaxPool2d",
        "nn.Hardswish",
        "torch.mean",
        "F.elu",
        "nn.AvgPool2d",
    )
)
WRONG = {
    CLAIMS[0]: ("hang", Verdict.TIMEOUT, "did not end within 3 s"),
    CLAIMS[1]: ("die", Verdict.CRASHED, "bus error"),
    CLAIMS[2]: ("flood", Verdict.CRASHED, "the last words"),
    CLAIMS[3]: ("write_half", Verdict.CRASHED, "SIGKILL"),
    CLAIMS[4]: ("refuse", Verdict.REFUTED, "no such op on this board"),
    CLAIMS[5]: ("write_half_and_end", Verdict.REFUTED, "outputs.npz cannot be read"),
    CLAIMS[6]: ("forget", Verdict.REFUTED, "nothing was handed in"),
    CLAIMS[7]: ("exit_with_3", Verdict.CRASHED, "no link to the board"),
}
"""What goes wrong in the first case of a claim, the claim's verdict, and words of its reason."""
NEW = get_context("spawn")
SURE = '{"quantized_ops": ["op0", "add", "mul", "cat", "mean", "elu"], "float_fallbacks": []}'


class Board(NamedTuple):
    """Claims that a bundle has, their cases in the bundle's order, and answers to them that are right."""

    cases: dict[str, list[str]]
    answers: Path


@pytest.fixture(scope="session")
def board(tmp_path_factory: pytest.TempPathFactory) -> Board:
    folder = tmp_path_factory.mktemp("board")
    write_bundle(folder / "bundle", claims=CLAIMS)
    answer_bundle(folder / "bundle", folder / "answers")
    for case in (folder / "answers").iterdir():
        (case / "execution.json").write_text(SURE, encoding="utf-8")
    rows = json.loads((folder / "bundle" / "device" / "manifest.json").read_text())["cases"]
    cases = {claim: [row["case"] for row in rows if row["claim"] == claim] for claim in CLAIMS}
    return Board(cases=cases, answers=folder / "answers")


def write_command(
    folder: Path, board: Board, faults: dict[str, str], *, running: Path | None = None, **settings: object
) -> Path:
    """Write a TOML file whose command answers as the faults say, and notes in a folder that it is ``running``."""
    (folder / "log").mkdir(exist_ok=True)
    plan = {"answers": str(board.answers), "faults": faults, "log": str(folder / "log")}
    plan |= {} if running is None else {"running": str(running)}
    (folder / "plan.json").write_text(json.dumps(plan))
    program = Path(__file__).with_name("board.py")
    words = [sys.executable, "-S", str(program), str(folder / "plan.json"), "{bundle}", "{outputs}"]
    known = {
        "name": "a_board",
        "config": "fx_quant_conformance.backends.reference:ReferenceBackend",
        "command": words,
        "timeout": 3,
        "batch": 8,
        "refused": [REFUSES],
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in (known | settings).items()]
    path = folder / "board.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def certify(file: Path, folder: Path, workers: int, *claims: str) -> dict[str, tuple[Verdict, str]]:
    """Run the suite on a command; return verdict and reason of each claim."""
    chosen = [f"--claim={claim}" for claim in claims or CLAIMS]
    words = (
        "-m",
        "pytest",
        "--pyargs",
        "fx_quant_conformance",
        f"--backend=command:{file}",
        "--profile=quick",
        "-q",
        f"-n{workers}",
        "-pno:cacheprovider",
        f"--report-dir={folder}",
        *chosen,
    )
    done = run_python(*words, cwd=file.parent, timeout=150)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    results = read_results(folder / "results.jsonl")
    return {row.claim: (row.verdict, row.reason) for row in results.claims}


@pytest.mark.slow
def test_each_fault_is_the_verdict_of_its_case(board: Board, tmp_path: Path) -> None:
    faults = {board.cases[claim][0]: fault for claim, (fault, _, _) in WRONG.items()}
    judged = certify(write_command(tmp_path, board, faults), tmp_path / "report", 0)
    footer = read_results(tmp_path / "report" / "results.jsonl").footer
    notes = " ".join(footer.notes if footer else ())
    assert "calls of the command did not end with status 0 (-9, 3, 9, killed at the limit)" in notes
    assert judged[CLAIMS[8]] == (Verdict.VERIFIED, "")
    for claim, (fault, verdict, words) in WRONG.items():
        found, reason = judged[claim]
        assert (found, words in reason) == (verdict, True), (fault, found, reason)
    # the script of each runs the command on its case alone
    for row in read_results(tmp_path / "report" / "results.jsonl").claims:
        if row.claim in (CLAIMS[5], CLAIMS[7]):
            done = run_python(str(tmp_path / "report" / row.script_path), cwd=tmp_path, timeout=60)
            status = {CLAIMS[5]: 0, CLAIMS[7]: 3}[row.claim]
            assert (done.returncode, f"the command ended with status {status};" in done.stdout) == (1, True), done
            assert sorted((tmp_path / "log").iterdir())[-1].read_text() == board.cases[row.claim][0]


HARM = {
    CLAIMS[0]: ("stop_the_parent", Verdict.TIMEOUT, "did not end within 3 s"),
    CLAIMS[1]: ("kill_the_parent", Verdict.CRASHED, "SIGKILL"),
    CLAIMS[2]: ("leave_a_daemon", Verdict.VERIFIED, ""),
    CLAIMS[3]: ("dig_and_die", Verdict.CRASHED, "SIGKILL"),
}
"""What a command does beside its work in the first case of a claim, and what comes of it."""


@pytest.mark.slow
def test_what_a_command_does_to_its_parent_or_leaves_behind_harms_no_run(board: Board, tmp_path: Path) -> None:
    faults = {board.cases[claim][0]: fault for claim, (fault, _, _) in HARM.items()}
    judged = certify(write_command(tmp_path, board, faults), tmp_path / "report", 0, *HARM)
    for claim, (fault, verdict, words) in HARM.items():
        found, reason = judged[claim]
        assert (found, words in reason) == (verdict, True), (fault, found, reason)
    calls = tmp_path / "report" / "device-calls"
    daemons = [int(path.name.removeprefix("daemon-")) for path in calls.glob("*/daemon-*")]
    remove(calls)  # pytest could not
    assert len(daemons) > 1 and not [pid for pid in daemons if is_running(pid)]


def is_running(pid: int) -> bool:
    """Tell whether a process is there that is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def run_side_by_side(file: Path, folder: Path, claims: Sequence[str]) -> None:
    """Judge the claims in two processes, as two workers do; all are to be verified."""
    options = replace(make_options(f"command:{file}", claims=tuple(claims)), report_dir=folder)
    processes = [NEW.Process(target=_judge_some, args=(options, claims[half::2])) for half in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]


def _judge_some(options: Options, claims: Sequence[str]) -> None:
    run = open_session(options)
    with closing(open_workplaces(run)) as places:
        for claim in claims:
            row = rows_of(run, run.units[claim], places.run(claim))[-1]
            assert isinstance(row, Judged) and row.verdict is Verdict.VERIFIED, row


@pytest.mark.slow
def test_one_call_runs_many_cases(board: Board, tmp_path: Path) -> None:
    file = write_command(tmp_path, board, {board.cases[CLAIMS[8]][0]: "leave_a_child"}, batch=64, timeout=60)
    run_side_by_side(file, tmp_path / "report", CLAIMS)
    calls = [path.read_text().split() for path in (tmp_path / "log").iterdir()]
    assert Counter(case for call in calls for case in call) == Counter(chain(*board.cases.values()))
    assert len(calls) == 1, "64 cases fit into one call"


@pytest.mark.slow
def test_a_case_is_tried_as_often_as_the_file_says_and_nothing_of_an_earlier_run_is_taken(
    board: Board, tmp_path: Path
) -> None:
    case = board.cases[CLAIMS[0]][0]
    file = write_command(tmp_path, board, {})
    assert certify(file, tmp_path / "report", 0, CLAIMS[0])[CLAIMS[0]][0] is Verdict.VERIFIED
    write_command(tmp_path, board, {case: "die"}, retries=2)
    assert certify(file, tmp_path / "report", 1, CLAIMS[0])[CLAIMS[0]][0] is Verdict.CRASHED
    alone = [path for path in (tmp_path / "log").iterdir() if path.read_text() == case]
    assert len(alone) == 3, "one try and two more"


@pytest.mark.slow
def test_no_more_calls_than_devices_run_at_once(board: Board, tmp_path: Path) -> None:
    running = tmp_path / "running"
    running.mkdir()
    file = write_command(tmp_path, board, {}, batch=1, running=running, timeout=60)
    run_side_by_side(file, tmp_path / "report", CLAIMS[:2])
    assert {path.read_text() for path in tmp_path.glob("most-*")} == {"1"}


WHOLE = 'config = "a:b"\ncommand = ["x", "{bundle}", "{outputs}"]\n'
BROKEN = {
    "no TOML": ("config = ", "no TOML"),
    "no command": ('config = "a:b"', "command is missing"),
    "unknown key": ('config = "a:b"\ncomand = []', "unknown key 'comand'"),
    "text for a list": ('config = "a:b"\ncommand = "x"', "give a list"),
    "no place for outputs": ('config = "a:b"\ncommand = ["x", "{bundle}"]', "does not name {outputs}"),
    "NaN seconds": (f"{WHOLE}timeout = nan", "timeout is nan"),
    "endless": (f"{WHOLE}timeout = inf", "timeout is inf"),
    "a long timeout": (f"{WHOLE}timeout = 1e300", "give at most 604800"),
    "a name with =": (f'{WHOLE}[environment]\n"A=B" = "1"', "a NUL or ="),
    "no batch": (f"{WHOLE}batch = 0", "batch is 0; give 1 or more"),
    "status 0 refused": (f"{WHOLE}refused = [0]", "from 1 to 255"),
    "no folder": (f'{WHOLE}folder = "none"', "which is none"),
    "numbers in the environment": (f"{WHOLE}[environment]\nA = 1", "give texts"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_an_error_in_one_line(name: str, tmp_path: Path) -> None:
    text, words = BROKEN[name]
    path = tmp_path / "board.toml"
    path.write_text(text)
    with pytest.raises(CommandError, match=str(path)) as raised:
        read_settings(path)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_a_missing_file_is_an_error_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="No such file"):
        read_settings(tmp_path / "none.toml")


def test_a_config_that_cannot_be_imported_is_a_usage_error(tmp_path: Path) -> None:
    file = tmp_path / "board.toml"
    file.write_text(WHOLE.replace("a:b", "no_such_module:Board"))
    with pytest.raises(pytest.UsageError, match="module 'no_such_module' does not import"):
        open_session(make_options(f"command:{file}"))
