"""The findings: each script still shows its fault, and its header gives the page's row and the waivers' reasons.

A header is a block of comments in the script, ``# key: value``, one for each finding that it shows.
``UPDATE_GOLDEN=1 pytest tests/test_findings.py`` writes the table of docs/findings.md and the reasons of the shipped
waivers again.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest
import tomllib

from fx_quant_conformance.backends.discovery import find_backend
from fx_quant_conformance.backends.names import SHIPPED
from fx_quant_conformance.conformance.claims.claim import enumerate_claims
from tests.support.torchao import require_torchao
from tests.support.warm_python import run_python
from tests.test_documents import ENGINES, RUNTIMES, UPDATE, hold_table

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "docs" / "findings").glob("*.py"))
WAIVERS = sorted(path for folder in ("backends", "examples") for path in (ROOT / folder).glob("**/*.waivers.toml"))
NEEDS_ANOTHER_CPU = 77  # what a finding's script ends with where this CPU takes another kernel
COLUMNS = {
    "#": "finding",
    "engine": "engine",
    "what is claimed and does not hold": "claimed",
    "fault of": "fault of",
    "largest error": "largest error",
    "CPU": "cpu",
    "claims": "claims",
}


@cache
def headers() -> dict[int, dict[str, str]]:
    """The headers of all scripts, by the number of the finding."""
    found: dict[int, dict[str, str]] = {}
    for script in SCRIPTS:
        source = script.read_text(encoding="utf-8")
        for block in re.findall(r"^# finding: \d+\n(?:# .+\n)+", source, re.MULTILINE):
            lines = re.sub(r"\n#   ", " ", block).splitlines()
            header = dict(line.removeprefix("# ").split(": ", 1) for line in lines)
            assert set(header) - {"reason"} == set(COLUMNS.values()), script.name
            found[int(header["finding"])] = header | {"script": script.name}
    return dict(sorted(found.items()))


def format_reason(findings: list[str]) -> str:
    """A waiver's reason: what the findings that it names say."""
    numbers = [int(name.rpartition("#")[2]) for name in findings]
    return "docs/findings.md, " + "; ".join(f"{number}: {headers()[number]['reason']}" for number in numbers)


def test_findings_are_numbered_and_have_a_section_each() -> None:
    text = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    sections = [int(number) for number in re.findall(r"^## (\d+)\. ", text, re.MULTILINE)]
    assert list(headers()) == sections == list(range(1, len(sections) + 1))
    assert set(re.findall(r"\(findings/(\w+\.py)\)", text)) == {script.name for script in SCRIPTS}


def test_the_table_of_findings_is_made_of_the_headers() -> None:
    rows = [f"| {' | '.join(COLUMNS)} | script |", "|---" * (len(COLUMNS) + 1) + "|"]
    for header in headers().values():
        cells = [*(header[key] for key in COLUMNS.values()), f"[{header['script']}](findings/{header['script']})"]
        rows.append(f"| {' | '.join(cells)} |")
    hold_table("findings", "findings", rows)


@pytest.mark.parametrize("path", WAIVERS, ids=lambda path: path.name)
def test_the_reasons_of_waivers_are_made_of_the_headers(path: Path) -> None:
    head, *tables = re.split(r"^(?=\[\[waiver\]\])", text := path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for number, table in enumerate(tables):
        reason = format_reason(tomllib.loads(table)["waiver"][0]["findings"])
        tables[number] = re.sub(r'^reason = ".*"$', f'reason = "{reason}"', table, flags=re.MULTILINE)
    right = "".join((head, *tables))
    if UPDATE:
        path.write_text(right, encoding="utf-8")
    assert text == right or UPDATE


def owner_of(script: Path) -> str:
    """The backend that a finding's script is named after, or torch for what all engines share, or torchao."""
    owners = [name for name in ("torch", "torchao", *SHIPPED) if script.stem.startswith(f"{name.replace('-', '_')}_")]
    return max(owners, key=len)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_finding_holds(script: Path) -> None:
    owner = owner_of(script)
    if owner == "torchao":
        require_torchao()
    elif owner != "torch" and (reason := find_backend(owner).unavailable_reason()):
        pytest.skip(reason)
    done = run_python("-W", "ignore", str(script), cwd=ROOT)
    if done.returncode == NEEDS_ANOTHER_CPU:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, f"{script.name} ended with {done.returncode}; does torch behave otherwise now?\n" + (
        done.stdout + done.stderr
    )
    assert done.stdout.endswith("the fault shows\n")


def test_what_a_finding_says_of_claims_names_patterns_that_there_are() -> None:
    backends = [find_backend(name) for name in (*ENGINES, *RUNTIMES)]
    claims = [claim for each in backends for claim in enumerate_claims(each.backend_config(), each.capabilities())]
    patterns = {claim.pattern for claim in claims}
    globs = [glob for header in headers().values() for glob in re.findall(r"`([^`]+)/\*`", header["claims"])]
    assert len(globs) >= 30
    for glob in globs:
        assert any(fnmatchcase(pattern, glob) for pattern in patterns), f"no engine claims {glob}"
