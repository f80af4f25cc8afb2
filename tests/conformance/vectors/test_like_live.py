"""An engine that runs a bundle from its files alone, in another process, gets the verdicts of its live run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fx_quant_conformance.conformance.machine.isa import LEVELS
from fx_quant_conformance.conformance.run.elsewhere import adopt_bundle
from fx_quant_conformance.conformance.run.export import export
from fx_quant_conformance.conformance.run.judging import open_workplaces
from fx_quant_conformance.conformance.run.session import open_session
from fx_quant_conformance.conformance.vectors.bundle import read_bundle
from fx_quant_conformance.conformance.vectors.files import digest_folder
from fx_quant_conformance.reports.decision import list_untried
from fx_quant_conformance.reports.handed_in import BUNDLE, HANDED_IN
from fx_quant_conformance.reports.merge import merge
from fx_quant_conformance.reports.results import read_results
from fx_quant_conformance.reports.shard import Shard
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.vectors.bundles import ADD, judge_all, judge_bundle, make_options
from tests.conformance.vectors.conftest import Made
from tests.conftest import Runs
from tests.support.warm_python import run_python

CLAIMS = (ADD, ADD.replace("add", "mul"))
SAMPLE = (
    "nn.Linear/static:in=quint8,w=qint8,b=float32,out=quint8/ptq/per_tensor_symmetric",
    "nn.Linear/dynamic:in=quint8,w=qint8,b=float32,out=float32/ptq/per_tensor_symmetric",
    "nn.Conv2d+nn.ReLU/static:in=quint8,w=qint8,b=float32,out=quint8/ptq/per_tensor_symmetric",
    "torch.add/static:in=quint8,w=*,b=*,out=quint8/ptq/no_weight",
    "nn.Embedding/static:in=float32,w=quint4x2,b=*,out=float32/ptq/per_channel_affine_float_qparams",
    "nn.PReLU/static:in=quint8,w=*,b=*,out=quint8/ptq/no_weight",
    "nn.LSTM/dynamic:in=quint8,w=qint8,b=float32,out=float32/ptq/per_tensor_symmetric",
    "model/branches/ptq/quint8/per_channel_symmetric",
)


@pytest.mark.slow
def test_qnnpack_from_files_is_qnnpack(tmp_path: Path) -> None:
    options = make_options("qnnpack", claims=SAMPLE)
    run = open_session(options)
    live = judge_all(run, open_workplaces(run))
    export(options, tmp_path / "bundle", ("json", "fx"), None)
    (tmp_path / "bundle" / "judge").rename(tmp_path / "judge")  # the runner has the device's folder alone
    device, outputs = tmp_path / "bundle" / "device", tmp_path / "outputs"
    words = ("-m", "fx_quant_conformance", "run", str(device), str(outputs), "--backend=qnnpack")
    done = run_python(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "judge").rename(tmp_path / "bundle" / "judge")
    judged = judge_bundle(tmp_path / "bundle", outputs)
    assert {each.verdict for each in live.values()} >= {Verdict.VERIFIED, Verdict.REFUTED, Verdict.FALLBACK}
    assert {name: each.verdict for name, each in judged.items()} == {name: each.verdict for name, each in live.items()}
    same = [name for name in live if live[name].reason == judged[name].reason]
    assert len(same) >= len(live) - 1, "reasons differ only where a backend's error names its own process"


@pytest.mark.slow
def test_the_reports_say_that_outputs_were_handed_in(made: Made, tmp_path: Path) -> None:
    words = ["judge", str(made.bundle), str(made.outputs), "-q", f"--report-dir={tmp_path}", "-pno:cacheprovider"]
    done = run_python("-m", "fx_quant_conformance", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = read_results(tmp_path / "results.jsonl")
    digest, files = digest_folder(made.outputs)
    assert results.header.versions["outputs handed in"] == f"{files} files, sha256 {digest}"
    assert results.header.versions["vector bundle"] == f"sha256 {read_bundle(made.bundle).digest}"
    assert results.header.isa not in LEVELS, "no level of this machine's: the device has its own"
    (line,) = (line for line in list_untried(results) if "handed in" in line)
    assert digest in line and line in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert {row.verdict for row in results.claims} == {Verdict.VERIFIED}


@pytest.mark.slow
def test_a_bundle_of_a_shard_is_judged_as_that_shard(tmp_path: Path) -> None:
    options = replace(make_options("reference", claims=CLAIMS), shard=Shard(place=1, of=2))
    export(options, tmp_path, ("json",), None)
    bundle = read_bundle(tmp_path)
    adopted = adopt_bundle(make_options(f"vectors:{tmp_path}"))
    assert adopted.shard == options.shard and {*bundle.cases.values()} < {*CLAIMS}


def test_the_results_of_several_boards_are_joined(runs: Runs, tmp_path: Path) -> None:
    """Each shard is of a bundle and of outputs of its own."""
    files = list[Path]()
    for place in (1, 2):
        versions = {BUNDLE: f"sha256 a{place}", HANDED_IN: f"1 files, sha256 b{place}"}
        about = {"versions": versions, "shard": {"place": place, "of": 2}, "options": {"claim": ["claim*"]}}
        files.append(runs.lines([runs.check(f"claim {place}"), runs.claim(f"claim {place}")], **about))
    merged = merge(files, tmp_path / "merged.jsonl")
    assert merged.header.versions == {
        BUNDLE: "sha256 a1; sha256 a2",
        HANDED_IN: "1 files, sha256 b1; 1 files, sha256 b2",
    }
