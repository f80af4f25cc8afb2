"""No report says what is not so: its sentences about totals are recomputed from the rows of a committed run."""

from __future__ import annotations

import hashlib
import json
import lzma
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reports.compare import render_board
from reports.decision import list_untried, spell_decision, spell_share
from reports.digest import verdict_line
from reports.html import render_html
from reports.markdown import markdown
from reports.results import Results, read_results
from reports.terminal import summary
from reports.verdicts import VERDICT_TEXTS, VERDICTS
from tests.reports.pages import Page

Row = dict[str, Any]
COMMITTED = Path(__file__).parents[2] / "docs" / "results" / "qnnpack.jsonl.xz"
RED = ("CRASHED", "TIMEOUT", "REFUTED", "FALLBACK")


def write(path: Path, rows: list[Row]) -> Path:
    """Write rows; the footer, if there is one, gets the digest of what stands before it."""
    lines = [json.dumps(row) for row in rows]
    if rows[-1]["kind"] == "footer":
        before = "".join(f"{line}\n" for line in lines[:-1]).encode()
        lines[-1] = json.dumps(rows[-1] | {"sha256": hashlib.sha256(before).hexdigest()})
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def unwaive(rows: list[Row]) -> list[Row]:
    """The run as it would be without its waivers: red."""
    changed = [row | {"waived": False, "waiver": None} if row.get("waived") else row for row in rows]
    changed = [{key: value for key, value in row.items() if value is not None or key != "waiver"} for row in changed]
    return [*changed[:-1], changed[-1] | {"outcome": "FAIL", "exit_status": 1}]


def cut(rows: list[Row]) -> list[Row]:
    """The run as far as it had come when it was killed."""
    return rows[:1700]


def keep_unexercised(rows: list[Row]) -> list[Row]:
    """The part of the run that fails by claims that are unexercised, and by nothing else."""
    names = {row["claim"] for row in rows if row["kind"] == "claim" and row["verdict"] in ("VERIFIED", "UNEXERCISED")}
    kept = [row for row in unwaive(rows)[1:-1] if row.get("claim") in names and row["kind"] in ("claim", "check")]
    claims = [row for row in kept if row["kind"] == "claim"]
    pairs = len({(row["pattern"], row["dtype_config"]) for row in claims})
    totals = {"claims": len(claims), "pairs": pairs, "checks": len(kept) - len(claims), "models": {}, "measurements": 0}
    footer = rows[-1] | totals | {"counts": dict(Counter(row["verdict"] for row in claims))}
    header = rows[0] | {"claims": len(claims), "options": rows[0]["options"] | {"claim": ["*"]}}
    return [header, *kept, footer | {"outcome": "FAIL", "exit_status": 1}]


def as_shard(rows: list[Row]) -> list[Row]:
    """The same as one part of a run."""
    return [rows[0] | {"shard": {"place": 2, "of": 3}}, *rows[1:]]


KINDS: dict[str, Callable[[list[Row]], list[Row]]] = {
    "waived": lambda rows: rows, "red": unwaive, "incomplete": cut, "unexercised": keep_unexercised,
    "shard": lambda rows: as_shard(keep_unexercised(rows)),
}  # fmt: skip


