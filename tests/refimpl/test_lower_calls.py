"""Lowering: modules called at several places, dropout, and the warning of what is left in float (LOW-03, LOW-04)."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as torch_fx
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl.graph.tracing import NOT_LOWERED
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.lowering import Net, X, an_engine, float_ops, small, torch_lowered  # noqa: F401  (a fixture)


def targets(model: Any) -> list[str]:
    """The modules that a graph calls, in order."""
    return [str(node.target) for node in model.graph.nodes if node.op == "call_module"]


@pytest.mark.rule("LOW-04")
def test_convert_warns_once_of_what_stays_in_float_and_names_the_first(engine: str) -> None:
    flow, _ = small(Net(lambda net, x: net.same(net.same(x))).eval(), [(X,)])
    with pytest.warns(UserWarning) as told:
        refimpl.convert_fx(flow.prepared)
    (message,) = [str(each.message) for each in told if "not lowered:" in str(each.message)]
    assert message.startswith("convert_fx: not lowered: same (Conv2d): LOW-03: padding 'same'")
    assert message.endswith("and 1 more; meta['not_lowered'] of the result lists all")
    flow, _ = small(Net(lambda net, x: net.conv(x)).eval(), [(X,)])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not lowered")
        refimpl.convert_fx(flow.prepared)


@pytest.mark.rule("LOW-03")
def test_a_module_called_at_several_places_is_lowered_for_each_with_its_own_qparams(engine: str) -> None:
    """Torch gives one module the output scale of one of the calls, and leaves the other in float."""

    def run(net: Any, x: Tensor) -> Any:
        return net.conv(F.relu(net.conv(x) * 3.0)), net.other(x)

    flow, _ = small(Net(run).eval(), [(X,)])
    lowered = refimpl.convert_fx(flow.prepared)
    assert lowered.meta[NOT_LOWERED] == () and not float_ops(lowered)
    assert targets(lowered) == ["conv_0", "conv_1", "other"] and not hasattr(lowered, "conv")
    made: list[Any] = [lowered.get_submodule(name) for name in ("conv_0", "conv_1")]
    scales = [numbers[1][0] for numbers in flows.qparams(flow.reference)]
    assert made[0].scale != made[1].scale and {made[0].scale, made[1].scale} <= set(scales)
    again = copy.deepcopy(lowered)
    again.load_state_dict(lowered.state_dict())
    with torch.no_grad():
        for found, loaded, expected in zip(lowered(X), again(X), flow(X), strict=True):
            assert (found - expected).abs().max() <= 1.01 * max(scales)
            assert torch.equal(found, loaded)


class Classifier(nn.Module):
    """What stands before SqueezeNet's classifier: the cat shares its input's observer, the dropout has its own."""

    def __init__(self, is_module: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.three, self.last = nn.Conv2d(2, 4, 1), nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(8, 3, 1)
        self.drop: Any = nn.Dropout(0.5) if is_module else lambda x: F.dropout(x, 0.5, training=False)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.drop(torch.cat([F.relu(self.one(x)), F.relu(self.three(3 * x))], 1)))


@pytest.mark.rule("LOW-03")
@pytest.mark.parametrize("is_module", [True, False])
def test_a_dropout_that_never_drops_passes_its_quantized_input_on_as_torchs_does(is_module: bool, engine: str) -> None:
    model = Classifier(is_module).eval()
    averaging = flows.torchs.MovingAverageMinMaxObserver.with_args(averaging_constant=0.5)
    mapping = flows.global_mapping(flows.torch_qconfigs.QConfig(averaging, flows.QCONFIG.weight))
    flow = flows.our_flow(model, mapping, [(X,), (2 * X,)])
    slots = {slot.value: slot.name for slot in refimpl.explain(flow.prepared).plan.slots}
    observers: list[Any] = [
        flow.prepared.get_submodule(slots[value]) for value in ("cat", "drop" if is_module else "dropout")
    ]
    assert observers[0].calculate_qparams() != observers[1].calculate_qparams(), "else nothing is dropped"
    lowered, torchs = refimpl.convert_fx(flow.prepared), torch_lowered(model, mapping, [(X,), (2 * X,)])
    assert lowered.meta[NOT_LOWERED] == () and not float_ops(lowered)
    with torch.no_grad():
        assert torch.equal(lowered(X), torchs(X))
        assert torch.equal(refimpl.lower(flow.reference)(X), torchs(X))
        strict = refimpl.lower(flow.reference, keep_dropout=True)
        assert torch.equal(strict(X), flow.reference(X)) and not torch.equal(strict(X), lowered(X))
    (entry,) = strict.meta[NOT_LOWERED]
    assert entry.node == ("drop" if is_module else "dropout") and "differ in qparams" in entry.reason


@pytest.mark.rule("LOW-01")
def test_prepare_warns_of_a_transposed_convolution_with_weights_per_channel() -> None:
    """Torch's prepare raises; here a vendor's config may claim it, and then nothing is said."""
    model = nn.Sequential(nn.ConvTranspose2d(2, 2, 3)).eval()
    by_channel, by_default = flows.global_mapping(flows.PER_CHANNEL), refimpl.get_default_qconfig_mapping("x86")
    with pytest.raises(AssertionError, match="Per channel weight observer is not supported"):
        torch_fx.prepare_fx(model, by_channel, (X,))
    with pytest.warns(UserWarning, match=r"0 \(ConvTranspose2d\): the QConfig of global observes its weight"):
        refimpl.prepare_fx(model, by_channel, (X,))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*per channel")
        refimpl.prepare_fx(model, by_default, (X,))
        refimpl.prepare_fx(model, by_channel, (X,), backend_config=refimpl.default_backend_config())
