"""What the documents say is so: findings still hold, README and CI run the same commands, options and names exist."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest
import tomllib

from fx_quant_conformance.backends.names import SHIPPED
from fx_quant_conformance.conformance.claims.limits import OWN_ARGUMENTS, list_arguments
from fx_quant_conformance.conformance.machine.environment import read_detection_power
from fx_quant_conformance.conformance.ops.table import RECORDS
from fx_quant_conformance.conformance.run.judging import find_baselines
from fx_quant_conformance.conformance.run.options import OPTIONS
from fx_quant_conformance.conformance.stages.state import STAGES
from fx_quant_conformance.refimpl.config.patterns import leaf_name
from fx_quant_conformance.reports.baseline import name_file, read_baseline_file
from fx_quant_conformance.reports.diff import Change
from fx_quant_conformance.reports.families import OTHER, find_family
from fx_quant_conformance.reports.results import read_results
from fx_quant_conformance.reports.verdicts import VERDICT_TEXTS, VERDICTS, Outcome, Verdict
from tests.mutants.mutants import MUTANTS
from tests.support.torchao import needs_torchao
from tests.support.warm_python import run_python

ROOT = Path(__file__).parents[1]
FINDINGS = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
ENGINES = ("qnnpack", "fbgemm", "x86", "onednn")
RUNTIMES = ("onnxruntime", "openvino", "inductor", "executorch", "litert", "ncnn", "pt2e-x86", "pt2e-xnnpack")
COMMANDS = ("render", "markdown", "baseline", "diff", "merge", "compare", "certify", "verify")
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
UPDATE = bool(os.environ.get("UPDATE_GOLDEN"))


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return run_python(*words, cwd=ROOT)


def test_the_readme_is_read_in_three_minutes() -> None:
    assert len(README.splitlines()) <= 100
    assert len(README.split()) <= 800


def test_ci_runs_the_test_command_of_the_readme() -> None:
    text = re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL)
    (command,) = (code for code in re.findall(r"`([^`]+)`", text) if code.endswith("tox && tox"))
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert command in [line.strip() for line in lines]


def test_every_install_is_constrained() -> None:
    texts = [*DOCS.values(), *((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md"))]
    commands = [line for text in texts for line in re.findall(r"pip install [^`\n]*", text)]
    assert len(commands) > 8
    assert [line for line in commands if "-c " not in line and "install --no-deps" not in line] == []


DOCUMENTS = (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("README.md"))


@cache
def anchors(document: Path) -> frozenset[str]:
    """The anchors of a Markdown file: those of its headings, as GitHub makes them, and those written out."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = (re.sub(r"[`*]", "", found).lower() for found in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return frozenset(re.sub(r"[^\w\- ]", "", found).replace(" ", "-") for found in headings) | frozenset(
        re.findall(r'<a id="([^"]+)">', text)
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_what_there_is(document: Path) -> None:
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        path = (document.parent / file).resolve() if file else document
        assert path.exists(), f"{document.name} links to {target}, which is not there"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{document.name} links to {target}: no such heading"
        elif anchor:
            line = int(anchor.removeprefix("L"))
            assert 1 <= line <= len(path.read_text(encoding="utf-8").splitlines()), f"{target}: no such line"


@pytest.mark.slow
def test_the_documents_name_what_exists() -> None:
    for name in SHIPPED:
        assert f"`{name}`" in DOCS["backends"], f"docs/backends.md does not name {name}"
    for verdict in VERDICTS:
        assert verdict.value in README, f"README does not explain {verdict.value}"
    help_text = run("-m", "pytest", "conformance", "--help").stdout
    help_text += "".join(run("-m", "fx_quant_conformance", "report", command, "--help").stdout for command in COMMANDS)
    options = set(re.findall(r"`(--[a-z-]+)", README + DOCS["options"] + DOCS["reports"]))
    assert len(options) > 15
    assert [option for option in options if option not in help_text] == []


@pytest.mark.parametrize("title", ["From `--backend=qnnpack` to an HTML row", "From a directed input to its verdict"])
def test_a_walk_through_the_code_is_short_and_names_what_exists(title: str) -> None:
    walk = DOCS["architecture"].partition(f"## {title}")[2].partition("\n## ")[0]
    steps = re.findall(r"^\d+\. \[`([\w.]+)`\]\(\.\./([\w/]+)\.py\)", walk, re.MULTILINE)
    assert 10 < len(steps) == len(re.findall(r"^\d+\. ", walk, re.MULTILINE)) <= 25
    for name, module in steps:
        last, text = name.rpartition(".")[2], (ROOT / f"{module}.py").read_text(encoding="utf-8")
        defined = re.search(rf"^ *(def|class) {last}\b|^{last}\b", text, re.MULTILINE)
        assert defined or module.endswith(f"/{last}"), f"{module}.py defines no {name}"


def hold_table(page: str, mark: str, rows: list[str]) -> None:
    """Hold what a page has between two marks to these rows, or write it anew."""
    path = ROOT / "README.md" if page == "README" else ROOT / "docs" / f"{page}.md"
    text = path.read_text(encoding="utf-8")
    before, start, rest = text.partition(f"<!-- {mark} -->\n")
    _, end, after = rest.partition(f"<!-- end of {mark} -->")
    right = f"{before}{start}" + "\n".join(rows) + f"\n{end}{after}"
    if UPDATE:
        path.write_text(right, encoding="utf-8")
    assert text == right or UPDATE
    assert start and end


def test_readme_and_glossary_explain_the_verdicts_as_the_reports_do() -> None:
    """``UPDATE_GOLDEN=1 pytest tests/test_documents.py -k verdicts`` writes both again."""
    best_first = list(VERDICT_TEXTS.items())[::-1]
    rows = ["| verdict | meaning |", "|---|---|"]
    rows += [f"| {verdict} | {text.meaning} {text.passing} |" for verdict, text in best_first]
    hold_table("README", "verdicts", [re.sub(r"(--[a-z-]+\w)", r"`\1`", row) for row in rows])
    entries = [f"{verdict}\n: {text.meaning}" for verdict, text in best_first]
    hold_table("glossary", "verdicts", ["\n\n".join(entries)])


def test_the_page_of_options_is_what_help_says() -> None:
    """``UPDATE_GOLDEN=1 pytest tests/test_documents.py -k options`` writes the table again."""
    rows = ["| option | meaning |", "|---|---|"]
    for name, keywords in OPTIONS.items():
        value = "\\|".join(keywords.get("choices", ())) if name == "--profile" else keywords.get("metavar", "")
        rows.append(f"| `{name}{'=' + value if value else ''}` | {keywords['help']} |")
    hold_table("options", "options", rows)


def test_the_page_of_limits_lists_the_ops_and_arguments_that_are_varied() -> None:
    """``UPDATE_GOLDEN=1 pytest tests/test_documents.py -k limits`` writes the tables again."""
    groups = dict[str, list[str]]()
    for op, samples in RECORDS.items():
        groups.setdefault(", ".join(f"`{name}`" for name in list_arguments(samples)), []).append(f"`{leaf_name(op)}`")
    rows = ["| ops | arguments |", "|---|---|", *(f"| {', '.join(ops)} | {names} |" for names, ops in groups.items())]
    rows += ["", "| argument | meaning |", "|---|---|"]
    rows += [f"| `{name}` | {meaning} |" for name, meaning in OWN_ARGUMENTS.items()]
    hold_table("limits", "limits", rows)


PLAIN = {
    "all claims",
    "claim or model",
    "column",
    "covers",
    "cpu",
    "cpu flags",
    "days left",
    "differences from the baseline",
    "dtypes",
    "error",
    "expires",
    "fail",
    "failures",
    "finding",
    "first to diverge",
    "is",
    "options",
    "pass",
    "patterns and models",
    "platform",
    "plots",
    "reason",
    "requirement",
    "seconds",
    "skip",
    "software",
    "started",
    "suite",
    "ticket",
    "torch",
    "up to lsb",
    "waivers in force",
    "was",
    "what differs",
}
"""Labels of the reports that say what they mean."""
PAGES = ("report", "scoreboard")


def test_the_glossary_has_every_term_of_the_reports() -> None:
    templates = [(ROOT / "reports" / "templates" / f"{name}.html.j2").read_text(encoding="utf-8") for name in PAGES]
    label = r"<dt>([^<{]+)</dt>|<th scope=\"col\"[^>]*>([^<{]+)</th>|<h2 id=\"[^\"]+\">([^<{]+)"
    labels = [found for template in templates for found in re.findall(label, template)]
    assert len(labels) > 70
    words = {text.strip().lower() for found in labels for text in found if text}
    assert words >= PLAIN, f"no label of the report: {PLAIN - words}"
    terms = re.findall(r"^(\S.*)\n: |\*(\w[\w ]*)\*", DOCS["glossary"], re.MULTILINE)
    known = {term.lower() for found in terms for term in found}
    wanted = words - PLAIN | {*STAGES, "passing", *Change} | {verdict.lower() for verdict in [*VERDICTS, *Outcome]}
    missing = sorted(word for word in wanted if word not in known and word.removesuffix("s") not in known)
    assert missing == []


@pytest.mark.slow
def test_the_table_of_architectures_is_made_of_the_committed_results() -> None:
    """``UPDATE_GOLDEN=1 pytest tests/test_documents.py -k architectures`` writes it again."""
    engines = ("qnnpack", "executorch", "onnxruntime", "x86")
    files = [(name, file) for name in engines for file in (ROOT / "docs" / "results" / "models").glob(f"{name}*.xz")]
    cells = defaultdict[str, dict[str, str]](dict)
    for engine, file in files:
        run = read_results(file)
        assert run.footer is not None and re.fullmatch("[0-9a-f]{40}", run.header.suite_commit), "of a clean checkout"
        for model in run.models:
            deployment = model.deployment
            name = model.model.split("/")[2]
            assert engine not in cells[name], "a model is in one file of an engine"
            if deployment is None or not deployment.multiplications:
                cells[name][engine] = str(model.verdict)
                continue
            parts, wrong = deployment.quantized, [p for p in deployment.quantized if p.verdict is not Verdict.VERIFIED]
            share = sum(part.multiplications for part in parts) / deployment.multiplications
            cells[name].setdefault(
                "quantized by qnnpack", f"{len(parts)} of {len(deployment.parts)}, {share:.1%} of the products"
            )
            cells[name][engine] = f"{model.verdict}, {len(wrong)} of {len(parts)}" if wrong else str(model.verdict)
    columns = ("quantized by qnnpack", *engines)
    rows = [f"| model | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    rows += [f"| `{name}` | {' | '.join(row[each] for each in columns)} |" for name, row in sorted(cells.items())]
    assert len(cells) == 24
    hold_table("models", "architectures", rows)


def test_every_op_that_the_suite_varies_belongs_to_a_family() -> None:
    names = [leaf_name(op) for op in RECORDS]
    assert len(names) > 150
    assert [name for name in names if find_family(name) == OTHER] == [], "enter them in reports/families.py"


def test_the_page_of_reports_explains_every_command() -> None:
    assert set(re.findall(r"^\| `(\w+) [A-Z][^|]*` \|", DOCS["reports"], re.MULTILINE)) == set(COMMANDS)


def test_the_numbers_of_the_readme_are_those_of_the_documents() -> None:
    power = read_detection_power()["every class"]
    assert f"finds {power['full']} of {power['faults']} seeded faults" in README
    findings = re.findall(r"^## \d+\. ", FINDINGS, re.MULTILINE)
    assert f"found {len(findings)} faults" in README
    honest = re.search(r"without a false alarm: (\d+) of (\d+) ", DOCS["detection-power"])
    assert honest and honest[1] == honest[2]
    assert f"refutes none of {int(honest[2]) // 2} honest variants" in README  # each runs in two profiles


@needs_torchao
def test_the_honest_variants_of_the_readme_are_all_there_are() -> None:
    variants = sum(mutant.is_honest for mutant in MUTANTS)
    assert f"refutes none of {variants} honest variants" in README


def test_every_backend_has_committed_results() -> None:
    names = [path.name.removesuffix(".jsonl.xz") for path in (ROOT / "docs" / "results").glob("*.jsonl.xz")]
    assert sorted(names) == sorted((*ENGINES, *RUNTIMES))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ENGINES, *RUNTIMES])
