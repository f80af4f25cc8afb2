"""``fx-quant-conformance report``: generates every report from results files, without torch.

Exit status: 0 success; 1 the run did not pass, something got worse, or a certificate does not hold; 2 a file cannot
be read or written, or --rerun not run; 3 a certificate holds, with doubts; 4 a usage error, and what is gone.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from fx_quant_conformance.reports.baseline import compare_with_baseline, is_baseline, write_baseline
from fx_quant_conformance.reports.certificate import (
    WAIVERS,
    NotCertified,
    certify,
    format_signature,
    verify,
)
from fx_quant_conformance.reports.compare import render_board
from fx_quant_conformance.reports.decision import list_company
from fx_quant_conformance.reports.diff import compare_runs, diff_text, read_baseline
from fx_quant_conformance.reports.digest import count_line, verdict_line
from fx_quant_conformance.reports.html import render_html
from fx_quant_conformance.reports.markdown import markdown
from fx_quant_conformance.reports.merge import merge
from fx_quant_conformance.reports.rerun import draw, rerun
from fx_quant_conformance.reports.results import OtherVersionError, Results, ResultsError, read_results
from fx_quant_conformance.reports.terminal import summary
from fx_quant_conformance.reports.text import join_lines
from fx_quant_conformance.reports.verdicts import Outcome

OK, FAILED, UNUSABLE, PARTLY, USAGE = 0, 1, 2, 3, 4
REMOVED = {
    "history": "keep the results file of each run; diff OLD NEW shows what changed between two of them",
    "compare --reports": "render FILE -o OUT.html writes the report of a run",
    "verify --record": "run the suite yourself, and compare: diff OLD NEW",
    "verify --draw": "verify draws the claims of --rerun=N itself",
    "verify --files-only": "verify asks neither the suite nor the backend, but for --rerun=N",
    "verify --timeout": "--rerun=N ends within twice the time of its claims and 5 minutes",
    "render --rerun": "run the suite yourself, and show the differences: render NEW --baseline=OLD",
    "markdown --rerun": "run the suite yourself, and show the differences: markdown NEW --baseline=OLD",
}
"""Commands of earlier versions, and their options, with what to do instead."""
BUILD = Path("build")
"""Where the pages of several runs go if nothing else is asked: the folder for what is made."""
_HOLDS = {OK: "holds", FAILED: "does not hold", PARTLY: "holds, with doubts"}


def _answer(options: argparse.Namespace) -> int:
    """Run a command; return the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    report: Callable[[argparse.Namespace], int] = options.report
    try:
        return report(options)
    except ResultsError as error:
        print(f"reports: {join_lines(str(error))}", file=sys.stderr)
        return USAGE if isinstance(error, OtherVersionError) else UNUSABLE


def _write_html(options: argparse.Namespace) -> int:
    target: Path = options.output or options.file.with_suffix(".html")
    results = read_results(options.file)
    baseline = read_baseline(options.baseline, results.header.profile, any_profile=options.any_profile)
    _write_file(target, render_html(results, baseline), options.file)
    print(f"{summary(results, target)}{verdict_line(results)}")
    return _find_status(results)


def _write_markdown(options: argparse.Namespace) -> int:
    results = read_results(options.file)
    baseline = read_baseline(options.baseline, results.header.profile, any_profile=options.any_profile)
    text = markdown(results, baseline)
    if options.output is None:
        print(text, end="")
    else:
        _write_file(options.output, text, options.file)
    return _find_status(results)


def _compare(options: argparse.Namespace) -> int:
    runs = [read_results(path) for path in options.files]
    board = render_board(runs)
    if options.output.parent == BUILD:
        BUILD.mkdir(exist_ok=True)
    _write_file(options.output, board, *options.files)
    print(f"{len(runs)} runs side by side: {options.output}")
    return OK


def _diff(options: argparse.Namespace) -> int:
    if is_baseline(options.old):
        differences = compare_with_baseline(options.old, read_results(options.new))
    else:
        differences = compare_runs(read_results(options.old), read_results(options.new))
    print(diff_text(differences, shutil.get_terminal_size().columns), end="")
    return FAILED if differences.regressed else OK


def _write_baseline(options: argparse.Namespace) -> int:
    try:
        print(write_baseline(options.files, options.output))
    except OSError as error:
        raise ResultsError(f"{options.output}: cannot be written: {error.strerror}") from error
    return OK


def _merge(options: argparse.Namespace) -> int:
    results = merge(options.files, options.output)
    target: Path = options.output.with_suffix(".html")
    _write_file(target, render_html(results), options.output)
    print(f"{summary(results, target)}{verdict_line(results)}")
    return _find_status(results)


def _certify(options: argparse.Namespace) -> int:
    try:
        results, content = certify(
            options.file,
            options.output,
            options.waivers,
            without_execution_evidence=options.without_execution_evidence,
        )
    except NotCertified as error:
        print(f"reports: {join_lines(str(error))}", file=sys.stderr)
        return FAILED
    print(f"{options.output}: {_format_subject(results)}")
    if text := content["without_execution_evidence"]:
        print(f"WITHOUT EXECUTION EVIDENCE: {join_lines(text)}")
    _print_company(results)
    print(verdict_line(results))
    return OK


