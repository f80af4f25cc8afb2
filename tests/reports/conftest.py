"""Made-up rows of models, facts and waivers, changed where a test asks, and runs that end as they say."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from reports.results import GREEN, Results, ResultsWriter, read_results

Row = dict[str, Any]


class Made:
    """Rows beside those of claims, and files that hold them."""

    waiver: ClassVar[Row] = {
        "reason": "issue 12: saturates", "url": "https://example.org/12", "expires": "2027-01-31", "max_lsb": 18.0,
    }  # fmt: skip

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0

    def model(self, name: str = "model/resnet/ptq", **changes: Any) -> Row:
        row = {
            "kind": "model", "model": name, "verdict": "VERIFIED", "waived": False, "message": "", "max_lsb": 0.5,
            "cases": 3, "seconds": 0.75,
        }  # fmt: skip
        return row | changes

    def fact(self, subject: str = "linear", topic: str = "fingerprint", **values: Any) -> Row:
        return {"kind": "fact", "topic": topic, "subject": subject, "values": values or {"ties": "half_even"}}

    def path(self, rows: Iterable[Row], **footer: Any) -> Path:
        """A finished file of these rows, the header first; it passed if all claims and models are green."""
        rows = list(rows)
        judged = [row for row in rows if row["kind"] in ("claim", "model")]
        green = all(row["waived"] or row["verdict"] in GREEN for row in judged) and not footer.get("problems")
        self._count += 1
        path = self._directory / f"made{self._count}.jsonl"
        with ResultsWriter(path) as writer:
            for row in rows:
                writer.write(row)
            writer.close(outcome="PASS" if green else "FAIL", exit_status=int(not green), **{"seconds": 4.0} | footer)
        return path

    def results(self, rows: Iterable[Row], **footer: Any) -> Results:
        return read_results(self.path(rows, **footer))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("made"))
