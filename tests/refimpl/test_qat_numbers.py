"""The numbers of a trained model: convert takes what training learned, and nothing else (rules QAT-01 to QAT-03)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import refimpl
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.one_layer import FORMS, NAMED, QAT, TORCH_FX, QConfig

OURS: Mapping[bool, Any] = {
    False: refimpl.convert_to_reference_fx,
    True: refimpl.convert_to_reference_decomposed_fx,
}
# Their ranges are those of their dtypes, so that both forms and torch agree (CVT-09).
PER_CHANNEL: Any = NAMED.get_default_qat_qconfig("onednn")
QNNPACK: Any = NAMED.get_default_qat_qconfig("qnnpack")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        return self.head(torch.relu(self.body(y) + y).mean((2, 3)))  # type: ignore[no-any-return]


NETS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), (8, 6)),
    "normed linear": (lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), (8, 6)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.ReLU(), nn.Conv1d(3, 2, 2)), (4, 2, 7)),
    "conv net": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)
        ),
        (4, 2, 6, 6),
    ),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3), nn.Flatten(), nn.Linear(24, 2)),
        (2, 2, 3, 3, 3),
    ),
    "residual": (Residual, (4, 2, 5, 5)),
}
each_net = pytest.mark.parametrize("name", NETS)


def train(prepared: Any, inputs: Tensor, steps: int = 3) -> Any:
    """Train for some steps, then go to eval mode."""
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        prepared(inputs).square().mean().backward()
        optimizer.step()
    return prepared.eval()


def both_trained(name: str, qconfig: Any, engine: str) -> tuple[Any, Any, Tensor]:
    """The same net through torch's prepare_qat_fx and ours, trained alike: (torch's, ours, inputs)."""
    torch.manual_seed(0)
    make, shape = NETS[name]
    model, inputs = make().train(), torch.randn(shape)
    mapping, config = flows.global_mapping(qconfig), flows.torch_config(engine)
    theirs = TORCH_FX.prepare_qat_fx(copy.deepcopy(model), mapping, (inputs,), backend_config=config)
    ours = refimpl.prepare_qat_fx(copy.deepcopy(model), mapping, (inputs,), backend_config=config)
    return train(theirs, inputs), train(ours, inputs), inputs


@pytest.mark.slow
@pytest.mark.rule("QAT-01")
@pytest.mark.rule("QAT-02")
@pytest.mark.rule("QAT-03")
@pytest.mark.parametrize(
    ("engine", "qconfig"), [("native", PER_CHANNEL), ("qnnpack", QNNPACK)], ids=["per channel", "per tensor"]
)
@each_net
def test_training_and_convert_give_torchs_bits(name: str, engine: str, qconfig: Any) -> None:
    theirs, ours, inputs = both_trained(name, qconfig, engine)
    with torch.no_grad():
        assert flows.same(ours(inputs), theirs(inputs)), "the trained models differ"
        made = OURS[False](ours)
        expected = FORMS[False](copy.deepcopy(theirs), backend_config=flows.torch_config(engine))
        assert flows.kinds(made) == flows.kinds(expected)
        assert flows.qparams(made) == flows.qparams(expected)
        assert flows.same(made(inputs), expected(inputs)), "the reference models differ"


@pytest.mark.slow
@pytest.mark.rule("QAT-03")
@each_net
def test_convert_of_a_trained_model_is_ptq_convert_of_it_with_the_learned_qparams(name: str) -> None:
    """Training went on in the float model's own tensors: prepare that model for calibration, and in place of observers
    put the fake quantizes as they were trained, frozen."""
    torch.manual_seed(0)
    make, shape = NETS[name]
    model, inputs = make().train(), torch.randn(shape)
    config = flows.torch_config("x86")
    trained: Any = refimpl.prepare_qat_fx(model, flows.global_mapping(QAT), (inputs,), backend_config=config)
    train(trained, inputs)
    mapping = flows.global_mapping(QAT)
    for target, part in trained.named_modules():
        if hasattr(part, "observer_enabled"):
            part.disable_observer()
        if hasattr(part, "weight_fake_quant"):
            mapping.set_module_name(target, QConfig(activation=QAT.activation, weight=_always(part.weight_fake_quant)))
    calibrated: Any = refimpl.prepare_fx(model.eval(), mapping, (inputs,), backend_config=config)
    for target, _ in list(calibrated.named_modules(remove_duplicate=False)):
        if target.startswith("activation_post_process") and "." not in target:
            calibrated.set_submodule(target, trained.get_submodule(target))
    with torch.no_grad():
        expected, made = OURS[False](calibrated), OURS[False](trained)
        assert flows.kinds(made) == flows.kinds(expected)
        assert flows.qparams(made) == flows.qparams(expected)
        assert flows.same(made(inputs), expected(inputs))


def _always(observer: nn.Module) -> Callable[[], nn.Module]:
    return lambda: observer


@pytest.mark.rule("QAT-03")
@pytest.mark.rule("CVT-07")
@each_net
def test_both_forms_of_a_trained_model_give_the_same_bits(name: str) -> None:
    _, ours, inputs = both_trained(name, QNNPACK, "qnnpack")
    with torch.no_grad():
        assert flows.same(OURS[False](ours)(inputs), OURS[True](ours)(inputs))


@pytest.mark.rule("QAT-03")
@each_net
def test_convert_leaves_the_trained_model_as_it_was_and_gives_the_same_twice(name: str) -> None:
    _, ours, inputs = both_trained(name, QAT, "x86")
    before = copy.deepcopy(ours.state_dict())
    with torch.no_grad():
        first, second = OURS[False](ours)(inputs), OURS[False](ours)(inputs)
    assert flows.same(first, second)
    assert flows.same(dict(ours.state_dict()), dict(before)), "observers of the trained model saw the weight once more"
