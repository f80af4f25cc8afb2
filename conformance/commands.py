"""The commands of the suite but for certifying: ``init``, ``export``, ``run`` and ``judge``; rooms add others.

The last three are about devices that do not run Python (docs/vectors.md). Exit status: 0 success, 2 the run does not
allow it, 4 usage error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

from fx_quant_conformance.conformance.machine.release import DISTRIBUTION, PACKAGE, ROOT
from fx_quant_conformance.conformance.machine.seconds import parse_seconds
from fx_quant_conformance.reports.text import join_lines, show

REFUSED = 2
USAGE = 4
INTERRUPTED = 130


def complain(why: object, status: int) -> int:
    """Print what is wrong, which a vendor's code may have said; return the exit status."""
    print(f"ERROR: {show(str(why))}", file=sys.stderr)
    return status


def _init(options: argparse.Namespace) -> int:
    from fx_quant_conformance.conformance.scaffold.skeleton import (  # needs torch
        FILES,
        SkeletonError,
        class_of,
        write_skeleton,
    )

    try:
        folder = write_skeleton(options.name, Path.cwd())
    except SkeletonError as error:
        return complain(error, USAGE)
    is_installed = bool(entry_points(group="pytest11", name=DISTRIBUTION))
    command = f"pytest {f'--pyargs {PACKAGE}' if is_installed else ROOT / 'conformance'}"
    print(
        f"wrote {folder.name}/: {', '.join(path.format(name=folder.name) for path in FILES)}\n"
        f"run it: cd {folder.name} && {command} --backend={folder.name}.backend:{class_of(folder.name)} "
        "--without-execution-evidence\n"
        "that passes; without the option no claim does until execution() says what runs on integers\n"
        f"or, once it is installed (README.md): {command} --backend={folder.name}"
    )
    return 0


def _export(options: argparse.Namespace) -> int:
    import pytest

    from fx_quant_conformance.conformance.run.device import ElsewhereError
    from fx_quant_conformance.conformance.run.export import ExportError, export  # needs torch
    from fx_quant_conformance.conformance.run.options import make_options
    from fx_quant_conformance.conformance.vectors.formats import FormatError, choose_formats

    try:
        formats = choose_formats(options.format.split(","))
        done = export(make_options(options), options.folder.absolute(), formats, options.max_bytes)
    except FormatError as error:
        return complain(f"--format: {error}", USAGE)
    except (ExportError, ElsewhereError, pytest.UsageError, OSError) as error:
        return complain(error, USAGE)
    except KeyboardInterrupt:
        return complain("interrupted; nothing was written", INTERRUPTED)
    print(f"{done.folder}: {done.cases} cases of {done.claims} claims and models, {done.size / 2**20:.1f} MiB")
    for name, reason in done.left_out.items():
        print(join_lines(f"without a case: {name}: {reason}"))
    return 0


def _run(options: argparse.Namespace) -> int:
    from fx_quant_conformance.conformance.machine.child import StartError
    from fx_quant_conformance.conformance.remote.description import DescriptionError
    from fx_quant_conformance.conformance.vectors.runner import run_bundle
    from fx_quant_conformance.reports.reading import FileFault

    try:
        count = run_bundle(options.folder, options.outputs, options.backend, limit=options.case_timeout)
    except (StartError, DescriptionError, FileFault, OSError) as error:
        return complain(error, USAGE)
    print(f"{options.outputs}: {count} cases")
    return 0


def _judge(options: argparse.Namespace) -> int:
    import pytest

    words = [f"--backend=vectors:{options.folder}", f"--outputs={options.outputs}", *options.rest]
    return int(pytest.main(["--pyargs", PACKAGE, *words]))


def _add_init(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_init)
    parser.add_argument(
        "name", metavar="NAME", help="of the backend and its package, such as my_npu: a folder made here"
    )


def _add_export(parser: argparse.ArgumentParser) -> None:
    from fx_quant_conformance.conformance.run.options import EXPORTING, OPTIONS, parse_positive

    parser.set_defaults(run=_export)
    parser.add_argument("-o", dest="folder", type=Path, metavar="DIR", required=True, help="the bundle's folder")
    parser.add_argument(
        "--format",
        default="json",
        metavar="LIST",
        help="formats of the models beside model.json, with commas: pt2 "
        "(torch.export), onnx (QDQ), fx (for backends of the suite's contract); default: none",
    )
    parser.add_argument("--max-bytes", type=parse_positive, metavar="N", help="end if the device's part is larger")
    for name in EXPORTING:
        parser.add_argument(name, **OPTIONS[name])


def _add_run(parser: argparse.ArgumentParser) -> None:
    from fx_quant_conformance.conformance.run.options import StoreBackend

    parser.description = (
        "Run the cases of a bundle by a backend of the suite's contract, from the bundle's files alone; they must hold "
        "the models in the format fx."
    )
    parser.set_defaults(run=_run)
    parser.add_argument("folder", type=Path, metavar="DEVICE", help="the bundle's folder for the device")
    parser.add_argument("outputs", type=Path, metavar="OUT", help="the folder to fill")
    parser.add_argument("--backend", action=StoreBackend, required=True, metavar="NAME", help="as in certify")
    parser.add_argument(
        "--case-timeout", type=parse_seconds, default=60.0, metavar="SECONDS", help="for one case (default: 60)"
    )


def _add_judge(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        f"Judge the outputs of a device: pytest --pyargs {PACKAGE} --backend=vectors:DIR --outputs=OUT; "
    )
    parser.description += "further words are passed to pytest."
    parser.set_defaults(run=_judge)
    parser.add_argument("folder", type=Path, metavar="DIR", help="the bundle's folder")
    parser.add_argument("outputs", type=Path, metavar="OUT", help="the folder that the device has filled")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="options of pytest and of the suite")


ADD: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "init": _add_init,
    "export": _add_export,
    "run": _add_run,
    "judge": _add_judge,
}
"""What adds a command's arguments, and what it does, to its parser."""
