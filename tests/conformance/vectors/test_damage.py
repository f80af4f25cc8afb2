"""A bundle or outputs that are damaged: each damage has a clear outcome, and none is green."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fx_quant_conformance.conformance.machine.workplace import LostProcess
from fx_quant_conformance.conformance.vectors.bundle import read_bundle
from fx_quant_conformance.conformance.vectors.files import pack_arrays, remove, unpack_arrays
from fx_quant_conformance.conformance.vectors.outputs import HandedIn, Status
from fx_quant_conformance.conformance.vectors.replay import raise_unless_done
from fx_quant_conformance.reports.reading import FileFault
from fx_quant_conformance.reports.verdicts import PASSING, Verdict
from tests.conformance.vectors.bundles import ADD, answer_bundle, judge_bundle, write_bundle
from tests.conformance.vectors.conftest import Made
from tests.support.warm_python import run_python

Damage = Callable[[Made, str], object]
"""Damages a copy of bundle and outputs; gets the name of a case of the claim ADD."""


def change_arrays(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Return the damage that changes the arrays of a case."""

    def damage(made: Made, case: str) -> None:
        path = made.outputs / case / "outputs.npz"
        arrays = unpack_arrays(path)
        change(arrays)
        path.write_bytes(pack_arrays(arrays))

    return damage


def write_output(name: str, data: bytes | str) -> Damage:
    """Return the damage that writes a file of a case."""

    def damage(made: Made, case: str) -> None:
        path = made.outputs / case / name
        path.write_bytes(data.encode() if isinstance(data, str) else data)

    return damage


def replace_outputs(name: str, data: bytes) -> Damage:
    """Return the damage that writes a file in the place of ``outputs.npz``."""

    def damage(made: Made, case: str) -> None:
        (made.outputs / case / "outputs.npz").unlink()
        (made.outputs / case / name).write_bytes(data)

    return damage


def cut(path_of: Callable[[Made, str], Path]) -> Damage:
    """Return the damage that takes away the second half of a file."""

    def damage(made: Made, case: str) -> None:
        path = path_of(made, case)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return damage


def empty_folder(made: Made, case: str) -> None:
    """Remove all files of a case."""
    for path in (made.outputs / case).iterdir():
        path.unlink()


def save_objects(made: Made, case: str) -> None:
    """Write an array of pickled objects, which would run code when it is read."""
    np.savez(made.outputs / case / "outputs.npz", r0_o0=np.array([{}], dtype=object))


def change_json(path_of: Callable[[Made], Path], key: str, value: object) -> Damage:
    """Return the damage that changes an entry of a JSON file."""

    def damage(made: Made, case: str) -> None:
        path = path_of(made)
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

    return damage


def _last(arrays: dict[str, Any], place: int) -> str:
    """Return the name of the output of the last run, or of one before it."""
    return sorted(arrays, key=lambda name: int(name[1:].partition("_")[0]))[-place]


def two_raw_files(made: Made, case: str) -> None:
    """Write an output in two dtypes."""
    folder = made.outputs / case
    (folder / "outputs.npz").unlink()
    for name in ("r0_o0.uint8", "r0_o0.float32"):
        (folder / name).write_bytes(b"")


def link_folder(made: Made, case: str) -> None:
    """Move a case's folder away, and leave a link to it."""
    (made.outputs / case).rename(made.outputs.parent / "elsewhere")
    (made.outputs / case).symlink_to(made.outputs.parent / "elsewhere")


def inputs_of(made: Made, case: str) -> Path:
    data = json.loads((made.bundle / "device" / "cases" / f"{case}.json").read_text())
    return made.bundle / "device" / str(data["inputs"])


