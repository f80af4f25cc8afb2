"""Made-up rows of models, measurements and waivers, changed where a test asks, and runs that end as they say."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fx_quant_conformance.reports.html import render_html
from fx_quant_conformance.reports.results import Results, read_results
from fx_quant_conformance.reports.verdicts import PASSING, Outcome
from fx_quant_conformance.reports.writer import ResultsWriter
from tests.conftest import Runs
from tests.reports.pages import Page

Row = dict[str, Any]


class Made:
    """Rows beside those of claims, and files that hold them."""

    waiver: ClassVar[Row] = {
        "reason": "issue 12: saturates",
        "url": "https://example.org/12",
        "expires": "2027-01-31",
        "max_lsb": 18.0,
    }

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0

    def model(self, name: str = "model/resnet/ptq", **changes: Any) -> Row:
        row = {
            "kind": "model",
            "model": name,
            "verdict": "VERIFIED",
            "waived": False,
            "reason": "",
            "max_lsb": 0.5,
            "cases": 3,
            "seconds": 0.75,
        }
        return row | changes

    def measurement(self, subject: str = "linear", topic: str = "fingerprint", **values: Any) -> Row:
        return {"kind": "measurement", "topic": topic, "subject": subject, "values": values or {"ties": "half_even"}}

    def path(self, rows: Iterable[Row], **footer: Any) -> Path:
        """A finished file of these rows, the header first; it passed if all claims and models pass."""
        rows = list(rows)
        judged = [row for row in rows if row["kind"] in ("claim", "model")]
        passes = all(row["waived"] or row["verdict"] in PASSING for row in judged) and not footer.get("problems")
        self._count += 1
        path = self._directory / f"made{self._count}.jsonl"
        with ResultsWriter(path) as writer:
            for row in rows:
                writer.write_line(json.dumps(row, sort_keys=True))
            outcome = Outcome.PASS if passes else Outcome.FAIL
            writer.close(outcome=outcome, exit_status=int(not passes), **{"seconds": 4.0} | footer)
        return path

    def results(self, rows: Iterable[Row], **footer: Any) -> Results:
        return read_results(self.path(rows, **footer))

    def everything(self) -> list[Row]:
        """The rows of a small run that has all there is to show."""
        header: Row = {
            "kind": "header",
            "schema": 2,
            "suite_version": "0.1.0",
            "suite_commit": "4fd1c0ffee" * 4,
            "backend": "npu",
            "versions": {"npu_compiler": "1.2"},
            "torch": "2.13.0+cpu",
            "python": "3.11.9",
            "platform": "Linux-6.1-x86_64",
            "cpu": "Some CPU @ 2.60GHz",
            "cpu_flags": ["avx2", "avx512_vnni"],
            "engine": "",
            "representation": "DECOMPOSED",
            "seed": 7,
            "profile": "full",
            "options": {"backend": "npu"},
            "config_name": "npu config",
            "config_sha256": "ab" * 32,
            "claims": 8,
            "claims_in_config": 9,
            "pairs": 9,
            "started": "2026-11-01T03:04:05+00:00",
            "isa": "avx2",
            "waivers": {"file": "npu.toml", "sha256": "cd" * 32},
            "findings": {"errata.md#12": "12. Sums saturate\n\nTwo products\nat most.\n\n- one\n- two\n\n<b>None</b>."},
            "limits": {"nn.Linear": {"bias": "True"}},
            "detection": {"rounding": {"faults": 7, "quick": 6, "full": 7}, "scale": {"faults": 9, "quick": 8}},
        }
        return [header, *self._judged(), *self._beside()]

    def _judged(self) -> list[Row]:
        qparams = {
            "input 0": {"scale": 0.5, "zero_point": 3},
            "output": {"scale": 0.25, "zero_point": 0, "dtype": "quint8"},
        }
        wrong: Row = {
            "where": {"case": "default unsigned, saturating"},
            "expected": [12.4996, 255],
            "found": [30, 254],
            "index": [[0, 3], [1, 0]],
            "qparams": qparams,
            "attribution": "2 wrong",
            "worst": "wrong: at [0, 3] found 30, exact 12.4996",
            "traceback": "Traceback (most recent call last):\n  npu.run()",
            "others": ["a second case"],
            "shared": ["groups > 1", "in_channels = 16"],
        }
        decisions = [{"node": "op0", "pattern": "nn.Linear", "dtype config": "in=quint8", "reason": ""}]
        graphs = {"float model": "x = input\nreturn x", "reference model": "x = input\ny = q(x)\nreturn y"}
        covered = self.waiver | {"max_lsb": None, "findings": ["errata.md#12", "errata.md#13"]}
        rows: list[Row] = []
        rows += self._claim("nn.Conv2d", "CRASHED", "LOW-01", "killed by SIGSEGV", stage="lower", outcome="error")
        rows += self._claim(
            "nn.Linear",
            "REFUTED",
            "NUM-03",
            "18 LSB off",
            max_lsb=17.5,
            evidence=wrong,
            cases=24,
            failing=3,
            of={
                "decisions": decisions,
                "graphs": graphs,
                "script": "import torch\n",
                "op": "nn.Linear(64, 8, bias=False)(x)",
            },
        )
        rows += self._claim(
            "nn.ReLU",
            "FALLBACK",
            "LOW-04",
            "runs in float: relu",
            stage="execution",
            evidence={"float_ops": ["aten::relu"]},
            of={"waived": True, "waiver": covered},
        )
        rows += self._claim(
            "torch.cat",
            "REFUTED",
            "NUM-05",
            "moves and changes",
            max_lsb=18.0,
            of={"waived": True, "waiver": self.waiver | {"findings": ["errata.md#12"]}},
        )
        rows += self._claim("nn.LSTM", "UNEXERCISED", "CFG-09", "no builder for LSTM", stage="config", outcome="skip")
        rows += self._claim(
            "nn.Hardswish",
            "TOLERATED",
            "NUM-03",
            "0.6 LSB",
            max_lsb=0.6,
            outcome="pass",
            statistics={"distances": [5, 4, 3, 2, 1, 0, 0, 6, 0, 0, 0, 0, 0], "sqnr_db": 41.5},
        )
        rows += self._claim(
            "nn.Conv1d",
            "VERIFIED",
            "NUM-03",
            "",
            max_lsb=0.5,
            outcome="pass",
            seconds=9.5,
            cases=30,
            statistics={"distances": [10, 20, 30, 40, 50, 0, 0, 0, 0, 0, 0, 0, 0], "sqnr_db": 48.25},
            of={"lowerings": 8, "runs": 1500},
        )
        rows += self._claim(
            "torch.reshape",
            "VERIFIED",
            "NUM-05",
            "",
            max_lsb=0.0,
            outcome="pass",
            cases=5,
            statistics={"distances": [60, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], "sqnr_db": "inf"},
        )
        return rows

    def _claim(self, pattern: str, verdict: str, rule: str, message: str, **more: Any) -> list[Row]:
        """A check at a stage that passed, the one that decides, and the claim."""
        dtypes = "static:in=quint8,w=qint8,out=quint8" if pattern.startswith("nn.") else "static:in=quint8,out=quint8"
        name = f"{pattern}/{dtypes}/ptq/per_tensor"
        check: Row = {
            "kind": "check",
            "claim": name,
            "stage": "numerics",
            "rule": rule,
            "outcome": "fail",
            "verdict": verdict,
            "message": message,
            "max_lsb": None,
            "slack_lsb": None,
            "cases": 1,
            "seconds": 0.25,
        }
        of, first = more.pop("of", {}), {"stage": "fuse", "rule": "FUS-03", "outcome": "pass", "verdict": "VERIFIED"}
        claim: Row = {
            "kind": "claim",
            "claim": name,
            "pattern": pattern,
            "dtype_config": dtypes,
            "dtypes": dtypes,
            "flow": "ptq",
            "scheme": "per_tensor",
            "verdict": verdict,
            "waived": False,
            "reason": message,
            "max_lsb": more.get("max_lsb"),
            "repro": f"pytest conformance --backend=npu --claim '{name}'",
            "seconds": more.get("seconds", 1.5),
        }
        return [check | first | {"message": ""}, check | more, claim | of]

    def _beside(self) -> list[Row]:
        off = {"where": {"case": "batch 0"}, "node": "up1", "expected": [1.5], "found": [9]}
        return [
            self.model(float_db=[38.5, 41.25]),
            self.model("model/unet/ptq", verdict="REFUTED", reason="3 LSB, not 0.6", max_lsb=3.0, evidence=off),
            self.measurement("model/unet/ptq", "accuracy", float=0.97, backend=0.96),
            self.measurement("linear, quint8", ties="half_even", bias="int32")
            | {"claims": ["nn.Linear/static:in=quint8,w=qint8,out=quint8/ptq/per_tensor"]},
        ]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="session", params=["everything", "large"])
def path(request: pytest.FixtureRequest, made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a small run that has all there is to show, and of one of many claims."""
    if request.param == "everything":
        return made.path(made.everything())
    runs = Runs(tmp_path_factory.mktemp("large"))
    return runs.lines(runs.large(120))


@pytest.fixture(scope="session")
def rows(path: Path) -> list[Row]:
    """Its lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="session")
def page(path: Path) -> Page:
    """Its page."""
    return Page(render_html(read_results(path)))
