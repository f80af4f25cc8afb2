"""The build, where pyproject.toml does not reach: what it was built from, and the document that waivers name."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from fx_quant_conformance.conformance.machine.release import COMMIT, FOLDERS, PACKAGE, read_suite_commit  # noqa: E402

FINDINGS = "findings.md"
NAMING = (Path(PACKAGE, "backends"), Path(PACKAGE, "backends", "torch_engines"))
"""The folders of waivers, beside which a release has the findings that they name."""


def read_origin() -> str:
    """Return of which commit the packages are: git's, or what an sdist, which git does not know, says of itself."""
    own = ROOT / PACKAGE / COMMIT
    is_unpacked = own.is_file() and not (ROOT / ".git").exists()
    return own.read_text(encoding="utf-8").strip() if is_unpacked else read_suite_commit(ROOT)


ORIGIN = read_origin()
"""Read before a build puts files into the checkout, which git would take for changes."""


def write_commit(folder: Path) -> None:
    """Write the commit into a folder of packages."""
    (folder / PACKAGE / COMMIT).write_text(f"{ORIGIN}\n", encoding="utf-8")


class BuildPackages(build_py):
    """Builds the packages anew: what an earlier build left, and the checkout no longer has, is no part of them."""

    def run(self) -> None:
        """Build, and add the files that no package has in a checkout."""
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        if not self.editable_mode:
            write_commit(Path(self.build_lib))
            for folder in NAMING:
                shutil.copyfile(ROOT / "docs" / FINDINGS, Path(self.build_lib) / folder / FINDINGS)


class SourceDistribution(sdist):
    """Adds the commit, which the wheel of an sdist cannot ask git for."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Make the folder that is packed: a checkout's, with the links in its package."""
        inside = {f"{PACKAGE}/{folder}/" for folder in FOLDERS}
        names = [name.removeprefix(f"{PACKAGE}/") if name.startswith(tuple(inside)) else name for name in files]
        super().make_release_tree(base_dir, names)
        for folder in FOLDERS:
            Path(base_dir, PACKAGE, folder).symlink_to(Path("..", folder))
        write_commit(Path(base_dir))


setup(cmdclass={"build_py": BuildPackages, "sdist": SourceDistribution})
