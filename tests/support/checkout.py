"""A clean checkout of the working tree, for tests that install the suite from one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def make_checkout(folder: Path) -> str:
    """Make a clean checkout of the working tree, of what is committed and what may be; return its commit."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    author = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    for words in (["init", "-q"], ["add", "-A"], [*author, "commit", "-q", "-m", "a checkout"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()
