"""Writing a results file: row by row while a run goes on, each checked as every reader will check it.

Contract: docs/architecture.md, "Results and reports"; the rows are in `reports.schema`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from reports.codec import decode, not_plain, unknown_keys
from reports.results import ResultsError, counts_of, loads, spell_counts
from reports.schema import (
    SCHEMA,
    Check,
    Claim,
    Fact,
    Footer,
    Header,
    Model,
    Outcome,
    Row,
    Verdict,
)


class ResultsWriter:
    """Writes a results file while the run goes on: each row is checked, then flushed; a kill loses none."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("wb")
        self._digest = hashlib.sha256()
        self._lines = 0
        self._checks = 0
        self._facts = 0
        self._claims: list[Claim] = []
        self._models: list[Model] = []

    def write(self, row: Mapping[str, object]) -> None:
        """Append one row; the footer is `close`'s."""
        if self._file.closed:
            self._refuse("the file is closed; write every row before close()")
        line, data = self._checked(row)
        if isinstance(data, Footer):
            self._refuse("a footer row; close() writes it")
        if isinstance(data, Header) != (self._lines == 0):
            self._refuse(f"a {data.kind} row; the first row, and no other, is the header")
        self._append(line)
        self._checks += isinstance(data, Check)
        self._facts += isinstance(data, Fact)
        if isinstance(data, Claim):
            self._claims.append(data)
        if isinstance(data, Model):
            self._models.append(data)

    def close(
        self,
        *,
        outcome: str,
        exit_status: int,
        seconds: float,
        problems: Sequence[str] = (),
        notes: Sequence[str] = (),
        peak_mib: float | None = None,
    ) -> None:
        """Write the footer, with the totals of the rows written, and close the file."""
        if self._file.closed or self._lines == 0:
            self._refuse("close() needs an open file whose header is written, and ends it once")
        judged: tuple[Claim | Model, ...] = (*self._claims, *self._models)
        red = counts_of(row.verdict for row in judged if not row.green)
        if outcome == Outcome.PASS and (red or exit_status or problems):
            told = f"{spell_counts(red)}, {len(problems)} problems"
            self._refuse(f"outcome PASS with exit status {exit_status} and {told}; pass FAIL")
        footer = {
            "kind": "footer",
            "counts": _by_name(claim.verdict for claim in self._claims),
            "claims": len(self._claims),
            "checks": self._checks,
            "pairs": len({claim.pair for claim in self._claims}),
            "models": _by_name(model.verdict for model in self._models),
            "facts": self._facts,
            "outcome": str(outcome),
            "exit_status": int(exit_status),
            "problems": list(problems),
            "notes": list(notes),
            "seconds": seconds,
            "peak_mib": peak_mib,
            "sha256": self._digest.hexdigest(),
        }
        self._append(self._checked(footer)[0])
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file; without an earlier close() it has no footer and so stays incomplete."""
        self._file.close()

    def _checked(self, row: Mapping[str, object]) -> tuple[bytes, Row]:
        """The line for a row, and what every reader will make of that line."""
        for where, why in not_plain(dict(row), "row"):
            self._refuse(f"{where} is {why}")
        text = json.dumps(dict(row), allow_nan=False, sort_keys=True)
        try:
            data = decode(loads(text))
        except ValueError as error:
            self._refuse(str(error))
        if unknown := unknown_keys(row):
            self._refuse(f"a {data.kind} row has no key {', '.join(map(repr, unknown))} in schema {SCHEMA}")
        return text.encode() + b"\n", data

    def _append(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()
        self._digest.update(line)
        self._lines += 1

    def _refuse(self, why: str) -> NoReturn:
        raise ResultsError(f"{self.path}:{self._lines + 1}: {why}")


def _by_name(verdicts: Iterable[Verdict]) -> dict[str, int]:
    return {verdict.value: count for verdict, count in counts_of(verdicts).items()}
