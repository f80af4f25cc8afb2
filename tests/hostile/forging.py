"""Forged certificates: the rows of a genuine run, changed, with every digest, total and page made to fit."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from reports import certificate
from reports.certificate import CERTIFICATE, RESULTS, WAIVERS
from reports.codec import encode
from reports.results import Results, digest_ids
from reports.schema import Row
from reports.verdicts import Outcome
from reports.writer import ResultsWriter

COMMIT = "0123456789" * 4
"""The commit that the genuine run, and the suite in these tests, say they are of."""
PlainRow = dict[str, Any]


@dataclass(slots=True)
class Forgery:
    """The rows of a run, the header first, and its waivers, to be changed in place."""

    rows: list[PlainRow]
    waivers: str

    @property
    def header(self) -> PlainRow:
        return self.rows[0]

    @property
    def options(self) -> PlainRow:
        return self.header["options"]  # type: ignore[no-any-return]

    def all(self, kind: str, of: str = "", **values: Any) -> list[PlainRow]:
        """The rows of a kind whose claim, model or subject begins with ``of``, and that have these values."""
        rows = [row for row in self.rows if row["kind"] == kind and self._name(row).startswith(of)]
        return [row for row in rows if all(row.get(key) == value for key, value in values.items())]

    def one(self, kind: str, of: str = "", **values: Any) -> PlainRow:
        return self.all(kind, of, **values)[0]

    @staticmethod
    def _name(row: PlainRow) -> str:
        return str(row.get("claim") or row.get("model") or row.get("subject") or "")

    def drop(self, rows: Iterable[PlainRow]) -> None:
        gone = [id(row) for row in rows]
        assert gone
        self.rows[:] = [row for row in self.rows if id(row) not in gone]

    def drop_claim(self, name: str) -> None:
        self.drop([*self.all("claim", name), *self.all("check", name), *self.all("measurement", name)])

    def fit_claims(self) -> None:
        """Make the header's counts and digest those of the rows that are left."""
        claims = self.all("claim")
        self.header["claims"] = self.header["claims_in_config"] = len(claims)
        self.header["pairs"] = len({(row["pattern"], row["dtype_config"]) for row in claims})
        self.header["claims_sha256"] = digest_ids(row["claim"] for row in claims)

    def fit_waivers(self) -> None:
        self.header["waivers"]["sha256"] = hashlib.sha256(self.waivers.encode()).hexdigest()

    def replace(self, old: str, new: str) -> None:
        """Replace a text in every row."""
        text = json.dumps(self.rows)
        assert old in text
        self.rows[:] = json.loads(text.replace(old, new))


def rows_of(results: Results) -> list[PlainRow]:
    rows: tuple[Row, ...] = (
        results.header, *results.checks, *results.claims, *results.models, *results.measurements,
    )  # fmt: skip
    return [copy.deepcopy(encode(row)) for row in rows]


def forge(folder: Path, results: Results, waivers: str, change: Callable[[Forgery], Any]) -> Path:
    """Make the certificate of a changed run, in a folder's folder, without asking whether it deserves one."""
    forgery = Forgery(rows_of(results), waivers)
    change(forgery)
    run = folder / "run"
    with ResultsWriter(run / RESULTS) as writer:
        for row in forgery.rows:
            writer.write_line(json.dumps(row))
        writer.close(outcome=Outcome.PASS, exit_status=0, seconds=75.5)
    if forgery.header["waivers"]:
        (run / WAIVERS).write_text(forgery.waivers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificate, "find_shortcomings", lambda results: ())
        certificate.certify(run / RESULTS, folder / "certificate", None)
    assert (folder / "certificate" / CERTIFICATE).exists()
    return folder / "certificate"
