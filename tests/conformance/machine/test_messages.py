"""Messages: each arrives as it was sent, but for what differs from process to process or from machine to machine."""

from __future__ import annotations

import json
import os
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from fx_quant_conformance.conformance.machine.messages import (
    MESSAGES,
    Begin,
    Tally,
    Trace,
    from_line,
    make_portable,
    to_line,
)
from fx_quant_conformance.reports.codec import Message, SchemaError
from fx_quant_conformance.reports.schema import (
    Check,
    ClaimResult,
    Layer,
    Measurement,
    ModelResult,
    Statistics,
    Waiver,
    Where,
    evidence,
)
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.fake_backends import fakes

CHECK = Check(
    claim="a/b",
    stage="numerics",
    rule="NUM-03",
    outcome="fail",
    verdict=Verdict.REFUTED,
    message="größer\n2 ≥ 1",
    max_lsb="inf",
    slack_lsb=0.25,
    cases=3,
    seconds=0.5,
    failing=2,
    evidence=evidence(
        {
            "where": Where(case="default", input="ends", output=1, change="batch", detail="9 rows"),
            "expected": [0.5, 2],
            "found": ["nan", -(2**40)],
            "index": [[0, 1], []],
            "qparams": {"input 0": {"scale": 0.5}},
            "cases not tried": 3,
        }
    ),
    statistics=Statistics(distances=[3, 0, 1], sqnr_db="-inf"),
)
WAIVER = Waiver(reason="known", url=None, expires="2027-01-31", max_lsb=2.0)
CLAIM = ClaimResult(
    claim="a/b",
    pattern="a",
    dtype_config="b",
    flow="qat",
    scheme="per_tensor",
    verdict=Verdict.REFUTED,
    waived=True,
    reason="off",
    failing=None,
    decisions=[{"node": "x", "count": 1, "share": 0.5, "is": True, "why": None}],
    waiver=WAIVER,
    graphs={"float model": "x = input"},
    script="import torch\n",
)
MODEL = ModelResult(
    model="model/unet/ptq",
    verdict=Verdict.TOLERATED,
    rule="NUM-03",
    reason="0.6 LSB",
    cases=2,
    waiver=WAIVER,
    evidence=evidence({"where": Where(case="batch 0"), "float_ops": ["relu"]}),
    statistics=Statistics(
        sqnr_db=38.5,
        layers=[
            Layer(node="up1", pattern="nn.Conv2d", verdict=Verdict.CRASHED),
            Layer(node="relu", pattern="nn.ReLU", verdict=Verdict.VERIFIED, sqnr_db="inf"),
        ],
    ),
)
SENT: tuple[Message, ...] = (
    CHECK,
    CLAIM,
    MODEL,
    Measurement(topic="t", subject="s", values={"text": "ties", "whole": 3, "number": 0.1, "is": False, "none": None}),
    Begin(stage="lower", case="default"),
    Begin(stage="refusal"),
    Trace(decisions=[{"node": "x", "count": 1}], graphs={"float model": "x = input\nreturn x"}),
    Trace(),
    Tally(lowerings=2, runs=30),
)


def test_every_kind_of_message_is_tried_here() -> None:
    assert {message.kind for message in SENT} == set(MESSAGES) - {"header", "footer"}, "which no process sends"
    assert all(type(message) is MESSAGES[message.kind] for message in SENT)


@pytest.mark.parametrize("message", SENT, ids=lambda message: message.kind)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    line = to_line(message)
    assert "\n" not in line and json.loads(line)["kind"] == message.kind
    assert from_line(line) == make_portable(message) == message
    assert to_line(make_portable(message)) == line


def test_what_differs_between_processes_is_left_out() -> None:
    text = 'File "<eval_with_key>.138", line 8: <Net object at 0x7f12ab>; Thread 0x00007f00; 0x1F is kept'
    kept = 'File "<eval_with_key>", line 8: <Net object at 0x>; Thread 0x; 0x1F is kept'
    assert make_portable(replace(CHECK, evidence=evidence({"traceback": text}))).evidence == {"traceback": kept}


def test_no_path_of_the_machine_is_in_a_message() -> None:
    """Where a package, Python and the suite stand differs from machine to machine; what is in them does not."""
    files = {
        torch.__file__: "torch/__init__.py",
        json.__file__: "json/__init__.py",
        fakes.__file__: "tests/conformance/support/fake_backends/fakes.py",
    }
    for path, kept in files.items():
        sent = replace(CHECK, evidence=evidence({"traceback": f'File "{path}", line 3'}))
        assert make_portable(sent).evidence == {"traceback": f'File "{kept}", line 3'}


ROOT = str(Path(__file__).parents[3])


@pytest.mark.parametrize("folder", [sysconfig.get_path("purelib"), ROOT])
def test_a_path_is_left_out_wherever_in_a_message_it_stands(folder: str) -> None:
    path = f"{folder}{os.sep}x.py"
    sent = Trace(decisions=[{path: path}], graphs={path: f"{path}: {path}"})
    assert make_portable(sent) == Trace(decisions=[{"x.py": "x.py"}], graphs={"x.py": "x.py: x.py"})
    without_root = folder.removeprefix(f"{ROOT}{os.sep}")  # an environment may stand in the checkout
    assert make_portable(Begin(stage=folder)) == Begin(stage=without_root), "the folder itself is no place of a file"


def test_text_that_cannot_be_encoded_is_replaced() -> None:
    sent = replace(CHECK, message="a\udc80b", evidence=evidence({"\ud800": "\udfff\ud800 ok"}))
    assert make_portable(sent).message == "a?b" and make_portable(sent).evidence == {"?": "?? ok"}
    assert to_line(sent).encode()


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"x": [1, {"y": float("nan")}]}, r"row\['evidence'\]\['x'\]\[1\]\['y'\] is nan; write a non-finite number as"),
        ({"x": torch.ones(1)}, r"is tensor\(\[1.\]\) of torch.Tensor; convert it to a plain builtin"),
    ],
)
def test_a_message_that_json_cannot_hold_is_refused(values: dict[str, object], why: str) -> None:
    with pytest.raises(SchemaError, match=why):
        to_line(replace(CHECK, evidence=evidence(values)))


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (replace(CHECK, evidence=evidence({"graph": 3})), "'evidence.graph' is 3; expected a string"),
        (replace(CHECK, evidence=evidence({"where": "default"})), "'evidence.where' is 'default'; expected an object"),
        (Trace(decisions=[{"node": cast(Any, (1, 2))}]), r"'decisions\[0\].node' is \[1, 2\]; expected a string or"),
    ],
)
def test_a_message_of_another_type_is_refused_where_it_arrives(sent: Message, why: str) -> None:
    line = to_line(sent)
    with pytest.raises(SchemaError, match=why):
        from_line(line)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("npu: ready", "Expecting value"),
        ("[]", "unknown kind of row None"),
        ('{"kind": "begin"}', "begin row has no 'stage'"),
    ],
)
def test_a_line_without_a_message_is_refused(line: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        from_line(line)
