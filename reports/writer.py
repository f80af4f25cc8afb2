"""Writing a results file row by row during a run, each row checked as every reader will check it.

Contract: docs/reports.md, "Results file"; the rows are in `reports.schema`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from fx_quant_conformance.reports.codec import SchemaError, line_of, row_of
from fx_quant_conformance.reports.results import ResultsError, counts_of, format_counts
from fx_quant_conformance.reports.schema import (
    Check,
    ClaimResult,
    Footer,
    Header,
    Judged,
    Measurement,
    ModelResult,
    Row,
)
from fx_quant_conformance.reports.verdicts import Outcome


class ResultsWriter:
    """Writes a results file during a run: each row is checked, then flushed; a kill loses none."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("wb")
        self._digest = hashlib.sha256()
        self._lines = 0
        self._checks = 0
        self._measurements = 0
        self._header: Header | None = None
        self._claims: list[ClaimResult] = []
        self._models: list[ModelResult] = []

    def write(self, row: Row) -> None:
        """Append one row; `close` writes the footer. Raises ResultsError for a row that no reader would take."""
        try:
            line = line_of(row)
        except ValueError as error:
            self._refuse(str(error))
        self.write_line(line)

    def write_line(self, line: str) -> Row:
        """Append one row that is a line already, as `line_of` makes it; return the row.

        Raises ResultsError for a line that no reader would take, or a row in the wrong place.
        """
        if self._file.closed:
            self._refuse("the file is closed; write every row before close()")
        try:
            row = row_of(line)
        except ValueError as error:
            self._refuse(str(error))
        if isinstance(row, Footer):
            self._refuse("a footer row; close() writes it")
        if isinstance(row, Header) != (self._lines == 0):
            self._refuse(f"a {row.kind} row; the first row, and no other, is the header")
        self._append(line)
        self._checks += isinstance(row, Check)
        self._measurements += isinstance(row, Measurement)
        if isinstance(row, Header):
            self._header = row
        if isinstance(row, ClaimResult):
            self._claims.append(row)
        if isinstance(row, ModelResult):
            self._models.append(row)
        return row

    def close(
        self,
        *,
        outcome: Outcome,
        exit_status: int,
        seconds: float,
        problems: Sequence[str] = (),
        notes: Sequence[str] = (),
        peak_mib: float | None = None,
        foreign_code: Sequence[str] = (),
    ) -> None:
        """Write the footer, with the totals of the rows written, and close the file."""
        if self._file.closed or self._header is None:
            self._refuse("close() needs an open file whose header is written, and ends it once")
        judged: tuple[Judged, ...] = (*self._claims, *self._models)
        failing = counts_of(row.verdict for row in judged if not row.passes)
        if outcome == Outcome.PASS and (failing or exit_status or problems):
            failures = f"{format_counts(failing)}, {len(problems)} problems"
            self._refuse(f"outcome PASS with exit status {exit_status} and {failures}; pass FAIL")
        footer = Footer(
            counts=counts_of(claim.verdict for claim in self._claims),
            claims=len(self._claims),
            checks=self._checks,
            pairs=len({claim.pair for claim in self._claims}),
            models=counts_of(model.verdict for model in self._models),
            measurements=self._measurements,
            outcome=outcome,
            exit_status=int(exit_status),
            problems=list(problems),
            notes=list(notes),
            seconds=seconds,
            peak_mib=peak_mib,
            foreign_code=list(foreign_code),
            sha256=self._digest.hexdigest(),
        )
        try:
            self._append(line_of(footer))
        except SchemaError as error:
            self._refuse(str(error))
        self._file.close()

    def __enter__(self) -> ResultsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file; without an earlier close() it has no footer and so stays incomplete."""
        self._file.close()

    def _append(self, line: str) -> None:
        data = line.encode() + b"\n"
        self._file.write(data)
        self._file.flush()
        self._digest.update(data)
        self._lines += 1

    def _refuse(self, why: str) -> NoReturn:
        raise ResultsError(f"{self.path}:{self._lines + 1}: {why}")
