# PYTHON_ARGCOMPLETE_OK
"""The suite's own commands; certifying is ``pytest --pyargs conformance --backend=NAME``.

``python -m conformance init NAME`` writes the skeleton of a vendor's package; ``python -m conformance claims-of
MODULE:QUANTIZER`` writes the BackendConfig that torchao Quantizers amount to. ``export``, ``run`` and ``judge`` are
about devices that do not run Python (docs/vectors.md). Exit status: 0 success, 2 the run does not allow it, 4 usage
error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from conformance.machine.release import DISTRIBUTION
from conformance.machine.seconds import parse_seconds
from reports.completion import complete, find_removed
from reports.text import join_lines, show

REFUSED = 2
USAGE = 4
INTERRUPTED = 130
REMOVED = {
    "describe": "python -m reports verify DIR --rerun=N runs N claims of a certificate again",
    "expect": "python -m reports baseline writes what a run is known to give",
}
"""Commands of earlier versions, and what to do instead."""


def main(arguments: Sequence[str] | None = None, prog: str = "python -m conformance") -> int:
    """Run the command line; return the exit status. ``prog``: how the user calls it."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if gone := find_removed(words, REMOVED):
        print(f"{prog}: {gone}", file=sys.stderr)
        return USAGE
    try:
        if words[:1] == ["export"]:
            return _export(words[1:], f"{prog} export")
        parser = _make_parser(prog)
        complete(parser)
        options = parser.parse_args(words)
    except SystemExit as end:
        return USAGE if end.code else 0
    commands = {"init": _init, "run": _run, "judge": _judge, "claims-of": _claims_of}
    return commands[options.command](options)


def _complain(why: object, status: int) -> int:
    """Print what is wrong, which a vendor's code may have said; return the exit status."""
    print(f"ERROR: {show(str(why))}", file=sys.stderr)
    return status


def _init(options: argparse.Namespace) -> int:
    from conformance.scaffold.skeleton import FILES, SkeletonError, class_of, write_skeleton  # needs torch

    try:
        folder = write_skeleton(options.name, Path.cwd())
    except SkeletonError as error:
        return _complain(error, USAGE)
    is_installed = bool(entry_points(group="pytest11", name=DISTRIBUTION))
    command = f"pytest {'--pyargs conformance' if is_installed else Path(__file__).parent}"
    print(
        f"wrote {folder.name}/: {', '.join(path.format(name=folder.name) for path in FILES)}\n"
        f"run it: cd {folder.name} && {command} --backend={folder.name}.backend:{class_of(folder.name)} "
        "--without-execution-evidence\n"
        "that passes; without the option no claim does until execution() says what runs on integers\n"
        f"or, once it is installed (README.md): {command} --backend={folder.name}"
    )
    return 0


def _claims_of(options: argparse.Namespace) -> int:
    from conformance.annotations.asking import QuantizerNotFound  # needs torch
    from conformance.claims_of.command import ClaimsOf, ProbingFailed, write_claims

    request = ClaimsOf(
        specs=tuple(options.quantizer),
        qat_specs=tuple(options.qat or ()),
        globs=tuple(options.pattern or ["*"]),
        config_name=options.name,
        width=options.line_length,
    )
    if not request.flows:
        return _complain("no Quantizer is named: give MODULE:QUANTIZER, or --qat MODULE:QUANTIZER", USAGE)
    output = options.output or Path(f"claims_of_{request.name}.py")
    try:
        written = write_claims(request, limit=options.timeout)
        output.write_text(written.module, encoding="utf-8")
    except (QuantizerNotFound, OSError) as error:
        return _complain(error, USAGE)
    except ProbingFailed as error:
        return _complain(error, REFUSED)
    print(f"{show(written.table)}\n\n{output}: {written.claims} claims, of {written.patterns} patterns")
    return 0


def _export(words: Sequence[str], prog: str) -> int:
    import pytest

    from conformance.run.device import ElsewhereError
    from conformance.run.export import ExportError, export  # needs torch
    from conformance.run.options import EXPORTING, OPTIONS, make_options, parse_positive
    from conformance.vectors.formats import FormatError, choose_formats

    parser = argparse.ArgumentParser(
        prog=prog,
        description="Write models and inputs for a device, and apart from them what is right (docs/vectors.md).",
    )
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
    complete(parser)
    options = parser.parse_args(words)
    try:
        formats = choose_formats(options.format.split(","))
        done = export(make_options(options), options.folder.absolute(), formats, options.max_bytes)
    except FormatError as error:
        return _complain(f"--format: {error}", USAGE)
    except (ExportError, ElsewhereError, pytest.UsageError, OSError) as error:
        return _complain(error, USAGE)
    except KeyboardInterrupt:
        return _complain("interrupted; nothing was written", INTERRUPTED)
    print(f"{done.folder}: {done.cases} cases of {done.claims} claims and models, {done.size / 2**20:.1f} MiB")
    for name, reason in done.left_out.items():
        print(join_lines(f"without a case: {name}: {reason}"))
    return 0