STATUS = "status.json"
FILES: dict[str, tuple[Damage, str]] = {
    "no folder": (lambda made, case: shutil.rmtree(made.outputs / case), "nothing was handed in"),
    "empty folder": (empty_folder, "has no outputs.npz and no raw files"),
    "truncated": (cut(lambda made, case: made.outputs / case / "outputs.npz"), "cannot be read"),
    "pickled objects": (save_objects, "cannot be read"),
    "wrong shape": (change_arrays(lambda arrays: arrays.update(r0_o0=arrays["r0_o0"][..., :1])), "has shape"),
    "wrong dtype": (
        change_arrays(lambda arrays: arrays.update(r0_o0=arrays["r0_o0"].astype("float64"))),
        "has dtype float64; expected float32 or uint8",
    ),
    "missing output": (change_arrays(lambda arrays: arrays.pop("r1_o0")), "r1_o0 is missing"),
    "surplus output": (change_arrays(lambda arrays: arrays.update(r0_o7=arrays["r0_o0"])), "'r0_o7' is no output"),
    "raw file too short": (replace_outputs("r0_o0.uint8", b"\1"), "has 1 bytes"),
    "two raw files of one output": (two_raw_files, "two raw files are one output"),
    "raw file of objects": (replace_outputs("r0_o0.O", b"\0" * 8), "'O' is no dtype"),
    "raw and npz": (write_output("r0_o0.uint8", b"\1"), "both outputs.npz and r0_o0.uint8"),
    "status a list": (write_output(STATUS, "[]"), "status.json is no object"),
    "status unknown": (write_output(STATUS, '{"status": "fine"}'), "status is 'fine'"),
    "runs no object": (write_output(STATUS, '{"runs": 3}'), "runs is no object"),
    "a run that there is not": (write_output(STATUS, '{"runs": {"99": {"status": "crashed"}}}'), "there is no run 99"),
    "a run's status a text": (write_output(STATUS, '{"runs": {"0": "done"}}'), "write an object"),
    "execution no JSON": (write_output("execution.json", "{"), "execution.json cannot be read"),
    "execution of numbers": (
        write_output("execution.json", '{"quantized_ops": [1], "float_fallbacks": []}'),
        "lists of texts",
    ),
}
"""Damages of one case that its files show: words of the error."""

OUTPUTS: dict[str, tuple[Damage, Verdict, str]] = {
    "outputs that cannot be read": (write_output("outputs.npz", b""), Verdict.REFUTED, "cannot be read"),
    "status no JSON": (write_output(STATUS, "{"), Verdict.REFUTED, "status.json cannot be read"),
    "execution of nothing": (write_output("execution.json", "{}"), Verdict.REFUTED, "lists of texts"),
    "NaN": (
        change_arrays(lambda arrays: arrays.update(r0_o0=arrays["r0_o0"] * np.float32("nan"))),
        Verdict.REFUTED,
        "not finite",
    ),
    "a repetition that differs": (
        change_arrays(lambda arrays: arrays.update({_last(arrays, 1): arrays[_last(arrays, 1)] * 0})),
        Verdict.REFUTED,
        "gave another",
    ),
    "a run between others that differs": (
        change_arrays(lambda arrays: arrays.update({_last(arrays, 2): arrays[_last(arrays, 2)] * 0})),
        Verdict.REFUTED,
        "have the same inputs and other outputs",
    ),
    "refused": (write_output(STATUS, '{"status": "refused", "reason": "no add"}'), Verdict.REFUTED, "no add"),
    "crashed": (write_output(STATUS, '{"status": "crashed", "reason": "bus error"}'), Verdict.CRASHED, "bus error"),
    "timed out": (write_output(STATUS, '{"status": "timeout"}'), Verdict.TIMEOUT, "gave no reason"),
    "a run that raised": (
        write_output(STATUS, '{"status": "done", "runs": {"0": {"status": "raised", "reason": "no memory"}}}'),
        Verdict.REFUTED,
        "no memory",
    ),
    "float fallback": (
        write_output("execution.json", '{"quantized_ops": [], "float_fallbacks": ["add"]}'),
        Verdict.FALLBACK,
        "runs in float",
    ),
    "inputs truncated": (cut(inputs_of), Verdict.UNEXERCISED, "was changed: its sha256 is not the manifest's"),
    "inputs gone": (lambda made, case: inputs_of(made, case).unlink(), Verdict.UNEXERCISED, "write the bundle anew"),
}
"""Damages of one case: the verdict on its claim, and words of the reason."""

