# PYTHON_ARGCOMPLETE_OK
"""`python -m reports`: generates every report from results files, without torch.

Exit status: 0 success; 1 the run did not pass, something got worse, or a certificate does not hold; 2 a file cannot
be read or written, or --rerun not run; 3 a certificate holds as far as it could be checked here; 4 a command or a
results file of a version that is gone.
"""

from __future__ import annotations

import argparse
import io
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from reports.against_suite import Findings, compare_with_suite
from reports.certificate import CERTIFICATE, RESULTS, WAIVERS, NotCertified, certify, verify
from reports.compare import render_board
from reports.completion import complete
from reports.description import Opened
from reports.diff import compare_runs, diff_text, read_baseline
from reports.digest import count_line, verdict_line
from reports.html import render_html
from reports.markdown import markdown
from reports.merge import merge
from reports.rerun import RerunOutcome, count_varying, describe_chance, draw, list_units, rerun
from reports.rerun_record import RerunRecord, read_record, write_record
from reports.results import OtherVersionError, Results, ResultsError, read_results
from reports.signature import describe_signature
from reports.suite import LONGEST_DESCRIPTION, SuiteError, describe
from reports.terminal import summary
from reports.text import join_lines
from reports.verdicts import Outcome

OK, FAILED, UNUSABLE, PARTLY, USAGE = 0, 1, 2, 3, 4
REMOVED = {
    "history": "keep the results file of each run; diff OLD NEW shows what changed between two of them",
    "--reports": "render FILE -o OUT.html writes the report of a run",
}
"""Commands and options of earlier versions, and what to do instead."""
BUILD = Path("build")
"""Where the pages of several runs go if nothing else is asked: the folder for what is made."""
_HOLDS = {OK: "holds", FAILED: "does not hold", PARTLY: "holds as far as it could be checked"}


def main(arguments: Sequence[str] | None = None, prog: str = "python -m reports") -> int:
    """Run one command; return the exit status. ``prog``: how the user calls it."""
    parser = _make_parser(prog)
    complete(parser)
    words = sys.argv[1:] if arguments is None else arguments
    asked = [*words[:1], *(word for word in words if word.startswith("--"))]
    for word in filter(REMOVED.get, asked):
        print(f"{prog}: {word} is gone: {REMOVED[word]}", file=sys.stderr)
        return USAGE
    options = parser.parse_args(words)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except ResultsError as error:
        print(f"reports: {join_lines(str(error))}", file=sys.stderr)
        return USAGE if isinstance(error, OtherVersionError) else UNUSABLE


def _write_html(options: argparse.Namespace) -> int:
    target: Path = options.output or options.file.with_suffix(".html")
    results = read_results(options.file)
    baseline = read_baseline(options.baseline, results.header.profile, any_profile=options.any_profile)
    record = read_record(options.rerun, results)
    _write_file(target, render_html(results, baseline, record), options.file)
    print(f"{summary(results, target)}{verdict_line(results)}")
    return _find_status(results)


def _write_markdown(options: argparse.Namespace) -> int:
    results = read_results(options.file)
    baseline = read_baseline(options.baseline, results.header.profile, any_profile=options.any_profile)
    text = markdown(results, baseline, read_record(options.rerun, results))
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
    differences = compare_runs(read_results(options.old), read_results(options.new))
    print(diff_text(differences, shutil.get_terminal_size().columns), end="")
    return FAILED if differences.regressed else OK


def _merge(options: argparse.Namespace) -> int:
    results = merge(options.files, options.output)
    target: Path = options.output.with_suffix(".html")
    _write_file(target, render_html(results), options.output)
    print(f"{summary(results, target)}{verdict_line(results)}")
    return _find_status(results)


def _certify(options: argparse.Namespace) -> int:
    try:
        results, content = certify(
            options.file, options.output, options.waivers,
            without_execution_evidence=options.without_execution_evidence,
        )  # fmt: skip
    except NotCertified as error:
        print(f"reports: {join_lines(str(error))}", file=sys.stderr)
        return FAILED
    print(f"{options.output}: certificate of {content['counts']['claims']} claims of {join_lines(content['backend'])}")
    print(join_lines(content["execution"]["statement"]))
    print(verdict_line(results))
    return OK


def _verify(options: argparse.Namespace) -> int:
    if options.record is not None and not options.rerun:
        raise ResultsError("--record: needs --rerun=N; nothing else is recorded")
    if options.record is not None and options.record.resolve().is_relative_to(options.folder.resolve()):
        raise ResultsError(f"{options.record}: would change the certificate; choose a place outside of it")
    results, faults = verify(options.folder)
    found = Findings(problems=[str(fault) for fault in faults])
    signature = ""
    try:
        signature = describe_signature(options.folder, options.folder / CERTIFICATE)
    except ResultsError as error:
        found.problems.append(str(error))
    if results is not None and not found.problems:
        found += _ask_suite(options, results)
    lines = [*(f"! {line}" for line in found.problems), *(f"? {line}" for line in found.unchecked), signature]
    for line in filter(None, lines):
        print(join_lines(line))
    status = FAILED if found.problems else PARTLY if found.unchecked else OK
    if results is not None:
        print(f"{count_line(results)}\n{verdict_line(results)}")
        if text := results.describe_execution():
            print(f"WITHOUT EXECUTION EVIDENCE: {join_lines(text)}")
    print(f"{options.folder}: {_HOLDS[status]}")
    return status


