"""The Markdown for a job's summary: verdict first, the worst claims, and no text that does anything."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fx_quant_conformance.reports.markdown import VARIABLE, markdown, write_job_summary

EVIL = "a|b `c` [x](javascript:alert(1)) <img src=x onerror=1> ![i](http://x.invalid/) <!-- --> **b** \u202e\x00\x1b[2J"


def test_the_worst_twenty_are_shown_and_the_others_counted(runs: Any) -> None:
    rows = [runs.claim(f"claim{n}", verdict="REFUTED", reason="off") for n in range(25)]
    text = markdown(runs.results(rows))
    assert "### 25 failing claims, worst first" in text and "5 more are in the report." in text
    assert len(re.findall(r"^\| REFUTED \|.*claim\d+", text, re.M)) == 20


def test_no_text_is_markup(runs: Any, made: Any) -> None:
    check, claim = runs.refuted(EVIL, reason=EVIL)
    rows = [
        check | {"message": EVIL, "rule": EVIL},
        claim,
        runs.claim("u", verdict="UNEXERCISED", reason=EVIL),
        made.model(EVIL, verdict="REFUTED", reason=EVIL),
    ]
    shard = {"place": 2, "of": 8}  # the line is there; it can hold no text
    header = {"backend": EVIL, "config_name": EVIL, "cpu": EVIL, "shard": shard, "versions": {EVIL: EVIL}}
    text = markdown(runs.results(rows, **header))
    body = re.sub(r"&#\d+;", "", text)
    assert not set("`[]()<>!*_\\") - {"*"} & set(body)
    assert body.count("**") == 2, "the bold line is ours"
    assert set(body) - {"\n"} == {c for c in body if c.isprintable()}
    for line in body.splitlines():
        if line.startswith("|"):
            assert line.endswith("|") and line.count("|") in (3, 4, 7)
    assert "onerror=1" in text, "it is said, and does nothing"


def test_the_job_summary_is_appended(runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, path = runs.results([runs.claim()]), tmp_path / "summary.md"
    path.write_text("before\n")
    monkeypatch.setenv(VARIABLE, str(path))
    assert write_job_summary(results) == f"job summary: {path}\n"
    assert path.read_text() == f"before\n{markdown(results)}"
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert write_job_summary(results) == f"job summary: {tmp_path} cannot be written: Is a directory\n"
    monkeypatch.delenv(VARIABLE)
    assert write_job_summary(results) == ""
