"""A bundle: its form, its bytes, and that each of its files tells the same model and the same answer."""

from __future__ import annotations

import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from fx_quant_conformance.backends.base import Representation
from fx_quant_conformance.backends.discovery import find_backend
from fx_quant_conformance.backends.reference import ReferenceBackend
from fx_quant_conformance.conformance.oracle.grids import Grid
from fx_quant_conformance.conformance.remote.description import describe, read_description
from fx_quant_conformance.conformance.run.device import ElsewhereError
from fx_quant_conformance.conformance.run.elsewhere import adopt_bundle, open_vectors
from fx_quant_conformance.conformance.run.export import ExportError, export
from fx_quant_conformance.conformance.run.session import digest_code, open_session
from fx_quant_conformance.conformance.stages.layouts import lay_strided
from fx_quant_conformance.conformance.vectors.bundle import BundleWriter
from fx_quant_conformance.conformance.vectors.files import digest_folder, pack_arrays, unpack_arrays
from fx_quant_conformance.conformance.vectors.formats import FormatError, choose_form, choose_formats
from fx_quant_conformance.conformance.vectors.recording import RecordingBackend
from fx_quant_conformance.conformance.vectors.runs import RunsData, key_of, read_operand
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.flows import converted
from tests.conformance.vectors.bundles import ADD, LINEAR, answer_bundle, judge_bundle, make_options, write_bundle
from tests.conformance.vectors.conftest import Made

pytestmark = pytest.mark.slow

SCHEMA = json.loads((Path(__file__).parents[3] / "docs" / "vectors.schema.json").read_text(encoding="utf-8"))
MUL_IN_QAT = "torch.mul/static:in=quint8,w=*,b=*,out=quint8/qat/no_weight"
Array = npt.NDArray[Any]


def validate(data: object, kind: str) -> None:
    """Hold data to one of the schema's definitions."""
    jsonschema.validate(data, {**SCHEMA, "$ref": f"#/$defs/{kind}"}, cls=jsonschema.Draft202012Validator)


def read_cases(made: Made, claim: str = "") -> list[dict[str, Any]]:
    """Return the cases of a claim, or all."""
    paths = sorted((made.bundle / "device" / "cases").iterdir())
    cases: list[dict[str, Any]] = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return [case for case in cases if claim in ("", case["claim"])]


