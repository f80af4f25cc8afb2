"""Version and commit of the suite: of a checkout, and of a release, whose files are held to its RECORD."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from conformance.machine.release import read_suite_commit, read_suite_version


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(root), "-c", f"core.hooksPath={root / 'none'}", *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_commit_is_marked_when_files_differ_from_it(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert read_suite_commit(tmp_path) == "unknown"
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert read_suite_commit(tmp_path) == commit
    (tmp_path / "file").write_text("2")
    assert read_suite_commit(tmp_path) == f"{commit}-dirty"


def test_a_folder_inside_someone_elses_checkout_has_no_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "theirs")
    (tmp_path / "inner").mkdir()
    assert read_suite_commit(tmp_path / "inner") == "unknown"


def test_no_git_means_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", "")
    assert read_suite_commit(tmp_path) == "unknown"


def test_the_version_is_that_of_the_checkout(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "fx-quant-conformance"\nversion = "7.8.9"\n')
    assert read_suite_version(tmp_path) == "7.8.9"
    assert read_suite_version(tmp_path / "nowhere")
