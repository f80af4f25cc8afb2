"""A board for the tests: a program that answers cases from a folder, or fails in the way that a file says.

``python board.py PLAN BUNDLE OUTPUTS``. PLAN is JSON: ``answers``: a folder of outputs; ``faults``: what goes wrong, by
the name of the case; ``log``: a folder in which each call leaves its cases; ``running``: one in which it shows itself.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

REFUSES = 9


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    bundle, outputs = Path(sys.argv[2]), Path(sys.argv[3])
    cases = [row["case"] for row in json.loads((bundle / "manifest.json").read_text())["cases"]]
    (Path(plan["log"]) / f"{time.time_ns()}-{os.getpid()}").write_text(" ".join(cases))
    if "running" in plan:
        count_running(Path(plan["running"]))
    for case in cases:
        FAULTS.get(plan["faults"].get(case, ""), answer)(Path(plan["answers"]) / case, outputs / case)


def count_running(running: Path) -> None:
    """Leave beside the folder how many calls run now."""
    mine = running / str(os.getpid())
    mine.touch()
    time.sleep(0.2)
    (running.parent / f"most-{os.getpid()}").write_text(str(len(list(running.iterdir()))))
    mine.unlink()


def answer(answers: Path, folder: Path) -> None:
    shutil.copytree(answers, folder)


def hang(answers: Path, folder: Path) -> None:
    print("waiting for the board", flush=True)
    time.sleep(600)


def die(answers: Path, folder: Path) -> None:
    print("bus error", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def exit_with_3(answers: Path, folder: Path) -> None:
    print("no link to the board", file=sys.stderr)
    sys.exit(3)


def flood(answers: Path, folder: Path) -> None:
    """Print 16 MiB, and then die."""
    for _ in range(16):
        sys.stderr.write("noise " * ((1 << 20) // 6))
    print("\nthe last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def write_half(answers: Path, folder: Path) -> None:
    """Write half of the outputs, and die."""
    folder.mkdir()
    data = (answers / "outputs.npz").read_bytes()
    (folder / "outputs.npz").write_bytes(data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def write_half_and_end(answers: Path, folder: Path) -> None:
    """Write half of the outputs, and end as if all were well."""
    folder.mkdir()
    data = (answers / "outputs.npz").read_bytes()
    (folder / "outputs.npz").write_bytes(data[: len(data) // 2])


def refuse(answers: Path, folder: Path) -> None:
    print("no such op on this board", file=sys.stderr)
    sys.exit(REFUSES)


def forget(answers: Path, folder: Path) -> None:
    """Hand in nothing, and end as if all were well."""


def leave_a_child(answers: Path, folder: Path) -> None:
    """Answer, but leave a process that holds the output open."""
    answer(answers, folder)
    if os.fork() == 0:
        time.sleep(600)


def start_daemon(folder: Path) -> None:
    """Start a process in a session of its own, whose number lies beside the outputs."""
    if os.fork() == 0:
        os.setsid()
        (folder.parent.parent / f"daemon-{os.getpid()}").touch()
        time.sleep(600)
    time.sleep(0.5)


def leave_a_daemon(answers: Path, folder: Path) -> None:
    answer(answers, folder)
    start_daemon(folder)


def stop_the_parent(answers: Path, folder: Path) -> None:
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(600)


def kill_the_parent(answers: Path, folder: Path) -> None:
    start_daemon(folder)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def dig_and_die(answers: Path, folder: Path) -> None:
    """Write folders into folders, deeper than a path can say, and die."""
    folder.mkdir()
    os.chdir(folder)
    for _ in range(1500):
        os.mkdir("deeper")
        os.chdir("deeper")
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS: dict[str, Callable[[Path, Path], None]] = {
    each.__name__: each
    for each in (
        hang,
        die,
        exit_with_3,
        flood,
        write_half,
        write_half_and_end,
        refuse,
        forget,
        leave_a_child,
        leave_a_daemon,
        stop_the_parent,
        kill_the_parent,
        dig_and_die,
    )
}

if __name__ == "__main__":
    main()
