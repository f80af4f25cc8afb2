"""What is built: the wheel has what the code reads, the sdist has the checkout, and both name their commit."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from fx_quant_conformance.conformance.machine.release import COMMIT, FOLDERS, PACKAGE
from tests.package.conftest import Release, build

pytestmark = pytest.mark.slow

CHANGE = "from fx_quant_conformance.conformance.machine.release import *; from pathlib import Path; "
CHANGE += "root = Path({root!r}).resolve(); "
CHANGE += "print(read_suite_version(root), read_suite_commit(root), find_change(root), sep='|')"
MODULE = Path("reports", "codec.py")
INSIDE = Path(PACKAGE)


def files_of(checkout: Path) -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=checkout, capture_output=True, text=True, check=True)
    return set(filter(None, listed.stdout.split("\0")))


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def ask(release: Release, site: Path, cwd: Path, inside: Path = INSIDE) -> list[str]:
    """Version, commit and change of the packages ``inside`` a folder of Python's path, as they say themselves."""
    done = release.run("-c", CHANGE.format(root=str(site / inside)), cwd=cwd, site=site)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("|")


@pytest.fixture
def site(release: Release, tmp_path: Path) -> Path:
    return Path(shutil.copytree(release.site, tmp_path / "site"))


def test_the_wheel_has_every_file_of_its_packages_and_nothing_else(release: Release) -> None:
    names = {name for name in content(release.wheel) if ".dist-info/" not in name}
    tracked = files_of(release.checkout) - {f"{PACKAGE}/{folder}" for folder in FOLDERS}
    own = {f"{PACKAGE}/{name}" for name in tracked if name.partition("/")[0] in FOLDERS}
    own |= {name for name in tracked if name.startswith(f"{PACKAGE}/")}
    assert names - own == {
        (INSIDE / COMMIT).as_posix(),
        f"{PACKAGE}/backends/findings.md",
        f"{PACKAGE}/backends/torch_engines/findings.md",
    }
    assert own <= names
    assert {f"{PACKAGE}/py.typed", *(f"{PACKAGE}/{folder}/py.typed" for folder in FOLDERS)} <= names


def test_a_release_has_one_name(release: Release) -> None:
    places = {name.partition("/")[0] for name in content(release.wheel)}
    assert {place for place in places if not place.endswith(".dist-info")} == {PACKAGE}


def test_the_metadata_has_licence_extras_and_entry_points(release: Release) -> None:
    told = {
        name.partition(".dist-info/")[2]: text.decode()
        for name, text in content(release.wheel).items()
        if "-info/" in name
    }
    assert "licenses/LICENSE" in told
    assert "Provides-Extra: digits\n" in told["METADATA"] and "License-Expression: BSD-3-Clause\n" in told["METADATA"]
    assert "fx-quant-conformance = fx_quant_conformance.door:main" in told["entry_points.txt"]


def test_the_sdist_has_the_checkout_and_makes_the_same_wheel(release: Release, tmp_path: Path) -> None:
    with tarfile.open(release.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    packed = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file() or path.is_symlink()}
    assert files_of(release.checkout) <= packed
    assert (source / COMMIT).read_text().strip() == release.commit
    assert content(build("wheel", source, tmp_path / "again")) == content(release.wheel)
    assert ask(release, source, tmp_path, Path())[1] == f"{release.commit}-dirty", (
        "no RECORD shows that it is unchanged"
    )


def test_a_changed_checkout_is_told_and_what_was_built_before_is_left_out(release: Release, tmp_path: Path) -> None:
    checkout = Path(shutil.copytree(release.checkout, tmp_path / "suite"))
    (checkout / MODULE).write_text("other = 1\n")
    old = checkout / "build" / "lib" / PACKAGE / "reports" / "of_an_earlier_build.py"
    old.parent.mkdir(parents=True, exist_ok=True)
    old.touch()
    built = content(build("wheel", checkout, tmp_path / "dist"))
    assert built[(INSIDE / COMMIT).as_posix()].decode() == f"{release.commit}-dirty\n"
    assert f"{PACKAGE}/reports/{old.name}" not in built
    shutil.rmtree(checkout / ".git")
    assert content(build("wheel", checkout, tmp_path / "dist"))[(INSIDE / COMMIT).as_posix()] == b"unknown\n"


def test_an_untouched_release_is_of_its_commit(release: Release, site: Path, empty: Path) -> None:
    (site / PACKAGE / "reports" / "__pycache__").mkdir(exist_ok=True)
    (site / PACKAGE / "reports" / "__pycache__" / "codec.cpython-311.pyc").write_bytes(b"made by pip")
    version = release.wheel.name.split("-")[1]
    assert ask(release, site, empty) == [version, release.commit, ""]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda site: (site / INSIDE / MODULE).write_text("# changed\n"),
            f"{INSIDE / MODULE} differs from",
        ),
        (
            lambda site: (site / PACKAGE / "backends" / "findings.md").unlink(),
            "fx_quant_conformance/backends/findings.md is missing",
        ),
        (
            lambda site: (site / PACKAGE / "conformance" / "new.py").touch(),
            f"{PACKAGE}/conformance/new.py is not in RECORD",
        ),
        (lambda site: shutil.rmtree(next(site.glob("*.dist-info"))), "no RECORD names its files"),
    ],
)
def test_a_changed_release_says_what_has_changed(
    release: Release, site: Path, empty: Path, change: object, told: str
) -> None:
    assert callable(change)
    change(site)
    _, commit, said = ask(release, site, empty)
    assert commit == f"{release.commit}-dirty" and said.startswith(told)


def test_the_record_of_an_editable_installation_is_not_that_of_its_checkout(
    release: Release, site: Path, empty: Path
) -> None:
    """Also of a release that lies beside: only the RECORD that names the running module counts."""
    record = next(site.glob("*.dist-info")) / "RECORD"
    record.write_text("".join(line for line in record.open() if ".dist-info/" in line))
    assert ask(release, site, empty)[2] == "no RECORD names its files"