WHOLE: dict[str, tuple[Damage, str]] = {
    "a link to a folder": (link_folder, "is a link, or no regular file"),
    "a pipe": (lambda made, case: os.mkfifo(made.outputs / case / "raw"), "is a link, or no regular file"),
    "a huge file": (
        lambda made, case: os.truncate(os.open(made.outputs / case / "core", os.O_CREAT | os.O_RDWR), 1 << 40),
        "at most 268435456 are read",
    ),
    "description empty": (
        change_json(lambda made: made.bundle / "judge" / "judge.json", "description", {}),
        "its description: KeyError",
    ),
    "seed a text": (
        change_json(lambda made: made.bundle / "judge" / "judge.json", "options", {"seed": "x", "profile": "quick"}),
        "its options: ValueError",
    ),
    "surplus case": (lambda made, case: (made.outputs / ("0" * 16)).mkdir(), "is no case of the bundle"),
    "no outputs": (lambda made, case: shutil.rmtree(made.outputs), "there is no such folder"),
    "no manifest": (lambda made, case: (made.bundle / "device" / "manifest.json").unlink(), "manifest.json cannot"),
    "manifest changed": (
        change_json(lambda made: made.bundle / "device" / "manifest.json", "seed", 7),
        "is not the one that was written",
    ),
    "newer schema": (change_json(lambda made: made.bundle / "judge" / "judge.json", "schema", 99), "schema 99"),
    "plan of a list": (
        lambda made, case: (made.bundle / "judge" / "judge.json").write_text("[]"),
        "is no bundle: TypeError",
    ),
}
"""Damages after which nothing is judged: words of the error."""


@pytest.fixture
def copied(made: Made, tmp_path: Path) -> Made:
    """Return a copy that may be written to."""
    copied = Made(bundle=tmp_path / "bundle", outputs=tmp_path / "outputs")
    shutil.copytree(made.bundle, copied.bundle)
    shutil.copytree(made.outputs, copied.outputs)
    return copied


def find_case(made: Made) -> str:
    manifest = json.loads((made.bundle / "device" / "manifest.json").read_text())
    return str(next(row["case"] for row in manifest["cases"] if row["claim"] == ADD))


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named(name: str, copied: Made) -> None:
    damage, words = FILES[name]
    case = find_case(copied)
    damage(copied, case)
    handed_in = HandedIn(copied.outputs / case, read_bundle(copied.bundle).read_case(case))
    with pytest.raises(FileFault, match=words):
        handed_in.read_status()
        handed_in.check_complete()
        handed_in.read_execution()


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTPUTS)
def test_damage_of_a_case_is_the_verdict_of_its_claim(name: str, copied: Made) -> None:
    damage, verdict, words = OUTPUTS[name]
    damage(copied, find_case(copied))
    judged = judge_bundle(*copied, ADD)
    assert (judged[ADD].verdict, words in judged[ADD].reason) == (verdict, True), judged[ADD]
    assert judged[ADD].verdict not in PASSING and "Traceback" not in judged[ADD].reason


@pytest.mark.parametrize("name", WHOLE)
def test_damage_of_the_whole_is_an_error(name: str, copied: Made) -> None:
    damage, words = WHOLE[name]
    damage(copied, find_case(copied))
    with pytest.raises(pytest.UsageError, match="(?s)" + words) as raised:
        judge_bundle(*copied)
    assert "\n" not in str(raised.value)


def dig(folder: Path) -> None:
    """Make folders in folders, deeper than a path can say."""
    here = os.getcwd()
    try:
        os.chdir(folder)
        for _ in range(1500):
            os.mkdir("deeper")
            os.chdir("deeper")
    finally:
        os.chdir(here)