def _verify(options: argparse.Namespace) -> int:
    results, found = verify(options.folder)
    left = [
        format_signature(options.folder),
        "whether the machine that ran it was honest: only your own run shows that",
    ]
    if results is not None and options.rerun and not found.problems:
        claims = draw(results, options.rerun)
        for claim in claims:
            print(f"run again: {join_lines(claim)}")
        found += rerun(results, claims, options.folder)
        left.append(f"the other {len(results.claims) - len(claims)} claims, the models and the measurements")
    else:
        left.append("whether the backend gives these results: --rerun=N runs N claims again, where it is installed")
    lines = [*(f"! {line}" for line in found.problems), *(f"? {line}" for line in found.doubts)]
    for line in (*lines, *(f"not checked: {line}" for line in left)):
        print(join_lines(line))
    status = FAILED if found.problems else PARTLY if found.doubts else OK
    if results is not None:
        print(f"{_format_subject(results)}\n{count_line(results)}\n{verdict_line(results)}")
        if text := results.format_execution():
            print(f"WITHOUT EXECUTION EVIDENCE: {join_lines(text)}")
        _print_company(results)
    print(f"{options.folder}: {_HOLDS[status]}")
    return status


def _format_subject(results: Results) -> str:
    header = results.header
    few = ", which tries a few cases of each claim" if header.profile == "quick" else ""
    return f"certificate of {len(results.claims)} claims of {join_lines(header.backend)}, profile {header.profile}{few}"


def _print_company(results: Results) -> None:
    for line in list_company(results):
        print(f"NOT THE SUITE ALONE: {join_lines(line)}")


def _find_status(results: Results) -> int:
    return OK if results.outcome is Outcome.PASS else FAILED


def _write_file(target: Path, text: str, *sources: Path) -> None:
    """Write a report. Raises ResultsError if it would replace one of its sources, or cannot be written."""
    if os.path.realpath(target) in map(os.path.realpath, sources):
        raise ResultsError(f"{target}: the report would replace the results file; choose another with -o")
    try:
        target.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ResultsError(f"{target}: cannot be written: {error.strerror}") from error


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the commands about results files to the parser of ``report``."""
    parser.description = "Reports from results files; FILE is a results.jsonl, or one as .xz."
    parser.set_defaults(run=_answer)
    commands = parser.add_subparsers(dest="about", metavar="COMMAND", required=True)

    def add_command(run: Callable[[argparse.Namespace], int], name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        sub.set_defaults(report=run)
        return sub

    for run, name, text, default in (
        (_write_html, "render", "write the HTML report and print the summary", "FILE as .html"),
        (_write_markdown, "markdown", "write the report as Markdown", "standard output"),
    ):
        sub = add_command(run, name, text)
        sub.add_argument("file", type=Path, metavar="FILE")
        sub.add_argument("-o", dest="output", type=Path, metavar="OUT", help=f"default: {default}")
        sub.add_argument("--baseline", type=Path, metavar="FILE", help="an earlier run, to show the differences from")
        sub.add_argument("--any-profile", action="store_true", help="take a baseline of another profile as well")
    sub = add_command(_compare, "compare", "put runs of several backends side by side in one page")
    sub.add_argument("files", type=Path, nargs="+", metavar="FILE")
    _add_output(sub, "OUT.html", BUILD / "scoreboard.html")
    sub = add_command(_diff, "diff", "show what differs between two runs; status 1 if something got worse")
    sub.add_argument("old", type=Path, metavar="OLD", help="results, or a baseline")
    sub.add_argument("new", type=Path, metavar="NEW")
    sub = add_command(_write_baseline, "baseline", "write the small file of what a whole run is known to give")
    sub.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="of full runs of all claims, alike but by chance"
    )
    _add_output(sub, "DIR", Path())
    sub = add_command(_merge, "merge", "make one results file, and its report, of all shards of a run")
    sub.add_argument("files", type=Path, nargs="+", metavar="SHARD")
    _add_output(sub, "OUT.jsonl", Path("results.jsonl"))
    sub = add_command(_certify, "certify", "make a certificate of a whole run that passed")
    sub.add_argument("file", type=Path, metavar="FILE")
    _add_output(sub, "DIR", Path("certificate"))
    sub.add_argument("--waivers", type=Path, metavar="FILE", help=f"the run's waivers; default: {WAIVERS} next to FILE")
    sub.add_argument(
        "--without-execution-evidence",
        action="store_true",
        help="certify although nothing shows that integers computed all claims; the certificate says so",
    )
    sub = add_command(_verify, "verify", "recompute digests, counts and report of a certificate")
    sub.add_argument("folder", type=Path, metavar="DIR")
    sub.add_argument("--rerun", type=_parse_count, metavar="N", help="run N claims, drawn at random, again")


def _add_output(parser: argparse.ArgumentParser, metavar: str, default: Path) -> None:
    parser.add_argument("-o", dest="output", type=Path, metavar=metavar, default=default, help=f"default: {default}")


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, found {text!r}")
    return int(text)
