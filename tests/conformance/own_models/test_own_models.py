"""Models of a user's own: found, judged on the backend, measured against float, and shown in the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fx_quant_conformance.conformance.own_models.given import ModelSpecError, check_spec, load_given
from fx_quant_conformance.reports.measured import Deployment
from fx_quant_conformance.reports.schema import ModelResult
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.suite_runs import Ran, run
from tests.support.comparable import comparable

pytestmark = pytest.mark.slow

PACKAGE = Path(__file__).resolve().parent / "package"
QUINT8 = "--claim=model/own/*/quint8/*"
SETUP = "ptq/quint8/per_channel_symmetric"
POINTS = "[fx_quant_conformance.models]\nrows_of_mine = nets:rows\n"


def run_own(folder: Path, backend: str, *specs: str, selection: str = QUINT8) -> Ran:
    """Run models of the package on a backend of the package."""
    return run(folder, backend, *(f"--model={spec}" for spec in specs), selection, cwd=PACKAGE)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run of two models, one of which is named twice."""
    return run_own(tmp_path_factory.mktemp("good"), "device:Device", "nets:small", "nets:rows", "nets:small")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run_own(tmp_path_factory.mktemp("faulty"), "device:Faulty", "nets:small", "nets:rows")


HOLD = (
    "spoils",
    "rows",
    "unknown",
    "partly",
    "narrow",
    "table",
    "shifting",
    "generated",
    "evaluation_fails",
    "evaluation_of_no_mapping",
    "normed",
    "partly_normed",
    "by_name",
    "list_of_one",
    "casts",
)
WRONG = {
    "nets:branching": "at nets.py:",
    "nets:misfit": "the float model does not run on the inputs that come with it: RuntimeError: ",
    "nets:infinite": "the model's first.weight is not finite",
    "nets:double": "the model's first.weight is torch.float64; the flow quantizes float32",
    "nets:watched": "the model cannot be sent to the backend's process, which finds classes and functions by name: ",
    "nets:locked": "the model cannot be copied: TypeError: cannot pickle '_thread.lock' object",
    "nets:sparse": "an input is a tensor of layout torch.sparse_coo and dtype torch.float32, not a plain one",
    "nets:raises": "--model=nets:raises: the function raised RuntimeError: no weights here",
}
"""What is wrong with a model, and what is said of it."""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """One run of all models that a test asks about alone."""
    specs = [*(f"nets:{name}" for name in HOLD), *WRONG]
    return run_own(tmp_path_factory.mktemp("many"), "device:Device", *specs)


def find_model(ran: Ran, spec: str) -> ModelResult:
    [row] = [row for row in ran.results.models if row.model.startswith(f"model/own/{spec}/")]
    return row


def measured(ran: Ran, spec: str) -> Deployment:
    deployment = find_model(ran, spec).deployment
    assert deployment is not None
    return deployment


def test_two_models_of_a_package_are_certified(good: Ran) -> None:
    assert good.status == 0, good.said
    assert [row.model for row in good.results.models] == [f"model/own/nets:{n}/{SETUP}" for n in ("rows", "small")]
    assert {row.verdict for row in good.results.models} == {Verdict.VERIFIED}
    assert good.results.header.options["model"] == ["nets:small", "nets:rows", "nets:small"]
    assert all(row.reason == "" or "patterns hold" in row.reason for row in good.results.models)
    assert all({"decided", "decided_alone"} <= row.evidence.keys() for row in good.results.models)


def test_what_cannot_be_judged_end_to_end_does_not_pass_by_its_patterns(many: Ran) -> None:
    row = find_model(many, "nets:unknown")
    assert many.status == 1 and row.verdict is Verdict.UNEXERCISED
    assert row.reason.startswith("end to end 0.0% of the outputs are decided, which says nothing; alone, ")
    assert "all 2 patterns hold, but of what is float at special_bessel_j0" in row.reason
    assert len(measured(many, "nets:unknown").quantized) == 2


def test_a_fault_of_the_kernel_of_one_layer_is_named(faulty: Ran) -> None:
    assert faulty.status == 1
    small, rows = find_model(faulty, "nets:small"), find_model(faulty, "nets:rows")
    assert (small.verdict, rows.verdict) == (Verdict.REFUTED, Verdict.VERIFIED)
    assert "the first to differ is down (nn.Conv2d)" in small.reason
    verdicts = {part.node: part.verdict for part in measured(faulty, "nets:small").quantized}
    assert verdicts.pop("down") is Verdict.REFUTED and set(verdicts.values()) == {Verdict.VERIFIED}


