"""What a run's own process knows of a backend that runs elsewhere: its words, its folder, calls that were lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fx_quant_conformance.conformance.vectors.files import LOST_CALLS
from fx_quant_conformance.reports.reading import FileFault, read_text

CALLS = "device-calls"
"""The folder, in that of the report, of what a command was given and handed in."""


class ElsewhereError(Exception):
    """A bundle or its outputs cannot be judged; one line."""


def format_lost_calls(report_dir: Path) -> str:
    """Return a note on the calls of the command that did not end well; "" if all did."""
    calls, faults = list[dict[str, Any]](), list[str]()
    for log in sorted((report_dir / CALLS).glob(f"*/{LOST_CALLS}")):
        try:
            calls += map(_read_call, read_text(log).splitlines())
        except FileFault as fault:
            faults.append(f"{log.relative_to(report_dir)} {fault}: not all calls are counted")
    if calls:
        cases = {case for each in calls for case in each["cases"]}
        statuses = sorted({"killed at the limit" if each["code"] is None else str(each["code"]) for each in calls})
        faults.insert(
            0,
            f"{len(calls)} calls of the command did not end with status 0 ({', '.join(statuses)}), of {len(cases)} "
            f"cases, some of which may have passed in another call: {CALLS}/*/{LOST_CALLS} lists them",
        )
    return "; ".join(faults)


def _read_call(line: str) -> dict[str, Any]:
    """Return a line that `Caller` has written. Raises FileFault for another one: a device can write there too."""
    try:
        call = json.loads(line)
        if all(isinstance(case, str) for case in call["cases"]) and isinstance(call["code"], int | None):
            return dict(call)
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise FileFault(f"has a line that is no call: {line[:60]!r}")