class Run:
    """A run of a kind: its rows, and the reports of it."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind = kind
        self.rows = [json.loads(line) for line in path.read_text().splitlines()]
        self.results: Results = read_results(path)
        self.html = render_html(self.results)
        self.page = Page(self.html)
        self.claims = [row for row in self.rows if row["kind"] == "claim"]
        self.models = [row for row in self.rows if row["kind"] == "model"]

    def count(self, *verdicts: str, waived: bool | None = None) -> int:
        return sum(row["verdict"] in verdicts and waived in (None, row["waived"]) for row in self.claims)


@pytest.fixture(scope="module", params=sorted(KINDS))
def run(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    rows = [json.loads(line) for line in lzma.decompress(COMMITTED.read_bytes()).splitlines()]
    return Run(request.param, write(tmp_path_factory.mktemp("decision") / "run.jsonl", KINDS[request.param](rows)))


@pytest.mark.slow
def test_the_decision_says_why_and_how_much_is_verified(run: Run) -> None:
    text = spell_decision(run.results)
    total, verified = run.rows[0]["claims"], run.count("VERIFIED")
    assert f"{verified} of {total} claims verified ({round(100 * verified / total)} %)" in text
    waived = sum(row["waived"] for row in [*run.claims, *run.models])
    first = min((row["waiver"]["expires"] for row in run.claims if row["waived"]), default="")
    if run.kind == "waived":
        assert text.startswith(f"PASS with {waived} waivers (first expires {first}), ")
    elif run.kind == "red":
        assert text.startswith(f"FAIL because {run.count('CRASHED')} claims crashed, {run.count('REFUTED')} claims are")
        assert f"and {sum(model['verdict'] == 'REFUTED' for model in run.models)} models are refuted; " in text
    elif run.kind == "incomplete":
        assert text.startswith(f"INCOMPLETE because the run stopped after {len(run.claims)} of {total} claims; ")
    else:
        assert text.startswith(f"FAIL because {run.count('UNEXERCISED')} claims are unexercised; ")


def test_every_report_has_the_decision(run: Run) -> None:
    text = spell_decision(run.results)
    assert text in run.page.text.partition("What the verdicts mean")[0]
    assert verdict_line(run.results) == f"qnnpack: {text}"
    escaped = re.sub(r"&#(\d+);", lambda found: chr(int(found[1])), markdown(run.results))
    assert f"**qnnpack: {text}**" in escaped
    if run.kind in ("waived", "red"):
        board = render_board([run.results])
        assert text in board and (">PASS with waivers<" in board) == (run.kind == "waived")


def test_a_pass_with_waivers_is_not_green(run: Run) -> None:
    classes = next(
        attrs["class"] or "" for tag, attrs in run.page.tags if "outcome" in (attrs.get("class") or "").split()
    )
    assert ("with-waivers" in classes.split()) == (run.kind == "waived")


def test_unexercised_claims_count_waived_or_not_and_those_never_reached(run: Run) -> None:
    section = run.page.text.partition("Unexercised not tested; fails unless waived ")[2].partition(" Matrix pattern")[0]
    unreached, open_ = run.rows[0]["claims"] - len(run.claims), run.count("UNEXERCISED")
    assert re.search(rf"\bUnexercised {open_ + unreached}\b", run.page.text)
    assert ("was exercised" in section) == (not open_ and not unreached)
    assert (f"{unreached} claims of {run.rows[0]['claims']} were never reached" in section) == bool(unreached)
    waived = {row["reason"] for row in run.claims if row["verdict"] == "UNEXERCISED" and row["waived"]}
    assert section.count("(all waived)") == len(waived)
    text = summary(run.results, "r.html", width=200)
    assert ("unexercised, by reason:" in text) == bool(open_)
    assert (f"not shown by this run: {unreached} claims that the run did not reach" in text) == bool(unreached)


def test_no_run_that_fails_says_that_no_claim_fails(run: Run) -> None:
    section = run.page.text.partition("Failures worst first ")[2].partition(" Models several")[0]
    waived, open_ = sum(row["waived"] for row in run.claims), run.count("UNEXERCISED", waived=False)
    if waived:
        assert section.startswith(f"No claim that was judged fails; {waived} would, but for a waiver")
    elif not run.count(*RED):
        told = f"No claim that was judged is refuted; {open_} of unexercised or unshown claims stand below."
        assert section.startswith(told)


@pytest.mark.slow
def test_every_red_claim_has_its_numbers_its_script_and_its_command(run: Run) -> None:
    red = [row for row in run.claims if row["verdict"] in RED]
    cards = run.html.split("<article ")[1:]
    by_id = {found[1]: card for card in cards if (found := re.search(r'id="(c-[0-9a-f]+)"', card))}
    for row in red:
        anchor = f"c-{hashlib.sha256(row['claim'].encode()).hexdigest()[:12]}"
        card = by_id[anchor]
        assert f'<th scope="row"><a href="#{anchor}">' in run.html, row["claim"]
        assert "pytest conformance --backend=qnnpack" in card
        assert ("scripts/" in card) == bool(row.get("script"))
    numbers = {row["claim"] for row in run.rows if row["kind"] == "check" and row.get("evidence", {}).get("found")}
    shown = sum("Outputs, " in card for card in by_id.values())
    assert shown == len(numbers & {row["claim"] for row in red})


def test_what_was_not_tried_is_listed(run: Run) -> None:
    lines = list(list_untried(run.results))
    assert [line for line in lines if "limits" in line] == [
        f"argument values beyond the limits that the backend declares for {len(run.rows[0]['limits'])} ops"
    ]
    assert any("did not reach" in line for line in lines) == (run.kind == "incomplete")
    assert any("not selected" in line for line in lines) == (run.kind == "unexercised")
    assert any("shard 2/3" in line for line in lines) == (run.kind == "shard")
    assert all(line in run.page.text for line in lines)


def test_each_verdict_is_explained_in_place(run: Run) -> None:
    legend = run.page.text.partition("What the verdicts mean ")[2].partition(" Not shown by this run")[0]
    assert tuple(VERDICT_TEXTS) == VERDICTS
    assert len({text.glyph for text in VERDICT_TEXTS.values()}) == len(VERDICTS)
    assert {len(text.glyph) for text in VERDICT_TEXTS.values()} == {1}
    for verdict, text in VERDICT_TEXTS.items():
        assert f"{verdict} {text.meaning} {text.passing}" in legend


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 0, "-"), (0, 9, "0 %"), (1, 1000, "1 %"), (999, 1000, "99 %"), (9, 9, "100 %"), (491, 853, "58 %")],
)
def test_a_share_is_all_or_nothing_only_if_it_is(part: int, whole: int, text: str) -> None:
    assert spell_share(part, whole) == text


def test_the_bound_is_shown_whole(runs: Any) -> None:
    check, claim = runs.refuted()
    page = Page(render_html(runs.results([check | {"allowed": "0.5 + 0.000305"}, claim])))
    assert "largest distance 18 LSB (allowed 0.5 + 0.000305) · 24 cases" in page.text
    listed = page.tables["Every claim of the run; a stage has the worst outcome of its checks"]
    assert listed[0][5:7] == ["LSB", "allowed"] and listed[1][5:7] == ["18", "0.5 + 0.000305"]


def test_claims_with_one_cause_are_one_group(runs: Any) -> None:
    rows = [row for number in range(3) for row in runs.refuted(f"broken{number}")]
    for number, row in enumerate(rows):
        row["message" if row["kind"] == "check" else "reason"] = (
            f"{number} of 24 outputs are off by {number / 3:.3g} LSB"
        )
    other = runs.claim("other", verdict="CRASHED", reason="killed by SIGSEGV")
    html = render_html(runs.results([*rows, other]))
    assert html.count('<details class="cause"') == 1
    group = html.partition('<details class="cause"')[2]
    assert (
        "3 REFUTED</span>" in group
        and group.count("<article") == 3
        and "SIGSEGV" not in group.partition("</main>")[0].partition("<h2")[0]
    )