def test_what_is_quantized_and_why_the_rest_is_not(good: Ran) -> None:
    deployment = measured(good, "nets:small")
    parts = {part.node: part for part in deployment.parts}
    assert list(parts)[:3] == ["stem", "down", "bend"] and list(parts)[-1] == "classify"
    assert parts["stem"].pattern == "nni.ConvReLU2d" and parts["stem"].dtypes == "in=quint8, w=qint8, out=quint8"
    assert (parts["bend"].dtypes, parts["bend"].reason) == ("", "no pattern of the config")
    # by hand, for two images of 9 × 9: 3·8·3² at each place, 8·8·3² at each of 4 × 4, 8·4 for the row
    assert parts["stem"].multiplications == 2 * 81 * 216
    assert parts["down"].multiplications == 2 * 16 * 576
    assert parts["classify"].multiplications == 2 * 32
    assert deployment.multiplications == sum(part.multiplications for part in deployment.quantized)


def test_the_difference_of_a_metric_is_divided_between_quantization_and_backend(good: Ran, faulty: Ran) -> None:
    metrics = {metric.name: metric for metric in measured(good, "nets:small").metrics}
    assert metrics["top-1"].floating == 1
    total = metrics["sum"]
    values = (total.floating, total.reference, total.backend)
    assert all(isinstance(value, float) for value in values) and total.floating != total.reference
    wrong = {metric.name: metric for metric in measured(faulty, "nets:small").metrics}["sum"]
    assert (wrong.floating, wrong.reference) == (total.floating, total.reference)
    assert wrong.backend != total.backend


def test_the_error_of_each_pattern_is_told(good: Ran) -> None:
    parts = measured(good, "nets:small").quantized
    ratios = [part.alone_db for part in parts if isinstance(part.alone_db, float)]
    assert len(ratios) >= 3 and all(20 < ratio < 80 for ratio in ratios)  # 8 bits: about 50 dB, less by the range
    assert set(measured(good, "nets:small").seconds) == {"float", "reference", "backend"}


def test_a_resumed_run_takes_what_was_measured_of_a_model(good: Ran, tmp_path: Path) -> None:
    specs = [f"--model={spec}" for spec in ("nets:small", "nets:rows", "nets:small")]
    ran = run(tmp_path, "device:Device", *specs, f"--resume={good.folder / 'results.jsonl'}", QUINT8, cwd=PACKAGE)
    assert ran.status == 0 and ran.results.models == good.results.models


def test_a_mapping_of_its_own_decides(many: Ran) -> None:
    deployment = measured(many, "nets:partly")
    assert find_model(many, "nets:partly").verdict is Verdict.VERIFIED
    assert deployment.qconfigs == "the model's own QConfigMapping"
    assert {part.node: part.dtypes for part in deployment.parts}["first"] == ""


def test_ranges_of_7_bits_are_converted_as_users_convert_them(many: Ran) -> None:
    """The clamp that keeps a claim's narrow range has no kernel: with it all would run in float. (CVT-09)"""
    assert find_model(many, "nets:narrow").verdict is Verdict.VERIFIED
    assert {part.verdict for part in measured(many, "nets:narrow").quantized} == {Verdict.VERIFIED}


def test_a_pattern_of_constants_is_judged_too(many: Ran) -> None:
    row = find_model(many, "nets:table")
    assert row.verdict is Verdict.VERIFIED, row.reason
    assert row.statistics is not None
    verdicts = [(layer.pattern, layer.verdict) for layer in row.statistics.layers]
    assert sorted(verdicts) == [(name, Verdict.VERIFIED) for name in ("nn.Linear", "nn.Linear", "operator.add")]


@pytest.mark.parametrize("name", ["normed", "by_name", "list_of_one"])
def test_computed_weights_and_the_form_of_outputs_reach_the_backend(many: Ran, name: str) -> None:
    row = find_model(many, f"nets:{name}")
    assert row.verdict is Verdict.VERIFIED, row.reason


@pytest.fixture
def _package_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PACKAGE))


@pytest.mark.usefixtures("_package_can_be_imported")
def test_an_entry_point_names_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "nets-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nets\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    check_spec("rows_of_mine")
    assert type(load_given("rows_of_mine", 0).model).__name__ == "Rows"


@pytest.mark.usefixtures("_package_can_be_imported")
@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (
            "nets:number",
            "--model=nets:number: the function returned int; return fx_quant_conformance.GivenModel(",
        ),
        ("nets:bare", "--model=nets:bare: example_inputs has "),
        ("nets:something", "--model=nets:something: it is int, not a function that makes a model"),
        ("nets:absent", "module 'nets' has no attribute 'absent'"),
    ],
)
def test_what_makes_no_model_is_refused(spec: str, told: str) -> None:
    with pytest.raises(ModelSpecError) as caught:
        load_given(spec, 0)
    assert told in str(caught.value)