def test_every_file_is_as_the_schema_says(made: Made) -> None:
    device = made.bundle / "device"
    manifest = json.loads((device / "manifest.json").read_text(encoding="utf-8"))
    validate(manifest, "manifest")
    assert set(manifest["files"]) == {
        path.relative_to(device).as_posix()
        for path in device.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    for case in read_cases(made):
        validate(case, "case")
        validate(json.loads((device / case["model"]["json"]).read_text(encoding="utf-8")), "model")
    for folder in made.outputs.iterdir():
        validate(json.loads((folder / "status.json").read_text(encoding="utf-8")), "status")
        validate(json.loads((folder / "execution.json").read_text(encoding="utf-8")), "execution")


def test_a_run_says_how_its_input_lies_in_memory() -> None:
    """An input at an offset was the same run as the one that begins its memory, and no device saw it."""
    plain = torch.arange(6.0).reshape(2, 3)
    grid = Grid(scale=1.0, zero_point=0, low=0, high=255, dtype="quint8")
    laid = {label: changed for label, _, (changed,) in lay_strided((plain,))}
    runs = RunsData(grids=[grid])
    for value in (plain, *laid.values()):
        runs.add([value], value, threads=1, program=0)
    read = [read_operand(run["inputs"][0], runs.arrays, grid) for run in runs.spell()]
    for value, found in zip((plain, *laid.values()), read, strict=True):
        assert torch.equal(found, value) and found.stride() == value.stride()
        assert (found.storage_offset() > 0) == (value.storage_offset() > 0)
        assert key_of([found], 1) == key_of([value], 1)
    assert len({key_of([each], 1) for each in read}) == len(read) == 5


def test_the_schema_refuses_what_is_no_case(made: Made) -> None:
    case = read_cases(made)[0]
    changes: list[dict[str, object]] = [{"runs": []}, {"case": "x"}, {"answer": 1}]
    for change in changes:
        with pytest.raises(jsonschema.ValidationError):
            validate(case | change, "case")


def test_the_same_seed_gives_the_same_bytes(made: Made, tmp_path: Path) -> None:
    write_bundle(tmp_path / "again")
    assert digest_folder(tmp_path / "again") == digest_folder(made.bundle)


def test_only_the_judges_folder_tells_what_is_right(made: Made) -> None:
    names = {path.suffix for path in (made.bundle / "device").rglob("*") if path.is_file()}
    assert names == {".json", ".npz", ".fx"}
    for case in read_cases(made):
        held = unpack_arrays(made.bundle / "device" / case["inputs"])
        assert set(held) == {operand["array"] for run in case["runs"] for operand in run["inputs"]}
        assert not {"expected", "exact", "low", "high"} & {*case}


# -- the plain graph, by NumPy alone -----------------------------------------------------------------------------------


def dequantize(integers: Array, grid: dict[str, Any]) -> Array:
    scale, zero_point = np.float64(grid["scale"]), grid["zero_point"]
    return np.asarray((integers.astype(np.float64) - zero_point) * scale)


def run_plainly(graph: dict[str, Any], weights: dict[str, Array], feeds: dict[str, Array]) -> Array:
    """Run a graph of add or linear in float64; return the integers of its output."""
    values: dict[str, Array] = {}
    for node in graph["nodes"]:
        args = [values[arg["node"]] if isinstance(arg, dict) and arg["node"] in values else arg for arg in node["args"]]
        if node["op"] == "quantize" and node["args"][0]["node"] in graph["inputs"]:
            result = feeds[node["args"][0]["node"]]
        elif node["op"] == "quantize":
            steps = np.round(args[0] / node["scale"]) + node["zero_point"]
            result = np.clip(steps, node["low"], node["high"])
        elif node["op"] == "dequantize":
            result = dequantize(args[0], node)
        elif node["op"] in ("torch.add", "operator.add"):
            result = args[0] + node.get("kwargs", {}).get("alpha", 1) * args[1]
        elif node["op"] == "nn.Linear":
            held, bias = node["tensors"]["weight"], node["tensors"].get("bias")
            result = args[0] @ dequantize(weights[held["tensor"]], held).T
            result = result + (weights[bias["tensor"]] if bias else 0)
        else:
            pytest.skip(f"the test's reader has no {node['op']}")
        values[node["name"]] = result
    (output,) = (node for node in graph["nodes"] if node["name"] == graph["outputs"]["node"])
    return values[output["args"][0]["node"]]


@pytest.mark.parametrize("claim", [ADD, LINEAR])
def test_a_reader_without_torch_gets_what_is_right(made: Made, claim: str) -> None:
    device, checked = made.bundle / "device", 0
    for case in read_cases(made, claim):
        graph = json.loads((device / case["model"]["json"]).read_text(encoding="utf-8"))
        ops = {node["op"] for node in graph["nodes"]}
        if not ops <= {"quantize", "dequantize", "torch.add", "nn.Linear"} or not all(case["operands"]):
            continue
        weights, inputs = unpack_arrays(device / case["model"]["weights"]), unpack_arrays(device / case["inputs"])
        expected = unpack_arrays(made.bundle / "judge" / "expected" / f"{case['case']}.npz")
        for number, run in enumerate(case["runs"]):
            if f"r{number}_o0_low" not in expected or any(each["holds"] != "integers" for each in run["inputs"]):
                continue
            feeds = {name: inputs[each["array"]] for name, each in zip(graph["inputs"], run["inputs"], strict=True)}
            found = run_plainly(graph, weights, feeds)
            low, high = expected[f"r{number}_o0_low"], expected[f"r{number}_o0_high"]
            assert ((low <= found) & (found <= high)).all() and list(found.shape) == run["outputs"][0]
            checked += 1
    assert checked >= 5


def test_the_interval_is_where_the_judge_ends(made: Made, tmp_path: Path) -> None:
    """The highest right integer is taken, the next one is not: expected.npz is what the judge decides by."""
    case = next(case for case in read_cases(made, ADD) if all(case["operands"]))
    expected = unpack_arrays(made.bundle / "judge" / "expected" / f"{case['case']}.npz")
    right = unpack_arrays(made.outputs / case["case"] / "outputs.npz")
    grid = case["outputs"][0]["grid"]
    high = expected["r0_o0_high"].astype(np.int64)
    place = tuple(np.argwhere(high < grid["high"])[0])
    arrays = [tuple(each["array"] for each in run["inputs"]) for run in case["runs"]]
    verdicts = {}
    for step in (0, 1):
        changed = {name: value.copy() for name, value in right.items()}
        for number, names in enumerate(arrays):
            if names == arrays[0]:
                changed[f"r{number}_o0"][place] = dequantize(high[place] + step, grid)
        outputs = shutil.copytree(made.outputs, tmp_path / str(step))
        (outputs / case["case"] / "outputs.npz").write_bytes(pack_arrays(changed))
        verdicts[step] = judge_bundle(made.bundle, outputs, ADD)[ADD]
    assert verdicts[0].verdict is Verdict.VERIFIED and verdicts[1].verdict is Verdict.REFUTED
    assert "LSB" in verdicts[1].reason


# -- formats -----------------------------------------------------------------------------------------------------------


def test_the_exported_program_computes_the_same(made: Made, tmp_path: Path) -> None:
    export(make_options("reference", claims=(LINEAR,)), tmp_path / "bundle", ("json", "pt2"), None)
    for case in read_cases(Made(bundle=tmp_path / "bundle", outputs=made.outputs), LINEAR):
        path = tmp_path / "bundle" / "device" / case["programs"][0]["pt2"]
        program = torch.export.load(io.BytesIO(path.read_bytes()))
        inputs = unpack_arrays(tmp_path / "bundle" / "device" / case["inputs"])
        run, grid = case["runs"][0], case["operands"][0]
        x = torch.from_numpy(dequantize(inputs[run["inputs"][0]["array"]], grid)).float()
        answer = unpack_arrays(made.outputs / case["case"] / "outputs.npz")["r0_o0"]
        assert torch.equal(program.module()(x), torch.from_numpy(answer))


def test_the_onnx_file_computes_the_same(made: Made, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="needs the package onnx")
    pytest.importorskip("onnxscript", reason="needs the package onnxscript")
    from onnx.reference import ReferenceEvaluator

    export(make_options("reference", claims=(LINEAR,)), tmp_path / "bundle", ("json", "onnx"), None)
    for case in read_cases(Made(bundle=tmp_path / "bundle", outputs=made.outputs), LINEAR):
        model = ReferenceEvaluator(str(tmp_path / "bundle" / "device" / case["programs"][0]["onnx"]))
        inputs = unpack_arrays(tmp_path / "bundle" / "device" / case["inputs"])
        run, grid = case["runs"][0], case["operands"][0]
        x = dequantize(inputs[run["inputs"][0]["array"]], grid).astype(np.float32)
        (found,) = model.run(None, dict(zip(model.input_names, [x], strict=True)))
        expected = unpack_arrays(tmp_path / "bundle" / "judge" / "expected" / f"{case['case']}.npz")
        about = case["outputs"][0]["grid"]
        integers = np.round(found / about["scale"]) + about["zero_point"]
        assert ((expected["r0_o0_low"] <= integers) & (integers <= expected["r0_o0_high"])).all()


def test_a_run_names_the_program_of_its_shapes(tmp_path: Path) -> None:
    """A case of several ranks had the first one's file alone; of an op without numbers that is one graph."""
    reference = converted(nn.ReLU(), [(-1.0, 1.0)], output=[[torch.rand(2, 3, 4, 4)]])
    writer = BundleWriter(folder=tmp_path, formats=("json", "pt2"))
    recording = RecordingBackend(read_description(describe(ReferenceBackend())), sink=writer, imports="", text="")
    recording.begin("a claim")
    shapes = [(2, 3, 4, 4), (5, 3, 4, 4), (6, 4), (65,)]
    for shape in shapes:
        recording.lower(reference, (torch.rand(shape),))(torch.rand(shape))
    recording.conclude()
    [path] = (tmp_path / "device" / "cases").iterdir()
    case = json.loads(path.read_text(encoding="utf-8"))
    validate(case, "case")
    assert [program["inputs"] for program in case["programs"]] == [[[None, 3, 4, 4]], [[None, 4]], [[None]]]
    assert [run["program"] for run in case["runs"]] == [0, 0, 1, 2]
    for shape, run in zip(shapes, case["runs"], strict=True):
        data = (tmp_path / "device" / case["programs"][run["program"]]["pt2"]).read_bytes()
        assert torch.export.load(io.BytesIO(data)).module()(torch.rand(shape)).shape == shape


@pytest.fixture(scope="module")
def without_onnx(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A bundle for a device that takes ONNX; torch exports no product of a number and one tensor element by element."""
    pytest.importorskip("onnx", reason="needs the package onnx")
    pytest.importorskip("onnxscript", reason="needs the package onnxscript")
    folder = tmp_path_factory.mktemp("onnx")
    made = Made(bundle=folder / "bundle", outputs=folder / "outputs")
    export(make_options("reference", claims=(MUL_IN_QAT, ADD)), made.bundle, ("json", "onnx", "fx"), None)
    answer_bundle(made.bundle, made.outputs)
    return made


def test_what_torch_does_not_export_is_no_fault_of_the_device(without_onnx: Made) -> None:
    made, status = without_onnx, json.dumps({"status": "no_model", "format": "onnx"})
    missing = [case for case in read_cases(made, MUL_IN_QAT) if "no onnx" in case["programs"][0]]
    assert missing, "torch exports it now: name another claim"
    (made.outputs / missing[0]["case"] / "status.json").write_text(status, encoding="utf-8")
    judged = judge_bundle(made.bundle, made.outputs, MUL_IN_QAT)[MUL_IN_QAT]
    assert judged.verdict is Verdict.UNEXERCISED
    assert judged.reason.startswith("there is no model in format onnx for the device: ConversionError: ")
    assert "Exception summary" in judged.reason


@pytest.mark.parametrize(
    ("name", "told"), (("onnx", "'onnx': the bundle has one"), ("pt2", "'pt2': the bundle is in json, onnx, fx"))
)
def test_a_device_that_has_a_model_may_not_say_that_it_has_none(without_onnx: Made, name: str, told: str) -> None:
    made = without_onnx
    for case in read_cases(made, ADD):
        status = json.dumps({"status": "no_model", "format": name})
        (made.outputs / case["case"] / "status.json").write_text(status, encoding="utf-8")
    judged = judge_bundle(made.bundle, made.outputs, ADD)[ADD]
    assert judged.verdict is Verdict.REFUTED and told in judged.reason


# -- what cannot be exported -------------------------------------------------------------------------------------------


def test_a_format_that_there_is_not_is_refused() -> None:
    with pytest.raises(FormatError, match="found tosa; choose from json, pt2, onnx, fx"):
        choose_formats(["json", "tosa"])
    assert choose_formats(["pt2"]) == ("json", "pt2")


def test_models_of_a_backend_that_takes_programs_are_those_from_which_these_are_made() -> None:
    assert choose_form(Representation.EXPORTED, ("json", "fx", "pt2")) is Representation.DECOMPOSED
    assert choose_form(Representation.QUANTIZED, ("json", "pt2")) is Representation.DECOMPOSED
    assert choose_form(Representation.QUANTIZED, ("json", "fx", "pt2")) is Representation.QUANTIZED


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ExportError, match="is not empty, and no bundle"):
        export(make_options("reference", claims=(ADD,)), tmp_path, ("json",), None)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_only_a_bundle_is_replaced(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    shutil.copytree(made.bundle, folder)
    (folder / "main.c").write_text("precious")
    before = digest_folder(folder)
    with pytest.raises(ExportError, match="name a new folder"):
        export(make_options("reference", claims=(ADD,)), folder, ("json",), None)
    assert digest_folder(folder) == before


def test_a_bundle_is_replaced_when_the_new_one_is_whole(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(made.bundle, folder)
    before = digest_folder(folder)
    with pytest.raises(ExportError, match="--max-bytes is 1000"):
        export(make_options("reference", claims=(ADD,)), folder, ("json",), 1000)
    assert digest_folder(folder) == before
    export(make_options("reference", claims=(ADD,)), folder, ("json",), None)
    assert digest_folder(folder) != before and [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_a_bundle_is_no_backend_to_export(made: Made, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="is a bundle already"):
        export(make_options(f"vectors:{made.bundle}"), tmp_path / "again", ("json",), None)


def test_a_claim_without_a_case_is_listed_with_its_reason(tmp_path: Path) -> None:
    claim = ".hardsigmoid/static:in=qint8[s>=2^-12],w=*,b=*,out=qint8[s>=2^-12]/ptq/no_weight"
    done = export(make_options("qnnpack", claims=(claim,)), tmp_path / "bundle", ("json",), None)
    assert done.cases == 0 and "has no method hardsigmoid" in done.left_out[claim]


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    module = "tests.conformance.vectors.config_only"
    done = export(make_options(f"{module}:CONFIG"), tmp_path / "bundle", ("json",), None)
    assert done.cases and not done.left_out
    for name in ("give_config", "WithoutLower"):
        (entry,) = find_backend(f"{module}:{name}", needs_lower=False).backend_config().configs
        assert entry.pattern is nn.ReLU


def test_another_seed_or_profile_than_the_bundles_is_refused(made: Made) -> None:
    options = make_options(f"vectors:{made.bundle}", outputs=made.outputs)
    with pytest.raises(ElsewhereError, match="--seed=3: the bundle has seed 0"):
        adopt_bundle(replace(options, seed=3))
    with pytest.raises(ElsewhereError, match="--profile=stress: the bundle has profile quick"):
        adopt_bundle(replace(options, profile="stress"))


def test_outputs_belong_to_a_bundle(made: Made) -> None:
    with pytest.raises(ElsewhereError, match="--outputs belongs to"):
        adopt_bundle(make_options("qnnpack", outputs=made.outputs))
    with pytest.raises(ElsewhereError, match="needs --outputs"):
        open_vectors(make_options(f"vectors:{made.bundle}"))


def test_the_results_of_a_device_can_be_merged_and_resumed(made: Made, tmp_path: Path) -> None:
    """They are bound to the suite's sources; those of the device are in the versions, as digests of its files."""
    options = replace(make_options(f"vectors:{made.bundle}", outputs=made.outputs), report_dir=tmp_path)
    assert re.fullmatch("[0-9a-f]{64}", digest_code(open_session(options)))
