"""Made-up runs for the tests of the reports: rows as the suite writes them, changed where a test asks."""

from __future__ import annotations

import gc
import itertools
import json
import re
import sys
from collections.abc import Iterable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from fx_quant_conformance.reports.results import Results, read_results
from fx_quant_conformance.reports.verdicts import Outcome
from fx_quant_conformance.reports.writer import ResultsWriter

Row = dict[str, Any]

settings.register_profile("project", deadline=None, derandomize=True)  # machines are noisy, tests are not
settings.load_profile("project")
# Hypothesis draws constants of the project's modules, too: of those that are imported by then, which depends on what
# other tests a process has run.
setattr(providers, "_get_local_constants", lambda: providers._local_constants)  # noqa: B010


# What the children of all tests have imported already, whichever test is the first to make one.
forkserver.set_forkserver_preload(["tests.support.preloaded"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the exhaustive tests; run the longest files first: no worker waits for one at the end."""
    longest = ("site", "types", "removal", "own_models", "float_parts", "gate")
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in longest)
    matches = re.compile("|".join(re.escape(f"tests/{glob}").replace(r"\*", ".*") for glob, _ in list_exhaustive()))
    for item in items:
        if matches.fullmatch(item.nodeid):
            item.add_marker("exhaustive")


def list_exhaustive() -> list[tuple[str, str]]:
    """Return the globs of exhaustive.txt, and what fails for the same fault."""
    lines = (Path(__file__).parent / "exhaustive.txt").read_text(encoding="utf-8").splitlines()
    parts = (line.partition(" | ") for line in lines if line and not line.startswith("#"))
    return [(glob, cheaper) for glob, _, cheaper in parts]


def pytest_collection_finish() -> None:
    """What is imported by now never dies: the garbage collector need not look at it again, which takes 0.2 s a time.

    It also looks less often: graphs are large and die whole. That takes a tenth off the parity tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Workers share the cores: more threads than one wait for each other. Without torch there are none."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


PATTERNS = (
    "nn.Linear",
    "nn.Conv2d",
    "F.conv2d + nn.ReLU",
    "nn.Conv2d + nn.BatchNorm2d + nn.ReLU",
    "torch.add + F.relu",
    "nn.Embedding",
    "nn.LSTM",
    "nn.ConvTranspose1d",
    "torch.cat",
    "nni.qat.ConvBnReLU3d",
    "operator.mul",
)
STAGES = ("config", "fuse", "prepare", "convert", "lower", "numerics", "refusal", "invariance")


class Runs:
    """Builds rows and results files in a directory of the test's own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._names = (f"run{number}.jsonl" for number in itertools.count())

    def header(self, **changes: Any) -> Row:
        row = {
            "kind": "header",
            "schema": 2,
            "suite_version": "0.1.0",
            "suite_commit": "4fd1c0ffee" * 4,
            "backend": "qnnpack",
            "versions": {"qnnpack": "2.13.0"},
            "torch": "2.13.0+cpu",
            "python": "3.11.9",
            "platform": "Linux-6.1-x86_64",
            "cpu": "Some CPU @ 2.60GHz",
            "cpu_flags": ["avx2", "avx512_vnni"],
            "engine": "qnnpack",
            "representation": "QUANTIZED",
            "seed": 7,
            "profile": "quick",
            "options": {"jobs": 4},
            "config_name": "qnnpack_config",
            "config_sha256": "ab" * 32,
            "claims": 1,
            "claims_in_config": 404,
            "pairs": 202,
            "started": "2025-01-02T03:04:05+00:00",
            "sources_sha256": "ef" * 32,
        }
        return row | changes

    def check(self, claim: str = "linear", **changes: Any) -> Row:
        row = {
            "kind": "check",
            "claim": claim,
            "stage": "numerics",
            "rule": "NUM-03",
            "outcome": "pass",
            "verdict": "VERIFIED",
            "message": "",
            "max_lsb": 0.4996,
            "slack_lsb": 0.5,
            "cases": 24,
            "seconds": 0.25,
        }
        return row | changes

    def claim(self, claim: str = "linear", **changes: Any) -> Row:
        row = {
            "kind": "claim",
            "claim": claim,
            "pattern": "nn.Linear",
            "dtype_config": "in=quint8,w=qint8,out=quint8",
            "dtypes": "in=quint8,w=qint8,out=quint8",
            "flow": "ptq",
            "scheme": "per_tensor",
            "verdict": "VERIFIED",
            "waived": False,
            "reason": "",
            "max_lsb": 0.4996,
            "repro": f"pytest conformance --backend=qnnpack --claim='{claim}'",
            "seconds": 1.5,
        }
        return row | changes

    def refuted(self, claim: str = "broken", **changes: Any) -> list[Row]:
        """A failing check with all kinds of evidence, and its claim."""
        message = "NUM-03: 3 of 24 outputs are further than 0.5 LSB from the exact result; the worst by 18 LSB"
        evidence = {
            "where": {"case": "x int8 [4, 64], one row saturating"},
            "expected": [12.4996, -128.0, 7],
            "found": [30, -128, 7],
            "index": [[0, 3], [0, 4], [1, 0]],
            "attribution": "saturation: the accumulator is int16",
            "qparams": {"input": {"scale": 0.0078125, "zero_point": 3}, "weight": {"scale": [0.1] * 64}},
            "graph": "%x : placeholder\n%y : call_module[linear]",
            "float_ops": ["aten::addmm"],
        }
        return [
            self.check(claim, outcome="fail", verdict="REFUTED", message=message, max_lsb=18.0, evidence=evidence),
            self.claim(
                claim,
                verdict="REFUTED",
                reason=message,
                max_lsb=18.0,
                decisions=[{"node": "linear", "rule": "CFG-02", "accepted": True}],
            )
            | changes,
        ]

    def lines(self, rows: Iterable[Row], **changes: Any) -> Path:
        """A finished results file; its totals and ending follow from the rows, unless changed."""
        rows = list(rows)
        claims = [row for row in rows if row["kind"] == "claim"]
        passes = all(
            claim["waived"] or claim.get("accepted") or claim["verdict"] in ("VERIFIED", "TOLERATED")
            for claim in claims
        )
        pairs = len({(claim["pattern"], claim["dtype_config"]) for claim in claims})
        path = self.directory / next(self._names)
        with ResultsWriter(path) as writer:
            for row in [self.header(**{"claims": len(claims), "pairs": pairs} | changes), *rows]:
                writer.write_line(json.dumps(row, sort_keys=True))
            outcome = Outcome.PASS if passes else Outcome.FAIL
            writer.close(outcome=outcome, exit_status=int(not passes), seconds=75.5)
        return path

    def results(self, rows: Iterable[Row], **changes: Any) -> Results:
        return read_results(self.lines(rows, **changes))

    def large(self, claims: int = 404) -> list[Row]:
        """Rows as of a whole config: about 30 failures, half of the claims unexercised."""
        return [row for number in range(claims) for row in self._numbered(number)]

    def _numbered(self, number: int) -> list[Row]:
        pattern = PATTERNS[number // 4 % len(PATTERNS)] + (f".{number // 200}" if number >= 200 else "")
        dtype = f"in=qint8[s>=2^-{number % 19}],w=qint8[-127..127,s>=2^-12],b=float32,out=qint8[s>=2^-12]"
        place = {"pattern": pattern, "dtype_config": dtype, "flow": ("ptq", "qat")[number % 2]}
        place |= {"scheme": ("per_tensor", "per_channel")[number // 2 % 2]}
        name = f"{pattern}|{dtype}|{place['flow']}|{place['scheme']}|{number}"
        passed = [self.check(name, stage=stage, rule=f"{stage[:3].upper()}-01") for stage in STAGES]
        if number % 2:
            reason = f"no builder for {pattern.split('.')[-1]}" if number % 8 == 1 else "the engine declines QAT here"
            return [self.claim(name, verdict="UNEXERCISED", reason=reason, max_lsb=None, repro="", **place)]
        if number % 14 == 0:
            verdict = ("REFUTED", "FALLBACK", "CRASHED", "TIMEOUT", "REFUTED")[number // 14 % 5]
            check, claim = self.refuted(name, **place)
            return [*passed[:5], check | {"verdict": verdict}, claim | {"verdict": verdict}]
        if number % 50 == 2:
            return [
                *passed[:5],
                *self.refuted(name, **place, waived=True, reason="known: issue 12, until 2026"),
            ]
        other = {"verdict": "TOLERATED"} if number % 16 == 0 else {}
        return [*passed, self.claim(name, **place | other)]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)
