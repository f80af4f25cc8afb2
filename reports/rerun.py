"""Running claims of a certificate again: drawn here, run by the suite here, compared by `reports.diff`."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from fx_quant_conformance.reports.certificate import WAIVERS, Findings
from fx_quant_conformance.reports.diff import Difference, compare_runs
from fx_quant_conformance.reports.reading import FileFault, read_bytes
from fx_quant_conformance.reports.results import Results, ResultsError, digest_ids, read_results
from fx_quant_conformance.reports.text import join_lines
from fx_quant_conformance.reports.verdicts import Outcome

ROOT = Path(__file__).resolve().parent.parent
HOLDER = ROOT if (ROOT / "fx_quant_conformance").is_dir() else ROOT.parent
"""The folder that Python finds the suite in: a checkout, or that of the installed package."""
_STARTING = 300.0
"""Seconds that a run may take besides its claims."""
_LONGEST_CLAIM = 3600.0
_USUAL_CLAIM = 600.0
"""Seconds that a claim may take at most, by default, in any profile."""
_GRACE = 10.0
"""Seconds in which an interrupted run has to end the processes that it started."""
_ON_DEVICES = ("vectors:", "command:")
"""How the names of backends begin that are devices, which the certificate does not hold."""


def draw(results: Results, count: int) -> list[str]:
    """Draw `count` claims (at most all) of a run."""
    names = [claim.claim for claim in results.claims]
    return sorted(random.SystemRandom().sample(names, min(count, len(names))))


def rerun(results: Results, claims: Sequence[str], folder: Path) -> Findings:
    """Run claims of a certificate's folder again, at its seed and by its options, and compare.

    The suite beside this package runs them, in a process that finds neither that folder nor the current one. Raises
    ResultsError if the suite or the backend is not there, or the run does not end within the time of its claims.
    """
    spec = str(results.header.options.get("backend", results.header.backend))
    if spec.startswith(_ON_DEVICES):
        raise ResultsError(f"--rerun: {spec} is a device, which is not here; run the suite on it, and diff the results")
    with tempfile.TemporaryDirectory() as made:
        work, report = Path(made, "work"), Path(made, "report")
        work.mkdir()
        waivers = Path(made, WAIVERS) if results.header.waivers else None
        if waivers is not None:
            try:
                waivers.write_bytes(read_bytes(folder / WAIVERS, follows_links=False))
            except FileFault as fault:
                raise ResultsError(f"{folder / WAIVERS} {fault}") from fault
        options = list(_list_options(results, spec, waivers))
        command = [*options, f"--report-dir={report}", *(f"--claim={claim}" for claim in claims)]
        status, output = _run_suite(command, work, folder, _STARTING + 2 * len(claims) * _find_limit(results))
        if not (report / "results.jsonl").is_file():
            said = join_lines(output[-400:])
            if "matches no claim" in output:
                return Findings(problems=[f"the backend here does not claim what the certificate says: {said}"])
            raise ResultsError(f"--rerun: the suite ended with status {status}: {said}")
        new = read_results(report / "results.jsonl")
        if new.outcome is Outcome.INCOMPLETE:
            raise ResultsError(f"--rerun: the run stopped with status {status}: {join_lines(output[-400:])}")
        return compare_rerun(results, new)


def compare_rerun(old: Results, new: Results) -> Findings:
    """Compare a certificate with a run of some of its claims. Of what varies by chance only verdict and waiver count.

    That something else ran here (suite, torch, processor) leaves a doubt; it may also be why claims differ.
    """
    found = Findings()
    if new.header.claims_sha256 != digest_ids(claim.claim for claim in old.claims):
        found.problems.append(
            f"the backend here has {new.header.claims_in_config} claims, and the certificate {len(old.claims)}: "
            "they are not the same"
        )
    differences = compare_runs(old, new)
    found.doubts.extend(line for line in differences.basis if not line.startswith("selection: "))
    varying = {check.claim for run in (old, new) for check in run.checks if check.is_nondeterministic}
    for row in differences.changed_rows:
        line = f"{row.name}: {row.change} when it was run again: {row.why}"
        (found.doubts if row.name in varying and _is_same_verdict(row) else found.problems).append(line)
    return found


def _is_same_verdict(row: Difference) -> bool:
    pair = (row.old, row.new)
    return len({each and (each.verdict, each.waived, each.passes) for each in pair}) == 1


def _list_options(results: Results, spec: str, waivers: Path | None) -> Iterator[str]:
    """Yield the options that repeat a run; what is none of the suite's it refuses itself."""
    header, options = results.header, results.header.options
    yield from (f"--backend={spec}", f"--seed={header.seed}", f"--profile={header.profile}")
    yield f"--waivers={waivers}" if waivers is not None else "--no-waivers"
    for name in ("claim_timeout", "max_examples", "isa"):
        if options.get(name) is not None:
            yield f"--{name.replace('_', '-')}={options[name]}"
    if options.get("without_execution_evidence"):
        yield "--without-execution-evidence"


def _find_limit(results: Results) -> float:
    """Return the seconds for one claim: the run's, if that is a time to wait."""
    stated = results.header.options.get("claim_timeout")
    is_time = isinstance(stated, int | float) and 0 < stated <= _LONGEST_CLAIM
    return float(stated) if is_time else _USUAL_CLAIM  # type: ignore[arg-type]


# -- processes --------------------------------------------------------------------------------------------------------


def make_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a run: no variable of Python or pytest, and modules from no folder but named ones.

    Of PYTHONPATH stay the absolute paths, but for the current folder, the certificate's and what lies in that.
    """
    own, here = folder.resolve(), Path.cwd()
    given = [Path(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(each)]
    paths = [each for each in given if each.resolve() != here and not each.resolve().is_relative_to(own)]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "PYTHON"))}
    return kept | {"PYTHONPATH": os.pathsep.join(map(str, [HOLDER, *paths]))}


def _run_suite(options: Sequence[str], work: Path, folder: Path, seconds: float) -> tuple[int, str]:
    """Run the suite in an empty folder; return its exit status and all it printed. Raises ResultsError after a time."""
    command = [sys.executable, "-m", "pytest", str(ROOT / "conformance"), "-q", "-p", "no:cacheprovider", *options]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=work,
            env=make_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ResultsError(f"--rerun: the run did not end within {seconds:g} s") from None
        finally:
            _end(process)
        output.seek(0)
        return status, output.read().decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run: it is interrupted, so that it ends what it started, and then killed with its group."""
    if process.poll() is None:
        _signal(process, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    _signal(process, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # the system holds it
        process.wait(_GRACE)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty, or gone
        os.killpg(process.pid, number)