def test_committed_results_are_whole_clean_as_expected_and_tabulated(name: str) -> None:
    results = read_results(ROOT / "docs" / "results" / f"{name}.jsonl.xz")
    header = results.header
    assert results.footer is not None
    assert (results.outcome, header.profile, header.shard) == (Outcome.PASS, "full", None)
    assert re.fullmatch("[0-9a-f]{40}", header.suite_commit), "made of a clean checkout"
    known = read_baseline_file(find_baselines(str(header.options["backend"])) / name_file(header))
    found = {claim.claim: claim.verdict for claim in results.claims if claim.verdict is not Verdict.VERIFIED}
    assert header.config_sha256 == known.basis.config_sha256 and found.keys() == known.deviations.keys()
    assert [name for name, verdict in found.items() if not known.deviations[name].verdict.may_be(verdict)] == []
    counts = Counter(claim.verdict.value for claim in results.claims)
    columns = ("VERIFIED", "TOLERATED", "FALLBACK", "REFUTED", "CRASHED", "UNEXERCISED")
    numbers = [len(results.claims), *(counts[column] for column in columns), round(results.footer.seconds)]
    assert f"| `{name}` | {' | '.join(map(str, numbers))} |" in DOCS["backends"]


def test_the_architecture_names_every_stage() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for stage in STAGES:
        assert f"| {stage} |" in text, f"docs/architecture.md does not explain the stage {stage}"


