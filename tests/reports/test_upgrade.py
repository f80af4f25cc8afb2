"""Results files of schema 1 are read as those of schema 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reports.results import ResultsError, read_results
from reports.schema import SCHEMA, Statistics, Where

CLAIM = {
    "kind": "claim", "claim": "linear", "pattern": "nn.Linear", "flow": "ptq",
    "dtype_config": "static:in=qint8[-127..127,s>=2^-12],w=*", "scheme": "no_weight",
    "verdict": "REFUTED", "waived": True, "reason": "off", "max_lsb": 2.0, "repro": "", "seconds": 1.0,
    "waiver": {"reason": "known", "url": None, "expires": "2027-01-31", "max_lsb": "inf"},
}  # fmt: skip
CHECK = {
    "kind": "check", "claim": "linear", "stage": "numerics", "rule": "NUM-03", "outcome": "fail", "verdict": "REFUTED",
    "message": "off", "max_lsb": 2.0, "slack_lsb": 0.0, "cases": 3, "seconds": 1.0,
    "evidence": {"case": "default signed, random, output 1", "found": [3], "others": ["another"]},
    "measured": {"distances": [1, 2], "sqnr_db": "inf"},
}  # fmt: skip
MODEL = {
    "kind": "model", "model": "model/unet/ptq", "verdict": "VERIFIED", "waived": False, "message": "", "max_lsb": 0.5,
    "cases": 2, "seconds": 1.0, "evidence": {"rule": "NUM-03", "script": "import torch\n", "case": "batch 0"},
}  # fmt: skip
FACT = {"kind": "fact", "topic": "nonfinite", "subject": "linear", "values": {"nan": "0"}}


def write_old(path: Path, header: dict[str, Any], *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in (header | {"schema": 1}, *rows)), encoding="utf-8")
    return path


def test_each_kind_of_row_is_upgraded(runs: Any) -> None:
    results = read_results(write_old(runs.directory / "old.jsonl", runs.header(), CHECK, CLAIM, MODEL, FACT))
    (check,), (claim,), (model,), (row,) = results.checks, results.claims, results.models, results.measurements
    assert results.header.schema == SCHEMA
    assert check.evidence == {
        "where": Where(case="default signed, random, output 1"), "found": [3], "others": ["another"],
    }  # fmt: skip
    assert check.statistics == Statistics(distances=[1, 2], sqnr_db="inf")
    assert claim.dtypes == "static:in=qint8,w=*"
    assert claim.waiver is not None and (claim.waiver.expires, claim.waiver.max_lsb) == ("2027-01-31", "inf")
    assert (model.rule, model.script, model.evidence) == ("NUM-03", "import torch\n", {"where": Where(case="batch 0")})
    assert (row.topic, row.values) == ("nonfinite", {"nan": "0"})


def test_the_totals_of_an_old_footer_are_checked(runs: Any) -> None:
    footer = {
        "kind": "footer", "counts": {}, "claims": 0, "checks": 0, "pairs": 0, "outcome": "FAIL", "exit_status": 1,
        "seconds": 1.0, "sha256": "0" * 64, "facts": 7,
    }  # fmt: skip
    results = read_results(write_old(runs.directory / "old.jsonl", runs.header(claims=0), FACT, footer))
    assert "the footer's measurements: 7; the rows give 1" in results.problems


def test_a_bad_row_of_an_old_file_is_named_by_its_line(runs: Any) -> None:
    path = write_old(runs.directory / "old.jsonl", runs.header(), CHECK | {"cases": "three"})
    with pytest.raises(ResultsError, match=r"old\.jsonl:2: 'cases' is 'three'"):
        read_results(path)


def test_an_old_row_in_a_new_file_is_refused(runs: Any) -> None:
    path = runs.directory / "new.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (runs.header(), FACT)), encoding="utf-8")
    with pytest.raises(ResultsError, match=r"new\.jsonl:2: unknown kind of row 'fact'"):
        read_results(path)