def test_folders_in_folders_without_end_are_an_error_of_one_line_and_can_be_removed(copied: Made) -> None:
    case = copied.outputs / find_case(copied)
    dig(case)
    (case / "deeper" / "file").touch()
    with pytest.raises(pytest.UsageError, match=r"--outputs=.*/deeper lies deeper than ") as raised:
        judge_bundle(*copied)
    assert len(str(raised.value).splitlines()) == 1 and len(str(raised.value)) < 1000
    remove(copied.outputs)
    assert not copied.outputs.exists()


@pytest.mark.slow
def test_a_case_that_no_stage_asks_for_is_looked_at(tmp_path: Path) -> None:
    """A model that holds as a whole is not cut into patterns; yet what was handed in for these must be whole."""
    model = "model/branches/ptq/quint8/per_channel_affine"
    write_bundle(tmp_path / "bundle", claims=(model,))
    answer_bundle(tmp_path / "bundle", tmp_path / "outputs")
    assert judge_bundle(tmp_path / "bundle", tmp_path / "outputs")[model].verdict is Verdict.UNSHOWN
    cases = sorted((tmp_path / "outputs").iterdir())
    assert len(cases) > 3
    for case in cases[:2]:
        kept = (case / STATUS).read_text()
        (case / STATUS).write_text('{"status": "crashed", "reason": "the board burned"}')
        judgement = judge_bundle(tmp_path / "bundle", tmp_path / "outputs")[model]
        assert judgement.verdict is Verdict.CRASHED and "the board burned" in judgement.reason
        (case / STATUS).write_text(kept)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "profile", "regions"), [("float_between", "quick", 0), ("transformer", "full", 2)])
def test_a_device_may_decline_a_model_of_ops_that_are_not_claimed(
    tmp_path: Path, name: str, profile: str, regions: int
) -> None:
    """It was REFUTED, as a case that no stage had asked for; and so was a float region.

    A region is recorded where end to end not all is decided, and not asked for where the model is declined.
    """
    model = f"model/{name}/ptq/quint8/per_channel_affine"
    write_bundle(tmp_path, claims=(model,), profile=profile)
    outputs = tmp_path / "outputs"
    answer_bundle(tmp_path, outputs)
    bundle, declined = read_bundle(tmp_path), list[Path]()
    for case in bundle.cases:
        graph = json.loads((bundle.device / bundle.read_case(case)["model"]["json"]).read_text())
        ops = [node["name"] for node in graph["nodes"] if "quantize" not in node["op"]]
        (outputs / case / "execution.json").write_text(json.dumps({"quantized_ops": ops, "float_fallbacks": []}))
        if any("unclaimed" in node for node in graph["nodes"]):
            (outputs / case / STATUS).write_text('{"status": "refused", "reason": "no gelu"}')
            declined.append(outputs / case)
    judgement = judge_bundle(tmp_path, outputs)[model]
    assert 1 + regions <= len(declined) < len(bundle.cases)
    assert judgement.verdict is Verdict.VERIFIED and "claimed patterns were judged alone" in judgement.reason


@pytest.mark.slow
def test_the_command_says_it_in_a_line(copied: Made) -> None:
    damage, words = WHOLE["surplus case"]
    damage(copied, find_case(copied))
    command = ("-m", "fx_quant_conformance", "judge", str(copied.bundle), str(copied.outputs))
    done = run_python(*command, cwd=copied.outputs.parent)
    assert done.returncode == 4 and "Traceback" not in done.stdout + done.stderr
    assert words in done.stderr


def test_a_crash_of_a_case_of_several_shapes_is_not_blamed_on_the_first() -> None:
    """An abort at 513 elements was reported of 65."""
    crashed = Status(status="crashed", reason="SIGABRT")
    with pytest.raises(LostProcess, match=r"^SIGABRT \(with one of the shapes nx65, nx513, which are one case\)$"):
        raise_unless_done("a case", crashed, ["nx65", "nx513"])
    with pytest.raises(LostProcess, match=r"^SIGABRT$"):
        raise_unless_done("a case", crashed, ["nx65"])
