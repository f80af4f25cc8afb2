"""Version and commit of the suite: of a checkout, and of a release, whose files are held to its RECORD."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fx_quant_conformance.conformance.machine.release import (
    PACKAGE,
    find_package,
    read_suite_commit,
    read_suite_version,
)


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
    assert read_suite_version(tmp_path) != "7.8.9", "a file in an installed package is anybody's"
    (tmp_path / PACKAGE).mkdir()
    assert find_package(tmp_path) == tmp_path, "so is an empty folder"
    (tmp_path / PACKAGE / "door.py").touch()
    assert (read_suite_version(tmp_path), find_package(tmp_path)) == ("7.8.9", tmp_path / PACKAGE)
    assert read_suite_version(tmp_path / "nowhere")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of a commit with a package of the suite, a link, and a list of what git ignores."""
    root = tmp_path / "checkout"
    (root / "conformance" / "run").mkdir(parents=True)
    (root / "docs").mkdir()
    git(root, "init", "-q")
    for name in ("conformance/__init__.py", "conformance/judge.py", "conformance/run/table.json", "docs/a.md"):
        (root / name).write_text(f"'{name}'\n")
    (root / ".gitignore").write_text("*.py[co]\n*.so\n/torch\nhidden*\n")
    (root / "docs" / "link.md").symlink_to("a.md")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    return root


def test_a_clean_checkout_is_of_its_commit(checkout: Path) -> None:
    """Beside it may lie what nothing imports: what a run wrote, Python's caches, a folder of the user's."""
    for name in (
        "results.jsonl",
        "conformance/__pycache__/judge.cpython-311.pyc",
        "build/lib/conformance/judge.py",
        ".venv/lib/torch.py",
        "conformance/gone/__pycache__/__init__.cpython-311.pyc",
    ):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("")
    assert read_suite_commit(checkout) == git(checkout, "rev-parse", "HEAD")


def _edit(root: Path) -> None:
    (root / "conformance" / "judge.py").write_text("VERIFIED = True\n")


def _edit_under(*words: str) -> Callable[[Path], None]:
    """Return what edits a file after a git command that makes git look away."""

    def edit(root: Path) -> None:
        git(root, *words)
        _edit(root)

    return edit


def _add(name: str, *words: str) -> Callable[[Path], None]:
    """Return what adds a file that the commit does not have, after a git command."""

    def add(root: Path) -> None:
        if words:
            git(root, *words)
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("")

    return add


def _filter(root: Path) -> None:
    """Have git compare what a program of the user's makes of the file."""
    git(root, "config", "filter.same.clean", "git show HEAD:conformance/judge.py")
    (root / ".git" / "info").mkdir(exist_ok=True)
    (root / ".git" / "info" / "attributes").write_text("judge.py filter=same\n")
    _edit(root)


def _replace_commit(root: Path) -> None:
    """Have git answer with another commit's files."""
    first = git(root, "rev-parse", "HEAD")
    _edit(root)
    git(root, "commit", "-q", "-a", "-m", "other")
    other = git(root, "rev-parse", "HEAD")
    git(root, "reset", "-q", "--soft", first)
    git(root, "replace", first, other)


def _link_elsewhere(root: Path) -> None:
    (root / "docs" / "link.md").unlink()
    (root / "docs" / "link.md").symlink_to("b.md")


CHANGES: dict[str, Callable[[Path], None]] = {
    "an edit": _edit,
    "an edit assumed to be none": _edit_under("update-index", "--assume-unchanged", "conformance/judge.py"),
    "an edit outside of the sparse checkout": _edit_under("update-index", "--skip-worktree", "conformance/judge.py"),
    "an edit behind a filter": _filter,
    "an edit that replaces the commit": _replace_commit,
    "a missing file": lambda root: (root / "docs" / "a.md").unlink(),
    "another link": _link_elsewhere,
    "an untracked module that git does not show": _add("torch.py", "config", "status.showUntrackedFiles", "no"),
    "an ignored module": _add("conformance/hidden.py"),
    "an ignored package": _add("torch/__init__.py"),
    "compiled code without its source": _add("conformance/judge.pyc"),
    "an ignored file of data": _add("conformance/run/hidden.json"),
    "another configuration of pytest": _add("pytest.ini", "config", "status.showUntrackedFiles", "no"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_from_the_commit_is_seen_whatever_git_is_told(checkout: Path, change: str) -> None:
    CHANGES[change](checkout)
    assert read_suite_commit(checkout) == f"{git(checkout, 'rev-parse', 'HEAD')}-dirty"


def test_the_variables_of_a_git_hook_name_no_other_checkout(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git sets GIT_DIR and GIT_INDEX_FILE for each hook; a run that one starts is still of its own checkout."""
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    git(other, "commit", "-q", "--allow-empty", "-m", "theirs")
    commit = git(checkout, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    assert read_suite_commit(checkout) == commit
    _edit(checkout)
    assert read_suite_commit(checkout) == f"{commit}-dirty" and "GIT_DIR" in os.environ
