"""Texts of findings: which section of which file a waiver names, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fx_quant_conformance.backends.base import Backend
from fx_quant_conformance.conformance.run.findings import format_missing, read_findings
from fx_quant_conformance.conformance.run.opening import open_run
from fx_quant_conformance.conformance.run.waivers import WaiverEntry, WaiverError, load_waivers
from fx_quant_conformance.reports.findings import LONGEST_FINDING
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.fake_backends import fakes
from tests.conformance.support.suite_runs import options

ERRATA = """# Errata of the NPU

What is known.

## 1. ELU: sixteen pieces

It is off by 0.025.

### Why

```
## 3. no heading, but a comment
```

No exponential function.

## 12. Pools & windows

## 2. Twice

One.

## 2. Twice again

Two.
"""


def entries(folder: Path, *names: str, text: str = ERRATA) -> list[WaiverEntry]:
    """A waiver that names findings of errata.md, which is one folder up."""
    (folder / "npu").mkdir(exist_ok=True)
    (folder / "errata.md").write_text(text)
    values = {"verdict": Verdict.REFUTED, "reason": "why", "url": "https://a.b", "claim": "c"}
    return [WaiverEntry(file=folder / "npu" / "w.toml", number=1, findings=names, **values)]  # type: ignore[arg-type]


def test_a_text_is_the_section_under_its_heading(tmp_path: Path) -> None:
    names = ("../errata.md#1", "../errata.md#1-elu-sixteen-pieces", "../errata.md#why")
    short, whole, part = read_findings(entries(tmp_path, *names)).values()
    assert short == whole
    assert short.startswith("1. ELU: sixteen pieces\n\nIt is off by 0.025.\n\n### Why\n\n```\n## 3.")
    assert short.endswith("No exponential function.")
    assert part.startswith("Why\n\n```")


def test_without_an_anchor_the_whole_file_is_the_text(tmp_path: Path) -> None:
    (text,) = read_findings(entries(tmp_path, "../errata.md")).values()
    assert text.startswith("Errata of the NPU\n\nWhat is known.\n") and text.endswith("Two.")
    (text,) = read_findings(entries(tmp_path, "../errata.md", text="It rounds down.")).values()
    assert text == "It rounds down."


def test_a_long_text_is_cut_and_controls_nothing(tmp_path: Path) -> None:
    (text,) = read_findings(entries(tmp_path, "../errata.md", text="\x1b[31m" + "x" * 9000)).values()
    assert len(text) < LONGEST_FINDING + 40 and text.endswith("(9008 characters)") and "\x1b" not in text


def test_a_file_that_is_not_there_leaves_the_name_and_a_note(tmp_path: Path) -> None:
    waivers = entries(tmp_path, "../errata.md#why", *(f"none{number}.md#1" for number in range(7)))
    texts = read_findings(waivers)
    assert list(texts) == ["../errata.md#why"]
    told = format_missing(waivers, texts)
    assert told.startswith("the report lacks the texts of findings whose files are not here: none0.md#1, none1.md#1, ")
    assert told.endswith(" and 2 more") and format_missing(waivers[:0], texts) == ""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("../errata.md#3", "no heading begins so; give the anchor of one heading"),
        ("../errata.md#2", "2 headings begin so; give the anchor of one heading"),
        ("../errata.md#elu", "no heading begins so"),
    ],
)
def test_a_heading_that_is_not_there_is_refused(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(WaiverError, match=rf"w\.toml: waiver 1 \(c\): the finding {name}: {said}"):
        read_findings(entries(tmp_path, name))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    waivers = entries(tmp_path, "../errata.md")
    for content, said in (
        (b"\xff", "is not UTF-8"),
        (b" \n", "there is no text"),
        (b"x" * 4_000_001, "has more than 4000000 bytes"),
    ):
        (tmp_path / "errata.md").write_bytes(content)
        with pytest.raises(WaiverError, match=said):
            read_findings(waivers)


def test_the_header_of_a_run_has_the_texts_and_a_row_the_names(tmp_path: Path) -> None:
    entries(tmp_path)
    table = '[[waiver]]\nclaim = "c"\nverdict = "REFUTED"\nrule = "NUM-03"\nreason = "r"\nurl = "https://a.b"\n'
    path = tmp_path / "npu" / "w.toml"
    path.write_text(f'{table}findings = ["../errata.md#why"]\n')
    (entry,) = load_waivers(path, "avx2", "2.13.0")
    assert entry.to_row().findings == ["../errata.md#why"]
    backend: Backend = fakes.Good()
    header = open_run(options(tmp_path, waivers=path), backend).make_header()
    assert list(header.findings) == ["../errata.md#why"]
    path.write_text(f'{table}findings = ["../errata.md#where"]\n')
    with pytest.raises(pytest.UsageError, match="no heading begins so"):
        open_run(options(tmp_path, waivers=path), backend)
