"""Files that others name: regular ones are read, up to a size; nothing else is waited for, and all is one line."""

from __future__ import annotations

import lzma
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fx_quant_conformance.reports import reading
from fx_quant_conformance.reports.reading import FileFault, open_to_append, read_bytes, read_text
from fx_quant_conformance.reports.results import ResultsError, read_results
from tests.support.reporting import main

STRANGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, "is no regular file"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "is no regular file"),
    "a folder": (lambda path: path.mkdir(), "is no regular file"),
    "nothing": (lambda path: None, "cannot be read: No such file or directory"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "cannot be read: Too many levels of symbolic links"),
}


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """A test that waits for a pipe ends."""
    signal.alarm(20)
    yield
    signal.alarm(0)


@pytest.fixture(params=STRANGE)
def strange(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    make, told = STRANGE[request.param]
    make(tmp_path / "strange.jsonl")
    return tmp_path / "strange.jsonl", told


def test_what_is_no_regular_file_is_refused_at_once(
    strange: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    path, told = strange
    with pytest.raises(FileFault, match=f"^{told}$"):
        read_bytes(path)
    for words in (["render", str(path)], ["diff", str(path), str(path)]):
        assert main(words) == 2
        assert capsys.readouterr() == ("", f"reports: {path}: {told}\n")


def test_links_are_followed_but_where_they_are_not_to_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "link") == b"x"
    with pytest.raises(FileFault, match="is a symbolic link"):
        read_bytes(tmp_path / "link", follows_links=False)


def test_a_size_is_not_exceeded_even_by_files_that_say_none(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(FileFault, match="has more than 4 bytes"):
        read_bytes(path, 4)
    if Path("/proc/self/maps").exists():  # its size is 0
        assert len(read_bytes(Path("/proc/self/maps"))) > 100


def test_a_text_is_utf_8(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\xff")
    with pytest.raises(FileFault, match="is not UTF-8"):
        read_text(tmp_path / "file")


def test_a_packed_file_is_unpacked_up_to_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb.xz"
    path.write_bytes(lzma.compress(b"\0" * 1_000_000))
    monkeypatch.setattr(reading.read_most, "__defaults__", (1000,))
    with pytest.raises(ResultsError, match=r"bomb\.xz: has more than 1000 bytes"):
        read_results(path)
    path.write_bytes(path.read_bytes()[:-9])
    monkeypatch.undo()
    with pytest.raises(ResultsError, match=r"bomb\.xz: is no xz file"):
        read_results(path)


def test_a_pipe_and_a_folder_take_no_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises(FileFault):
            open_to_append(path)
