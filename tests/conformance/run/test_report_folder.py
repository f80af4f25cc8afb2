"""The folder of a report: nothing of a user's is replaced, no link is followed, and two runs never share it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fx_quant_conformance.conformance.run.report_folder import (
    HTML,
    KEPT,
    LOCK,
    RESULTS,
    SCRIPTS,
    WAIVERS,
    FolderError,
    ReportFolder,
)
from fx_quant_conformance.reports.results import read_results
from tests.conformance.support.suite_runs import run

pytestmark = pytest.mark.slow

ONE = "--claim=nn.Linear/*/per_tensor_symmetric"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has written all that a run of a backend in Python writes."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "npu.toml").write_text("# none yet\n")
    ran = run(folder, "fakes:LowerRaises", ONE, f"--waivers={folder / 'npu.toml'}")
    assert ran.status == 1, ran.said
    assert {path.name for path in ran.folder.iterdir()} == {RESULTS, HTML, SCRIPTS, WAIVERS, LOCK}
    return ran.folder


@pytest.fixture
def used(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "report"))


def read_all(folder: Path) -> dict[str, bytes | str]:
    """All files of a folder, and where links lead."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_what_an_earlier_run_has_written_gives_way(used: Path) -> None:
    ReportFolder(used).clear()
    assert set(read_all(used)) == {RESULTS, LOCK} and not (used / RESULTS).read_bytes()
    ReportFolder(used).clear()  # a run that ends before its first row leaves this


def test_results_that_the_run_goes_on_with_are_kept(used: Path) -> None:
    earlier = (used / RESULTS).read_bytes()
    ReportFolder(used).clear(keeps_results=True)
    assert (used / RESULTS).read_bytes() == earlier, "a run that is killed before it has taken them over loses none"
    folder = ReportFolder(used)
    folder.clear(keeps_results=True)
    folder.results.write_bytes(b"new\n")
    folder.put_results()
    folder.release()
    assert (used / KEPT).read_bytes() == earlier and (used / RESULTS).read_bytes() == b"new\n"
    assert set(read_all(used)) == {RESULTS, KEPT, LOCK}


def test_what_was_cut_short_gives_way(used: Path) -> None:
    rows = (used / RESULTS).read_bytes()
    (used / RESULTS).write_bytes(rows[: rows.rindex(b"\n", 0, -1) + 20])
    (used / HTML).unlink()
    ReportFolder(used).clear()
    assert set(read_all(used)) == {RESULTS, LOCK}


def write(name: str, data: bytes = b"mine\n") -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)

    return spoil


def link(name: str) -> Callable[[Path], object]:
    """Put a file aside, and a link to it in its place."""

    def spoil(folder: Path) -> None:
        aside = folder.parent / "aside"
        (folder / name).rename(aside)
        (folder / name).symlink_to(aside)

    return spoil


def edit_script(folder: Path) -> None:
    next((folder / SCRIPTS).iterdir()).write_text("print('mine')\n")


def leave_only(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Empty the folder first."""

    def spoil(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        make(folder)

    return spoil


def put_pipe(folder: Path) -> None:
    (folder / WAIVERS).unlink()
    os.mkfifo(folder / WAIVERS)


STRANGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a script of the user's": ("scripts/train.py", write("scripts/train.py")),
    "a script that was edited": ("scripts/", edit_script),
    "other waivers": (WAIVERS, write(WAIVERS)),
    "empty waivers": (WAIVERS, write(WAIVERS, b"")),
    "another page": (HTML, write(HTML, b"<html>mine</html>\n")),
    "no results file": (RESULTS, write(RESULTS)),
    "results that lost their header": (RESULTS, write(RESULTS, b'{"kind": "claim"}\n')),
    "a report without results": (SCRIPTS, lambda folder: (folder / RESULTS).unlink()),
    "calls of no command": ("device-calls", write("device-calls/photos.txt")),
    "a link to results": (RESULTS, link(RESULTS)),
    "a link to scripts": (SCRIPTS, link(SCRIPTS)),
    "a link that leads nowhere": (RESULTS, leave_only(lambda folder: (folder / RESULTS).symlink_to("none"))),
    "a pipe": (WAIVERS, put_pipe),
}


@pytest.mark.parametrize("name", STRANGE)
def test_what_no_earlier_run_has_written_is_refused_and_stays(used: Path, name: str) -> None:
    told, spoil = STRANGE[name]
    spoil(used)
    before = read_all(used.parent) if name != "a pipe" else {}
    with pytest.raises(FolderError, match="is not what an earlier run has written: move it away") as raised:
        ReportFolder(used).clear()
    assert str(raised.value).startswith(str(used / told)) and "\n" not in str(raised.value)
    after = read_all(used.parent) if name != "a pipe" else {}
    after.pop(f"report/{LOCK}", None)
    before.pop(f"report/{LOCK}", None)
    assert after == before


def test_waivers_that_the_run_is_given_may_be_the_copy(used: Path) -> None:
    """They stay: they may be the user's only ones."""
    write(WAIVERS)(used)
    ReportFolder(used).clear(b"mine\n")
    assert (used / WAIVERS).read_bytes() == b"mine\n"


def test_a_kept_file_of_the_users_is_not_replaced(used: Path) -> None:
    write(KEPT)(used)
    with pytest.raises(FolderError, match=KEPT):
        ReportFolder(used).clear(keeps_results=True)
    assert (used / KEPT).read_bytes() == b"mine\n" and read_results(used / RESULTS).footer


def test_a_link_that_appears_later_is_replaced_and_not_followed(tmp_path: Path) -> None:
    folder, other = ReportFolder(tmp_path / "report"), tmp_path / "other"
    other.write_text("mine\n")
    folder.clear()
    (folder.path / HTML).symlink_to(other)
    folder.write(HTML, b"page")
    assert other.read_text() == "mine\n" and (folder.path / HTML).read_bytes() == b"page"


def test_a_folder_of_a_vendors_own_is_refused_by_the_run_and_stays(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    folder.mkdir()
    for name in ("scripts/train.py", WAIVERS):
        write(name)(folder)
    before = read_all(folder)
    ran = run(tmp_path, "fakes:Good", ONE)
    assert ran.status == 4 and f"--report-dir: {folder / 'scripts' / 'train.py'} is not" in ran.err
    assert {name: data for name, data in read_all(folder).items() if name != LOCK} == before


def test_a_second_run_into_one_folder_is_a_usage_error(tmp_path: Path) -> None:
    """The first one, here this process, has it until it lets it go."""
    first = ReportFolder(tmp_path / "report")
    ran = run(tmp_path, "fakes:Good", ONE)
    assert ran.status == 4 and "another run writes to" in ran.err and "Traceback" not in ran.err
    first.release()
    assert run(tmp_path, "fakes:Good", ONE).status == 0
