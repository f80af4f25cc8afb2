"""Scripts: whatever a backend says of a failure, what is written is Python."""

from __future__ import annotations

import torch
from torch import nn

from fx_quant_conformance.conformance.reproducers.script import Failure, script_of
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.reports.schema import Check
from fx_quant_conformance.reports.verdicts import Verdict
from tests.mutants.reference_kernels import SmallReference


def test_a_message_of_any_characters_spoils_no_script() -> None:
    message = 'said "\x00\x1b[2J\ud800", and a backslash at its end: \\'
    check = Check(claim="c", stage="lower", rule="LOW-01", outcome="fail", verdict=Verdict.CRASHED, message=message)
    failure = Failure(model=torch.fx.symbolic_trace(nn.Sequential(nn.ReLU())), batch=(torch.ones(2),), check=check)
    script = script_of(failure, Bench(SmallReference(), seed=0, profile="quick"), name="c", message=message)
    compile(script, "script.py", "exec")
    assert script.isascii() and "'x00" in script and "\x1b" not in script