def test_a_constraint_is_given_for_every_dependency() -> None:
    pinned = set(re.findall(r"^([a-z0-9.-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    given = [*project["dependencies"], *(each for group in project["optional-dependencies"].values() for each in group)]
    wanted = {re.split(r"[><=\[ ]", each)[0] for each in given}
    assert len(wanted) > 20 and wanted <= pinned, f"not pinned in constraints.txt: {sorted(wanted - pinned)}"


@pytest.mark.slow
def test_the_minimal_backend_is_minimal_and_passes_where_no_evidence_is_asked_for(tmp_path: Path) -> None:
    source = (ROOT / "examples" / "minimal_backend.py").read_text(encoding="utf-8")
    assert source.count("\n") <= 35, "the contract asks a vendor for at most 30 lines, docstring aside"
    backend = "--backend=examples.minimal_backend:MinimalBackend"
    words = ("-m", "pytest", "conformance", backend, f"--report-dir={tmp_path}", "-q", "--without-execution-evidence")
    done = run(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "report.html").is_file()


def test_a_deviation_names_tests_that_there_are() -> None:
    text = (ROOT / "docs" / "deviations.md").read_text(encoding="utf-8")
    named = re.findall(r"`(?:tests/refimpl/)?(test_\w+\.py)(?:::(test_\w+))?[^`]*`", text)
    assert len(named) >= 40
    for file, function in named:
        path = ROOT / "tests" / "refimpl" / file
        assert path.exists(), f"{file} is not there"
        assert f"def {function}" in path.read_text(encoding="utf-8"), f"{file} has no {function}"


def count_beside_code(tree: ast.Module) -> int:
    """How many lines of a module are docstrings, those of attributes too, or imports."""
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in (*texts, *imports))


@pytest.mark.slow
def test_refimpl_stays_readable_in_an_evening() -> None:
    """Docstrings, which the API reference shows, and imports are not counted: to say more costs nothing.

    The limits are for code that the formatter lays out, which is 2 % longer than what was packed by hand.
    """
    paths = sorted((ROOT / "refimpl").rglob("*.py"))
    texts = {path.relative_to(ROOT / "refimpl").as_posix(): path.read_text(encoding="utf-8") for path in paths}
    lines = {name: len(text.splitlines()) for name, text in texts.items()}
    code = {name: lines[name] - count_beside_code(ast.parse(text)) for name, text in texts.items()}
    rooms: Counter[str] = Counter()
    for name, count in code.items():
        rooms[name.rpartition("/")[0]] += count
    lacking = code["observers/decomposed.py"] + code["releases.py"]  # what releases of torch lack: beside the flow
    measured = rooms.pop("quality")  # what a quantized model loses: beside the flow too
    exported = rooms.pop("exported")  # other flows' doors to the same decisions, and what torchao does there
    legacy = rooms.pop("legacy")  # torch's own classes, for a torch that has them no more
    assert exported <= 1130 and measured <= 570 and lacking <= 330, (rooms, exported, measured, lacking)
    assert legacy <= 880, legacy
    assert sum(rooms.values()) - lacking <= 7190, rooms
    assert max(lines.values()) <= 400, lines
