"""Drawn graphs: valid, the same for a seed, none refuted where nothing is wrong; faults are found, shrunk, and shown
by scripts that need torch and the backend alone."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fx_quant_conformance.backends.base import Backend, Capabilities
from fx_quant_conformance.backends.reference import ReferenceBackend
from fx_quant_conformance.backends.torch_engines.qnnpack import QnnpackBackend
from fx_quant_conformance.conformance.claims.build import build_model
from fx_quant_conformance.conformance.claims.case import Case, ValueRange
from fx_quant_conformance.conformance.claims.claim import enumerate_claims
from fx_quant_conformance.conformance.claims.inputs import draw_calibration_inputs, draw_static_inputs
from fx_quant_conformance.conformance.fuzz import search as fuzz
from fx_quant_conformance.conformance.fuzz.graph import (
    Drawing,
    DrawnCall,
    DrawnGraph,
    patterns_of,
    waived_patterns,
)
from fx_quant_conformance.conformance.ops.op_model import Input, OneInput, Step
from fx_quant_conformance.conformance.oracle.grids import placeholder_grids
from fx_quant_conformance.conformance.pipeline.job import Job
from fx_quant_conformance.conformance.reproducers.script import Failure, script_of
from fx_quant_conformance.conformance.reproducers.standalone import fails_standalone
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.whole_models.jobs import unit_of
from fx_quant_conformance.conformance.whole_models.judging import judge_run
from fx_quant_conformance.conformance.whole_models.setups import ModelSetup
from fx_quant_conformance.conformance.whole_models.units import quantize_model
from fx_quant_conformance.reports.codec import decode
from fx_quant_conformance.reports.schema import ModelResult
from tests.conformance.support.suite_runs import FAKES, REPO, run
from tests.support.remote import remote_backend
from tests.support.warm_python import run_python

PTQ = ModelSetup(flow="ptq", activation=torch.quint8, scheme="per_tensor_symmetric")
QAT = ModelSetup(flow="qat", activation=torch.quint8, scheme="per_channel_symmetric")
GRAPHS = 40
MOST_LINES = 60


@pytest.fixture(autouse=True)
def _fakes_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FAKES))
    monkeypatch.setattr(fuzz, "MOST_RUNS", 30)


def bench_of(backend: Backend, spec: str = "reference", graphs: int = GRAPHS, seed: int = 0) -> Bench:
    return Bench(backend, seed=seed, profile="stress", max_examples=graphs, spec=spec)


CAPABILITIES = ReferenceBackend().capabilities()


def drawn(setup: ModelSetup, numbers: range, capabilities: Capabilities = CAPABILITIES) -> Iterator[DrawnGraph]:
    patterns = patterns_of(enumerate_claims(bench_of(ReferenceBackend()).config, capabilities), setup)
    for number in numbers:
        choose: Any = random.Random(number).choice
        drawing = Drawing(choose=choose, patterns=patterns, capabilities=capabilities, is_trained=setup.flow == "qat")
        yield drawing.draw()


@cache
def reference_jobs() -> dict[str, Job]:
    bench = bench_of(ReferenceBackend())
    return {job.id: job for job in fuzz.jobs(bench.config, bench.capabilities, "stress")}


def result_of(bench: Bench, setup: ModelSetup = PTQ, number: int = 0) -> ModelResult:
    jobs = {job.id: job for job in fuzz.jobs(bench.config, bench.capabilities, "stress")}
    [result] = jobs[f"model/fuzz/{number}/{setup}"].run(bench)
    assert isinstance(result, ModelResult)
    return result


def evidence_of(result: ModelResult) -> dict[str, Any]:
    """The evidence with the keys of the job's own."""
    return dict(result.evidence)


# -- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("setup", [PTQ, QAT], ids=str)
def test_what_is_drawn_runs_as_a_float_model_and_survives_pickling(setup: ModelSetup) -> None:
    patterns, lengths = set(), []
    for graph in drawn(setup, range(250)):
        assert pickle.loads(pickle.dumps(graph)) == graph
        patterns |= {call.pattern for call in graph.calls}
        lengths.append(len(graph.calls))
        if graph.calls:
            torch.manual_seed(graph.seed)
            outputs = build_model(graph.to_case())(*draw_calibration_inputs(graph.to_case())[0])
            found = outputs if isinstance(outputs, tuple) else (outputs,)
            assert all(bool(torch.isfinite(each).all()) for each in found), str(graph)
            shapes = {call.name: call.shape for call in graph.calls}
            assert [tuple(each.shape) for each in found] == [shapes[name] for name in graph.outputs]
    assert len(patterns) > 100 and max(lengths) == 7


