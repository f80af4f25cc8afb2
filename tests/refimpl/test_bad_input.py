"""Bad input through the front door: one clear error that names the node or the entry, never a wrong model. (Shows 6)"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
import torch.ao.quantization.quantize_fx as torch_fx
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import ConfigError, ModelError, QConfig, QConfigError, QConfigMapping, RefimplError
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.both_core import Net, X


def net() -> nn.Module:
    return Net(lambda net, x: net.b(net.relu(net.a(x)))).eval()


def prepare(model: nn.Module | None = None, mapping: Any = None, inputs: Any = (X,), **options: Any) -> Any:
    return refimpl.prepare_fx(
        net() if model is None else model, flows.global_mapping() if mapping is None else mapping, inputs, **options
    )


class Looping(nn.Module):
    def forward(self, x: Any) -> Any:
        return x if x.sum() > 0 else -x


def not_a_qconfig(activation: Any, weight: Any = flows.QCONFIG.weight) -> Any:
    return QConfigMapping().set_global(QConfig(activation, weight))


def failing() -> nn.Module:
    raise RuntimeError("no memory")


def converted(activation: Any, weight: Any, run: Callable[..., Any] = lambda net, x: net.a(x)) -> Any:
    prepared = prepare(Net(run).eval(), not_a_qconfig(activation, weight))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it was not calibrated
        return refimpl.convert_to_reference_fx(prepared)


def channels(axis: Any, of: Any = refimpl) -> Any:
    return of.PerChannelMinMaxObserver.with_args(dtype=torch.qint8, ch_axis=axis)


def weight_function(net: Any, x: Any) -> Any:
    return F.linear(x, net.weight)


BOUNDED = refimpl.MinMaxObserver.with_args(quant_min=True)
WIDE = refimpl.FakeQuantize.with_args(quant_min=0, quant_max=1.5)

BAD: Mapping[str, tuple[Callable[[], Any], type[RefimplError], str]] = {
    "a model that cannot be traced": (lambda: prepare(Looping()), ModelError, "Looping cannot be traced by torch.fx"),
    "the same for training": (
        lambda: refimpl.prepare_qat_fx(Looping().train(), flows.global_mapping(), (X,)),
        ModelError,
        "Looping cannot be traced by torch.fx",
    ),
    "the same in fuse": (lambda: refimpl.fuse_fx(Looping().eval()), ModelError, "Looping cannot be traced"),
    "train mode for fuse": (lambda: refimpl.fuse_fx(net().train()), ModelError, r"fuse_fx needs a model in eval mode"),
    "a mapping that is none": (lambda: prepare(mapping=3), QConfigError, "expected a QConfigMapping, found 3"),
    "a config that is none": (lambda: prepare(backend_config=3), ConfigError, "expected a BackendConfig, found 3"),
    "a QConfig of instances": (
        lambda: prepare(mapping=not_a_qconfig(refimpl.MinMaxObserver())),
        QConfigError,
        "expected constructors|observer constructor",
    ),
    "a QConfig that is a number": (
        lambda: prepare(mapping=QConfigMapping().set_module_name("a", 3)),
        QConfigError,
        "expected constructors 'activation' and 'weight'",
    ),
    "a constructor that fails": (
        lambda: prepare(mapping=not_a_qconfig(failing)),
        QConfigError,
        r"the observer constructor .*failing.* raised \w+: no memory",
    ),
    "a weight's constructor that fails": (
        lambda: prepare(mapping=not_a_qconfig(flows.QCONFIG.activation, failing)),
        QConfigError,
        r"the observer constructor .*failing.* raised \w+: no memory",
    ),
    "a bound that is a flag": (
        lambda: converted(BOUNDED, flows.QCONFIG.weight),
        QConfigError,
        r"QConfig \(global\): MinMaxObserver.quant_min: expected a whole number or None, found True",
    ),
    "a fake quantize's bound with a fraction": (
        lambda: converted(WIDE, flows.QCONFIG.weight),
        QConfigError,
        r"QConfig \(global\): MovingAverageMinMaxObserver.quant_max: expected a whole number or None, found 1.5",
    ),
    "an axis that is a flag": (
        lambda: converted(flows.QCONFIG.activation, channels(True)),
        QConfigError,
        r"PerChannelMinMaxObserver.ch_axis: expected a whole number, found True",
    ),
    "an axis that a weight has not": (
        lambda: converted(flows.QCONFIG.activation, channels(127)),
        QConfigError,
        r"'a': ch_axis 127 is no axis of a tensor of shape \(4, 4\)",
    ),
    "the same of a torch's observer": (
        lambda: converted(flows.QCONFIG.activation, channels(127, flows.torchs)),
        QConfigError,
        r"'a': ch_axis 127 is no axis of a tensor of shape \(4, 4\)",
    ),
    "the same of a function's weight": (
        lambda: converted(flows.QCONFIG.activation, channels(127), weight_function),
        QConfigError,
        r"observer of 'weight' \(weight\): ch_axis 127 is no axis of a tensor of shape \(4, 4\)",
    ),
    "a regex that does not compile": (
        lambda: prepare(mapping=QConfigMapping().set_module_name_regex("a(", flows.QCONFIG)),
        QConfigError,
        r"module_name_regex 'a\(' does not compile",
    ),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.rule("OBS-15")
def test_bad_input_is_one_clear_error(what: str) -> None:
    call, kind, message = BAD[what]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.rule("CVT-02")
@pytest.mark.parametrize("of", [refimpl, flows.torchs], ids=["ours", "torch's"])
@pytest.mark.parametrize("run", [lambda net, x: net.a(x), weight_function], ids=["a layer", "a function"])
def test_a_weights_axis_may_be_counted_from_the_end_where_torchs_model_cannot_run(run: Any, of: Any) -> None:
    found = [converted(flows.QCONFIG.activation, channels(axis, of), run)(X) for axis in (-1, 1)]
    assert torch.equal(*found)
    qconfig = flows.torch_qconfigs.QConfig(activation=flows.QCONFIG.activation, weight=channels(-1, of))
    theirs: Any = torch_fx.prepare_fx(Net(run).eval(), flows.global_mapping(qconfig), (X,))
    theirs(X)
    with pytest.raises(RuntimeError, match="Channel axis out of range"):
        torch_fx.convert_to_reference_fx(theirs)(X)


@pytest.mark.rule("QCM-02")
def test_calls_are_counted_after_fusing_in_the_warning_as_in_the_decision() -> None:
    """Two pairs of Linear and ReLU are two fused calls of their roots' class, and no ReLU is left to be named."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()).eval()
    held = QConfigMapping().set_module_name_object_type_order("", nn.Linear, 1, flows.QCONFIG)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = refimpl.prepare_fx(model, held, (X,))
    assert [decision.is_quantized for decision in refimpl.explain(found).plan.decisions] == [False, True]
    idle = QConfigMapping().set_module_name_object_type_order("", nn.ReLU, 0, flows.QCONFIG)
    with pytest.warns(UserWarning, match=r"\('', ReLU, 0\) matches nothing"):
        refimpl.prepare_fx(model, idle, (X,))


@pytest.mark.rule("CVT-01")
@pytest.mark.parametrize("model", [nn.Linear(2, 2), torch.fx.symbolic_trace(nn.Linear(2, 2))], ids=["module", "traced"])
def test_convert_names_what_it_was_given(model: Any) -> None:
    with pytest.raises(ModelError, match=rf"convert: {type(model).__name__} was not made by refimpl's prepare_fx"):
        refimpl.convert_to_reference_fx(model)


def test_running_the_example_inputs_changes_neither_them_nor_buffers_nor_the_random_state() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.calls: Tensor

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x.add_(1), training=True) + self.calls.add_(1)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.noisy = Noisy()

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.noisy(x))

    model, inputs = Outer().eval(), torch.zeros(2)
    random = torch.random.get_rng_state()
    custom = refimpl.PrepareCustomConfig().set_non_traceable_module_classes([Noisy])
    refimpl.prepare_fx(model, flows.global_mapping(), (inputs,), custom)
    assert float(model.noisy.calls) == 0 and torch.equal(inputs, torch.zeros(2))
    assert torch.equal(random, torch.random.get_rng_state())
