"""A model that prepare changes is found, with the first node that differs (rules OBS-15, QAT-01, FUS-06)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fx_quant_conformance.conformance.stages.prepare import check_prepared_meaning
from fx_quant_conformance.refimpl import (
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
    prepare_fx,
    prepare_qat_fx,
)
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.stages.test_structure import LINEAR, ended_by


@pytest.mark.rule("QAT-01")
@pytest.mark.parametrize("eps", (0.0625, 0.03))
def test_a_class_for_training_with_another_eps(eps: float) -> None:
    """Seen before training, which moves the statistics; the mode, and what the model computes in it, stay."""
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3, eps=0.0625))
    prepared: Any = prepare_qat_fx(copy.deepcopy(model).train(), get_default_qat_qconfig_mapping("qnnpack"))
    prepared.get_submodule("0").bn.eps = eps
    inputs = (torch.rand(2, 2, 3, 3),)
    kept = copy.deepcopy(prepared.state_dict())
    faults = list(check_prepared_meaning(model.eval(), prepared, inputs, is_qat=True))
    assert [(fault.rule, fault.evidence) for fault in faults] == [("QAT-01", {"node": "_0"})] * (eps != 0.0625)
    assert all("rounding explains" in fault.message for fault in faults)
    assert prepared.training and all(torch.equal(kept[name], each) for name, each in prepared.state_dict().items())


@pytest.mark.rule("OBS-15", "FUS-06")
@pytest.mark.parametrize(
    ("layers", "rule"),
    [
        ((nn.Conv2d(2, 3, 1),), "OBS-15"),
        ((nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)), "FUS-06"),
    ],
)
def test_a_prepared_model_that_computes_something_else(layers: Any, rule: str) -> None:
    """By less than what the rounding of weights, and so a comparison with the reference model, would explain."""
    model = nn.Sequential(*layers).eval()
    prepared: Any = prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping("qnnpack"))
    inputs = (torch.rand(2, 2, 3, 3),)
    kept = copy.deepcopy(prepared.state_dict())
    assert list(check_prepared_meaning(model, prepared, inputs, is_qat=False)) == []
    assert all(torch.equal(kept[name], each) for name, each in prepared.state_dict().items()), "nothing is observed"
    layer = prepared.get_submodule("0")
    layer.bias = nn.Parameter(layer.bias * (1 + 2.0**-12))
    (fault,) = check_prepared_meaning(model, prepared, inputs, is_qat=False)
    assert (fault.rule, fault.evidence["node"], fault.verdict) == (rule, "_0", Verdict.REFUTED)
    assert fault.message.startswith("prepare changed what the model computes: the first node that differs is _0")


@pytest.mark.rule("OBS-15")
def test_a_claim_whose_model_prepare_changes_is_refuted_though_it_would_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def changed(*arguments: Any, **keywords: Any) -> Any:
        prepared = prepare_fx(*arguments, **keywords)
        prepared.add_module("op0", nn.Linear(1, 1))
        return prepared

    monkeypatch.setattr("fx_quant_conformance.conformance.stages.calibration.prepare_fx", changed)
    ended = ended_by(LINEAR)
    assert (ended.stage, ended.rule, ended.verdict) == ("prepare", "OBS-15", Verdict.REFUTED)
    assert "the first node that differs is op0: it does not run: RuntimeError: " in ended.message