def _ask_suite(options: argparse.Namespace, results: Results) -> Findings:
    """Hold a certificate to the suite and backend here, and run parts of it again if that is asked."""
    if options.files_only:
        return Findings(unchecked=["--files-only: neither the suite nor the backend was asked"])
    waivers = options.folder / WAIVERS if results.header.waivers else None
    try:
        said = describe(options.folder / RESULTS, waivers, options.timeout or LONGEST_DESCRIPTION)
    except SuiteError as error:
        if options.rerun:
            raise
        return Findings(unchecked=[f"{error}; not compared: what suite and backend say of this run"])
    found = compare_with_suite(results, said)
    if not options.rerun or found.problems:
        return found
    if said.opened is None:
        raise ResultsError(f"--rerun: the backend cannot be run here: {said.error}")
    return found + _run_again(options, results, said.opened, waivers).findings


def _run_again(options: argparse.Namespace, results: Results, opened: Opened, waivers: Path | None) -> RerunOutcome:
    """Draw units, run them again and compare; record what came of it if that is asked."""
    seed = random.SystemRandom().randrange(2**32) if options.draw is None else options.draw
    known = list_units(results, opened)
    units = draw(known, options.rerun, seed)
    print(f"{len(units)} claims, models and measurements run again (--draw={seed})")
    if chance := describe_chance(results, units):
        print(chance)
    compared = rerun(results, units, opened, waivers, options.timeout)
    if options.record is not None and results.footer is not None:
        ran = compared.header
        record = RerunRecord(
            results=results.footer.sha256, units=list(units), of=len(known), seed=seed,
            chosen=options.draw is not None, differing=list(compared.differing), tolerated=list(compared.tolerated),
            varying=count_varying(results, units),
            **{name: getattr(ran, name) for name in ("started", "cpu", "torch") if ran is not None},
        )  # fmt: skip
        write_record(record, options.record)
        print(f"{options.record}: {join_lines(record.describe())}")
    return compared


def _find_status(results: Results) -> int:
    return OK if results.outcome is Outcome.PASS else FAILED


def _write_file(target: Path, text: str, *sources: Path) -> None:
    """Write a report. Raises ResultsError if it would replace one of its sources, or cannot be written."""
    if target.resolve() in {source.resolve() for source in sources}:
        raise ResultsError(f"{target}: the report would replace the results file; choose another with -o")
    try:
        target.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ResultsError(f"{target}: cannot be written: {error.strerror}") from error


def _make_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description="Reports from results files; FILE is a results.jsonl, or one as .xz."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add_command(run: Callable[[argparse.Namespace], int], name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        sub.set_defaults(run=run)
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
        sub.add_argument("--rerun", type=Path, metavar="FILE", help="what verify --record wrote of a rerun, to show it")
    sub = add_command(_compare, "compare", "put runs of several backends side by side in one page")
    sub.add_argument("files", type=Path, nargs="+", metavar="FILE")
    _add_output(sub, "OUT.html", BUILD / "scoreboard.html")
    sub = add_command(_diff, "diff", "show what differs between two runs; status 1 if something got worse")
    sub.add_argument("old", type=Path, metavar="OLD")
    sub.add_argument("new", type=Path, metavar="NEW")
    sub = add_command(_merge, "merge", "make one results file, and its report, of all shards of a run")
    sub.add_argument("files", type=Path, nargs="+", metavar="SHARD")
    _add_output(sub, "OUT.jsonl", Path("results.jsonl"))
    sub = add_command(_certify, "certify", "make a certificate of a whole run that passed")
    sub.add_argument("file", type=Path, metavar="FILE")
    _add_output(sub, "DIR", Path("certificate"))
    sub.add_argument("--waivers", type=Path, metavar="FILE", help=f"the run's waivers; default: {WAIVERS} next to FILE")
    sub.add_argument(
        "--without-execution-evidence", action="store_true",
        help="certify although nothing shows that integers computed all claims; the certificate says so",
    )  # fmt: skip
    sub = add_command(_verify, "verify", "recompute all of a certificate; status 1 if something does not hold")
    sub.add_argument("folder", type=Path, metavar="DIR")
    sub.add_argument("--rerun", type=_parse_count, metavar="N", help="run N units, drawn at random, again")
    sub.add_argument("--draw", type=int, metavar="SEED", help="the seed of that draw; default: a new one")
    sub.add_argument("--record", type=Path, metavar="FILE", help="write what the rerun proved, for render --rerun=FILE")
    sub.add_argument("--files-only", action="store_true", help="ask neither the suite nor the backend (no torch)")
    sub.add_argument("--timeout", type=_parse_count, metavar="SECONDS", help="of each command of the suite that is run")
    return parser


def _add_output(parser: argparse.ArgumentParser, metavar: str, default: Path) -> None:
    parser.add_argument("-o", dest="output", type=Path, metavar=metavar, default=default, help=f"default: {default}")


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, found {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
