"""Torch's tools on refimpl's observers, fake quantizes and models do what they do on torch's own (rule CFG-14)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization as torch_quantization
import torch.ao.quantization.quantize_fx as torch_fx
from torch import Tensor, nn
from torch.ao.ns import _numeric_suite_fx

from fx_quant_conformance import refimpl
from tests.refimpl.support import both_flows as flows

SUITE: Any = _numeric_suite_fx  # not annotated
TORCH: Any = torch_quantization
SWITCHES = ("disable_observer", "enable_observer", "disable_fake_quant", "enable_fake_quant")
BATCH = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
FLOWS = {"torch": (torch_fx, TORCH), "refimpl": (refimpl, refimpl)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.relu, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.head(self.relu(self.norm(self.conv(x))).flatten(1))
        return torch.sigmoid(y + y)


def place_observers(side: str, *, is_qat: bool) -> Any:
    """A prepared model of one flow, with that flow's own observers or fake quantizes."""
    flow, names = FLOWS[side]
    mapping = (names.get_default_qat_qconfig_mapping if is_qat else names.get_default_qconfig_mapping)("x86")
    door: Any = flow.prepare_qat_fx if is_qat else flow.prepare_fx
    return door(Net().train(is_qat), mapping, (BATCH,))


def prepare(side: str, *, is_qat: bool) -> Any:
    """The same, calibrated."""
    prepared = place_observers(side, is_qat=is_qat)
    for scale in (1, 2):
        prepared(BATCH * scale)
    return prepared


def count_changes(prepared: Any, scale: float) -> int:
    """Run a batch; return how many buffers are then another value."""
    before = {name: buffer.clone() for name, buffer in prepared.named_buffers()}
    prepared(BATCH * scale)
    return sum(not torch.equal(buffer, before[name]) for name, buffer in prepared.named_buffers())


@pytest.mark.rule("CFG-14")
@pytest.mark.rule("QAT-01")
@pytest.mark.parametrize("switches", [TORCH, refimpl], ids=["torch's switches", "refimpl's switches"])
def test_after_each_switch_as_many_buffers_change_in_either_model(switches: Any) -> None:
    both = [prepare(side, is_qat=True) for side in FLOWS]
    assert len({count_changes(model, 3.0) for model in both}) == 1
    seen = []
    for step, name in enumerate(SWITCHES):
        counts = [count_changes(model.apply(getattr(switches, name)), 4.0 + step) for model in both]
        assert counts[0] == counts[1], f"after {name}: torch's model, and refimpl's"
        seen.append(counts[0])
    assert seen[0] < seen[1] and seen[2] < seen[3], "observers, then fake quantizes, are off and on again"


@pytest.mark.rule("CFG-14")
@pytest.mark.parametrize("is_qat", [False, True], ids=["ptq", "qat"])
def test_torchs_state_dict_of_observers_carries_the_calibration(is_qat: bool) -> None:
    calibrated = prepare("refimpl", is_qat=is_qat)
    fresh = place_observers("refimpl", is_qat=is_qat)
    state = TORCH.get_observer_state_dict(calibrated)
    TORCH.load_observer_state_dict(fresh, state)
    loaded = TORCH.get_observer_state_dict(fresh)
    assert state.keys() == loaded.keys() and len(state) > 20
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def compare_weights(prepared: Any, converted: Any) -> Any:
    found = SUITE.extract_weights("prepared", prepared, "converted", converted)
    return {layer: [row["fqn"] for row in each["weight"]["prepared"]] for layer, each in found.items()}


def compare_outputs(prepared: Any, converted: Any) -> Any:
    loggers = SUITE.add_loggers("prepared", prepared, "converted", converted, SUITE.OutputLogger)
    for model in loggers:
        model(BATCH)
    found = SUITE.extract_logger_info(*loggers, SUITE.OutputLogger, "converted")
    return {
        layer: [(row["fqn"], row["values"][0].shape) for row in each["node_output"]["prepared"]]
        for layer, each in found.items()
    }


@pytest.mark.slow
@pytest.mark.rule("CFG-14")
@pytest.mark.parametrize(
    ("compare", "is_qat"), [(compare_weights, True), (compare_outputs, False)], ids=["weights, qat", "outputs, ptq"]
)
def test_the_numeric_suite_finds_the_same_layers(compare: Callable[[Any, Any], Any], is_qat: bool) -> None:
    found = []
    for side, (flow, _) in FLOWS.items():
        prepared = prepare(side, is_qat=is_qat).eval()
        found.append(compare(prepared, flow.convert_fx(copy.deepcopy(prepared))))
    assert found[0] == found[1] and found[0], "torch's, and refimpl's"


@pytest.mark.rule("CFG-14")
def test_torchs_model_report_says_the_same_of_a_model_prepared_with_torchs_mapping() -> None:
    """Its detector asks each module for a QConfig of torch's class."""
    from torch.ao.quantization.fx._model_report.detector import PerChannelDetector

    found = []
    for door in (torch_fx.prepare_fx, refimpl.prepare_fx):
        prepared = door(Net().eval(), TORCH.get_default_qconfig_mapping("qnnpack"), (BATCH,))
        found.append(PerChannelDetector("qnnpack").generate_detector_report(prepared)[1])
    assert found[0] == found[1] and len(found[0]) == 2


@pytest.mark.slow
@pytest.mark.rule("CFG-14")
@pytest.mark.filterwarnings("ignore:QConfig must specify a FixedQParams:UserWarning")  # torch's
@pytest.mark.parametrize("is_qat", [False, True], ids=["ptq", "qat"])
def test_torchs_flow_takes_refimpls_qconfigs_and_gives_the_same_bits(is_qat: bool) -> None:
    outputs = []
    for _, names in FLOWS.values():
        qconfig = (names.get_default_qat_qconfig if is_qat else names.get_default_qconfig)("x86")
        door: Any = torch_fx.prepare_qat_fx if is_qat else torch_fx.prepare_fx
        mapping = flows.global_mapping(TORCH.QConfig(*qconfig))
        prepared = door(Net().train(is_qat), mapping, (BATCH,))
        prepared(BATCH)
        outputs.append(torch_fx.convert_to_reference_fx(prepared.eval())(BATCH))
    assert torch.equal(*outputs)


@pytest.mark.rule("CFG-14")
def test_observers_and_fake_quantizes_are_instances_of_torchs_base_classes_and_nothing_else_is() -> None:
    observers = [refimpl.MinMaxObserver(), refimpl.HistogramObserver(), refimpl.PlaceholderObserver()]
    fakes = [refimpl.FakeQuantize(), refimpl.FusedMovingAvgObsFakeQuantize()]
    assert all(isinstance(each, TORCH.ObserverBase) for each in observers)
    assert all(isinstance(each, TORCH.FakeQuantizeBase) for each in fakes)
    assert not any(isinstance(each, TORCH.FakeQuantizeBase) for each in observers)
    assert not any(isinstance(each, TORCH.ObserverBase) for each in fakes)