@pytest.mark.parametrize("spec", WRONG)
def test_what_is_wrong_with_a_model_is_said_and_no_fault_of_the_backend(many: Ran, spec: str) -> None:
    assert many.status == 1 and "Traceback" not in many.out
    row = find_model(many, spec)
    assert row.verdict is Verdict.UNEXERCISED and WRONG[spec] in row.reason, row.reason
    assert (many.folder / "report.html").exists()


def test_an_evaluation_that_fails_is_noted(many: Ran) -> None:
    failing, other = (find_model(many, f"nets:evaluation_{name}") for name in ("fails", "of_no_mapping"))
    assert {failing.verdict, other.verdict} == {Verdict.VERIFIED}
    notes = measured(many, "nets:evaluation_fails").notes
    sides = ("float", "reference", "backend")
    assert notes == [
        f"the evaluation of the {side} model was not done: it raised LookupError: no labels" for side in sides
    ]
    [note, *_] = measured(many, "nets:evaluation_of_no_mapping").notes
    assert "it returned int, not a mapping of names to numbers" in note


def test_inputs_that_the_model_changes_are_copied(many: Ran) -> None:
    assert find_model(many, "nets:shifting").verdict is Verdict.VERIFIED
    ratio = measured(many, "nets:shifting").output_db[0]
    assert isinstance(ratio, float) and ratio > 30


def test_calibration_batches_from_a_generator_count(good: Ran, many: Ran) -> None:
    """The first of them is judged too, and the examples are run again."""
    assert find_model(many, "nets:generated").verdict is Verdict.VERIFIED
    assert [find_model(good, "nets:rows").cases, find_model(many, "nets:generated").cases] == [2, 3]


def test_what_goes_wrong_in_measuring_costs_no_verdict(tmp_path: Path) -> None:
    ran = run_own(tmp_path, "device:Fixed", "nets:larger")
    row, deployment = find_model(ran, "nets:larger"), measured(ran, "nets:larger")
    assert row.verdict is Verdict.VERIFIED and deployment.quantized
    [note] = deployment.notes
    assert note.startswith("the evaluation of the backend model was not done: running it, raised ValueError")
    assert deployment.metrics[0].floating is not None and deployment.metrics[0].backend is None


def test_an_evaluation_that_does_not_end_costs_no_verdict(tmp_path: Path) -> None:
    ran = run(tmp_path, "device:Device", "--model=nets:slow", QUINT8, "--claim-timeout=1.5", cwd=PACKAGE)
    assert find_model(ran, "nets:slow").verdict is Verdict.VERIFIED and ran.status == 0
    [note] = measured(ran, "nets:slow").notes
    assert note.startswith("nothing else was measured: ")


@pytest.mark.parametrize(
    ("device", "holds"),
    [("Programs", "the user's model"), ("OwnClass", "the vendor's code and the user's model")],
)
def test_a_model_that_is_not_captured_in_time_is_told_as_such(tmp_path: Path, device: str, holds: str) -> None:
    """It has five times as long as a claim, also beside the vendor's code."""
    options = ("--claim=model/own/*/pt2e/quint8/*", "--claim-timeout=2")
    ran = run(tmp_path, f"device:{device}", "--model=nets:endless", *options, cwd=PACKAGE)
    row = find_model(ran, "nets:endless")
    place = f"the process that holds both the suite and {holds} (in capture)"
    assert (row.verdict, row.reason) == (Verdict.TIMEOUT, f"{place} did not end within 10 s (--claim-timeout)")
    assert "nets.py" in str(row.evidence["printed"])


def test_what_a_model_changes_in_its_process_no_other_model_finds(good: Ran, many: Ran) -> None:
    rows: list[Any] = [
        [row for row in comparable(each.results) if row.get("model") == f"model/own/nets:rows/{SETUP}"]
        for each in (many, good)
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 1


def test_the_distance_from_float_is_in_the_row_and_said(good: Ran) -> None:
    for row in good.results.models:
        [ratio] = row.float_db
        assert isinstance(ratio, float) and 20 < ratio < 60
        assert row.worst_db == ratio and f"\n{ratio:.1f}  {row.model}\n" in good.out
    assert "float model to the reference model's error, dB:" in good.out


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("nets: small", "names no model"),
        ("nets:", "names no model"),
        ("resnet", "--model=resnet: no model of this name (none is installed); give my_package.my_module:make"),
    ],
)
def test_a_name_that_nobody_gives_is_refused(spec: str, told: str) -> None:
    with pytest.raises(ModelSpecError) as caught:
        check_spec(spec)
    assert told in str(caught.value)