@pytest.mark.slow
def test_values_are_read_twice_and_there_are_several_inputs_and_outputs() -> None:
    graphs = list(drawn(PTQ, range(100)))
    reads = [[name for call in graph.calls for name in call.inputs] for graph in graphs]
    assert sum(len(names) > len(set(names)) for names in reads) > 20
    assert sum(len(graph.shapes) > 1 for graph in graphs) > 5
    assert sum(len(graph.outputs) > 1 for graph in graphs) > 20


@pytest.mark.slow
def test_what_is_drawn_is_within_the_limits_of_groups_and_channels() -> None:
    """Before, only arguments that the tables vary by name were held to their limits."""
    name = "nn.Conv2d"

    def layers_of(capabilities: Capabilities) -> list[Any]:
        graphs = drawn(PTQ, range(400), capabilities)
        return [call.arguments["shape"] for graph in graphs for call in graph.calls if call.ops[0] == name]

    free = layers_of(Capabilities())
    bound = layers_of(Capabilities(limits={name: {"groups": (1,), "out_channels": lambda count: count > 1}}))
    assert any(layer.groups > 1 for layer in free) and any(layer.c_out == 1 for layer in free)
    assert bound and all(layer.groups == 1 and layer.c_out > 1 for layer in bound)


# -- nothing wrong, nothing found -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize(("setup", "seed"), [(PTQ, 0), (QAT, 0)], ids=str)
def test_the_reference_backend_holds(setup: ModelSetup, seed: int) -> None:
    result = result_of(bench_of(ReferenceBackend(), graphs=70, seed=seed), setup, number=seed)
    found = (result.verdict, result.reason.partition(":")[0], evidence_of(result)["otherwise"])
    assert found == ("UNSHOWN", "execution not shown", "VERIFIED"), result.evidence.get("graph", result)
    assert result.cases is not None and result.cases > 40
    assert evidence_of(result)["unexercised"] < result.cases / 10


def drawn_call(name: str, op: str, *inputs: str, **values: Any) -> DrawnCall:
    """A call of a pattern of one op."""
    return DrawnCall(name=name, pattern=op, ops=(op,), inputs=inputs, **values)


@pytest.mark.slow
@pytest.mark.rule("NUM-04")
def test_a_softmax_of_billions_has_a_bound_that_is_not_negative() -> None:
    """What the first graphs showed: a bound of the first order, of exponents that are off by more than 1."""
    shape = (1, 2, 3, 4, 5)
    product = {"other": "tensor", "_number_first": False, "shape": (shape, shape)}
    calls = (
        drawn_call("v0", "operator.mul", "x", "y", shape=shape, arguments=product),
        drawn_call("v1", "operator.mul", "v0", "x", shape=shape, arguments=product),
        drawn_call("v2", "nn.Softmax", "v1", shape=shape, arguments={"dim": 1, "shape": shape}),
    )
    graph = DrawnGraph(shapes=(shape, shape), value_range="wide", seed=0, calls=calls, outputs=("v2",))
    bench = bench_of(ReferenceBackend())
    claims = enumerate_claims(bench.config, bench.capabilities)
    check = fuzz.Search(bench, "model/fuzz", claims, PTQ)._judge(graph).check
    assert check.evidence.get("otherwise") == "VERIFIED" and float(check.slack_lsb or 0.0) >= 0.0, check


@pytest.mark.slow
def test_a_seed_draws_the_same_graphs_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[str]] = []
    for seed in (5, 5, 6):
        texts: list[str] = []
        monkeypatch.setattr(fuzz.Search, "_fails", lambda self, graph, texts=texts: texts.append(graph.to_json()))
        bench = bench_of(ReferenceBackend(), graphs=20, seed=seed)
        search = fuzz.Search(bench, "model/fuzz", (), PTQ)
        patterns = patterns_of(enumerate_claims(bench.config, bench.capabilities), PTQ)
        drawing: Any = lambda choose: Drawing(choose=choose, patterns=patterns, capabilities=bench.capabilities)  # noqa: B023, E731
        assert search.find_smallest(drawing, random.Random(seed)) is None
        found.append(texts)
    assert found[0] == found[1] != found[2] and len(found[0]) >= 20


@pytest.mark.slow
def test_only_stress_has_such_jobs() -> None:
    bench = bench_of(ReferenceBackend())
    assert not fuzz.jobs(bench.config, bench.capabilities, "full")
    assert len(reference_jobs()) == 64


# -- faults -----------------------------------------------------------------------------------------------------------