def _run(options: argparse.Namespace) -> int:
    from conformance.machine.child import StartError
    from conformance.remote.description import DescriptionError
    from conformance.vectors.runner import run_bundle
    from reports.reading import FileFault

    try:
        count = run_bundle(options.folder, options.outputs, options.backend, limit=options.case_timeout)
    except (StartError, DescriptionError, FileFault, OSError) as error:
        return _complain(error, USAGE)
    print(f"{options.outputs}: {count} cases")
    return 0


def _judge(options: argparse.Namespace) -> int:
    import pytest

    words = [f"--backend=vectors:{options.folder}", f"--outputs={options.outputs}", *options.rest]
    return int(pytest.main(["--pyargs", "conformance", *words]))


def _make_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="The conformance suite's own command.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="init|claims-of|export|run|judge")
    init = commands.add_parser(
        "init", help="write a backend's package", description="Write a package with a backend that runs at once."
    )
    init.add_argument("name", metavar="NAME", help="of the backend and its package, such as my_npu: a folder made here")
    _add_claims_of(commands)
    commands.add_parser("export", help="write a bundle of models and inputs for a device; it has a --help of its own")
    run = commands.add_parser(
        "run",
        help="run a bundle by a backend in Python",
        description="Run the cases of a bundle by a backend of the "
        "suite's contract, from the bundle's files alone; they must hold the models in the format fx.",
    )
    run.add_argument("folder", type=Path, metavar="DEVICE", help="the bundle's folder for the device")
    run.add_argument("outputs", type=Path, metavar="OUT", help="the folder to fill")
    run.add_argument("--backend", required=True, metavar="NAME", help="as in certify")
    run.add_argument(
        "--case-timeout", type=parse_seconds, default=60.0, metavar="SECONDS", help="for one case (default: 60)"
    )
    judge = commands.add_parser(
        "judge",
        help="judge what a device handed in for a bundle",
        description="Judge the outputs of a device: pytest "
        "--pyargs conformance --backend=vectors:DIR --outputs=OUT; further words are passed to pytest.",
    )
    judge.add_argument("folder", type=Path, metavar="DIR", help="the bundle's folder")
    judge.add_argument("outputs", type=Path, metavar="OUT", help="the folder that the device has filled")
    judge.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="options of pytest and of the suite")
    return parser


def _add_claims_of(commands: Any) -> None:
    claims_of = commands.add_parser(
        "claims-of",
        help="write the BackendConfig that a torchao Quantizer amounts to",
        description="Have a torchao "
        "Quantizer annotate a model of each pattern that the suite knows, and write the BackendConfig that this "
        "amounts to as a Python module, to be read and committed (docs/vendor-guide.md). It takes some minutes.",
    )
    claims_of.add_argument(
        "quantizer",
        nargs="*",
        metavar="MODULE:QUANTIZER",
        help="a class, an instance, or what returns one; of several, one config is made",
    )
    claims_of.add_argument(
        "--qat",
        action="append",
        metavar="MODULE:QUANTIZER",
        help="one for quantization-aware training, by prepare_qat_pt2e; may be repeated",
    )
    claims_of.add_argument("--name", default="", help="of the config; default: that of the first Quantizer")
    claims_of.add_argument("--line-length", type=int, default=88, metavar="N", help="of the module (default: 88)")
    claims_of.add_argument(
        "--pattern",
        action="append",
        metavar="GLOB",
        help="only patterns of such a name, as nn.Conv2d*; may be repeated",
    )
    claims_of.add_argument(
        "--timeout", type=parse_seconds, default=3600.0, metavar="SECONDS", help="for all (default: 3600)"
    )
    claims_of.add_argument(
        "-o", dest="output", type=Path, metavar="FILE", help="the module to write; default: claims_of_QUANTIZER.py"
    )


if __name__ == "__main__":
    sys.exit(main())