FAULTS = [
    ("Aborts", "CRASHED", "", 2),
    ("Repeats", "REFUTED", "AssertionError", 1),
]


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize(("name", "verdict", "said", "most"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_fault_is_found_and_shrunk_and_its_script_fails_alone(
    tmp_path: Path, name: str, verdict: str, said: str, most: int
) -> None:
    spec = f"faulty_graphs:{name}"
    with remote_backend(spec) as backend:
        result = result_of(bench_of(backend, spec, graphs=300))
    evidence = evidence_of(result)
    assert result.verdict == verdict and evidence["script_fails_alone"] is True, result
    assert sum(" = " in line and "input of" not in line for line in evidence["graph"].splitlines()) <= most, evidence
    script = result.script
    assert len(script.splitlines()) <= MOST_LINES and max(map(len, script.splitlines())) <= 120, script
    assert "fx_quant_conformance.conformance" not in script and "refimpl" not in script
    broken, fixed = alone(tmp_path, script), alone(tmp_path, script, FAKE_FIXED="1")
    assert broken.returncode != 0 and said in broken.stderr, broken.stderr
    assert fixed.returncode == 0, fixed.stderr


def alone(folder: Path, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder with nothing else."""
    path = folder / "script.py"
    path.write_text(script)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPO), str(FAKES)])} | variables
    return run_python(str(path), cwd=folder, environment=environment, timeout=120)


@pytest.mark.slow
def test_a_script_that_is_broken_itself_does_not_fail_alone() -> None:
    door = "from fx_quant_conformance.backends.discovery import find_backend\n"
    door += "backend = find_backend('faulty_graphs:Honest')\n"
    assert not fails_standalone(door + "undefined\n"), "not the backend's fault"
    assert fails_standalone(door + "assert backend.name == 'reference'\n")


def _convolution() -> Step:
    return Step(op=torch.conv2d, parameters=(torch.nn.Parameter(torch.randn(3, 2, 3, 3)), None))


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
def test_a_kernel_of_qnnpack_that_is_missing_shows_in_a_script(tmp_path: Path) -> None:
    """It has none for qint8, of a function with a weight."""
    bench = bench_of(QnnpackBackend(), "qnnpack")
    case = Case(
        name="wrong",
        build=lambda: OneInput([_convolution()]),
        inputs=(Input(shape=(1, 2, 7, 6)),),
        value_range=ValueRange(name="signed", ranges=((-1.0, 1.0),)),
    )
    torch.manual_seed(0)
    claims = enumerate_claims(bench.config, bench.capabilities)
    setup = replace(PTQ, activation=torch.qint8)
    reference = quantize_model(bench, unit_of("wrong", build_model(case), case, claims, setup)).reference
    batches = [batch for _, batch in draw_static_inputs(case, placeholder_grids(reference), directed=3, random=0)]
    failures = [
        Failure(model=reference, batch=batch, check=check)
        for batch in batches
        if (check := judge_run(bench, "wrong", reference, [batch])).verdict == "REFUTED"
    ]
    script = script_of(failures[0], bench, name="finding 1", message=failures[0].check.message)
    assert fails_standalone(script)
    assert "RuntimeError: quantized::conv" in alone(tmp_path, script).stderr


@pytest.mark.slow
def test_patterns_that_waivers_cover_are_not_drawn() -> None:
    bench = bench_of(QnnpackBackend(), "qnnpack", graphs=10)
    claims = enumerate_claims(bench.config, bench.capabilities)
    pools = {claim.id for claim in claims if claim.pattern in ("nn.MaxPool2d", "nn.Conv2d")}
    ours = {each for each in pools if "quint8" in each}
    assert waived_patterns(claims, PTQ, ours) == {"nn.MaxPool2d", "nn.Conv2d"}
    assert not waived_patterns(claims, PTQ, pools - ours)
    assert waived_patterns(claims, PTQ, [each for each in ours if "per_channel" in each]) == frozenset()
    every = [claim.id for claim in claims if claim.pattern != "torch.cat"]
    waived = Bench(QnnpackBackend(), seed=0, profile="stress", max_examples=10, waived=every)
    result = result_of(waived)
    not_drawn = evidence_of(result)["not_drawn_for_they_are_waived"]
    assert "torch.cat" not in not_drawn
    assert "nn.ReLU" in not_drawn and result.verdict == "VERIFIED"


@pytest.mark.slow
def test_a_run_leaves_the_script_in_the_report_folder(tmp_path: Path) -> None:
    name = f"model/fuzz/0/{PTQ}"
    ran = run(
        tmp_path, "faulty_graphs:WrongCatOfQuantized", "--profile=stress", "--max-examples=300", f"--claim={name}"
    )
    [row] = [row for row in ran.rows if row["kind"] == "model"]
    model = decode(row)
    assert isinstance(model, ModelResult) and ran.status == 1 and model.verdict == "REFUTED"
    script = ran.folder / model.script_path
    assert script.read_text() == row["script"]
    command = f"--backend=faulty_graphs:WrongCatOfQuantized --seed=0 --profile=stress --max-examples=300 --claim {name}"
    assert command in " ".join(script.read_text().split())
    assert model.script_path in (ran.folder / "report.html").read_text()
    assert row["evidence"]["script_fails_alone"] is True
