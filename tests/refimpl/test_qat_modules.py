"""QAT modules and custom modules: into the model in prepare, out of it in convert (rules QAT-01 to QAT-03, CUS-01)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic
import torch.ao.nn.intrinsic.qat
import torch.ao.nn.qat as nnqat
import torch.ao.nn.quantized.reference as nnqr
import torch.ao.quantization.quantize_fx as torch_fx
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fx_quant_conformance.refimpl.convert.reference import make_reference
from fx_quant_conformance.refimpl.errors import ConfigError
from fx_quant_conformance.refimpl.graph.modules import float_module_of, make_qat_module, swap_module
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.one_layer import (
    FORMS,
    QAT,
    ROOTS,
    QConfig,
    assert_same_modules,
    facts,
    references,
    trained_by_torch,
)

nni: Any = torch.ao.nn.intrinsic  # their classes are not annotated
nniqat: Any = torch.ao.nn.intrinsic.qat

# Of each kind of QAT class: the float layers it comes from, and the classes in its reference module.
QAT_CASES: Mapping[type[nn.Module], tuple[Callable[[], list[nn.Module]], tuple[int, ...], list[type[nn.Module]]]] = {
    nnqat.Linear: (lambda: [nn.Linear(4, 3)], (4, 4), [nnqr.Linear]),
    nnqat.Conv2d: (lambda: [nn.Conv2d(2, 3, 2, bias=False)], (4, 2, 5, 5), [nnqr.Conv2d]),
    nniqat.LinearReLU: (lambda: [nn.Linear(4, 3), nn.ReLU()], (4, 4), [nni.LinearReLU, nnqr.Linear, nn.ReLU]),
    nniqat.LinearBn1d: (lambda: [nn.Linear(4, 3), nn.BatchNorm1d(3)], (4, 4), [nnqr.Linear]),
    nniqat.ConvReLU2d: (
        lambda: [nn.Conv2d(2, 3, 2), nn.ReLU()],
        (4, 2, 5, 5),
        [nni.ConvReLU2d, nnqr.Conv2d, nn.ReLU],
    ),
    nniqat.ConvBn2d: (lambda: [nn.Conv2d(2, 3, 2, bias=False), nn.BatchNorm2d(3)], (4, 2, 5, 5), [nnqr.Conv2d]),
    nniqat.ConvBnReLU2d: (
        lambda: [nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.ReLU()],
        (4, 2, 5, 5),
        [nni.ConvReLU2d, nnqr.Conv2d, nn.ReLU],
    ),
}


@pytest.mark.rule("QAT-02")
@pytest.mark.rule("QAT-03")
@pytest.mark.parametrize("qat_class", QAT_CASES, ids=lambda kind: kind.__name__)
def test_a_trained_qat_module_becomes_torchs_reference_module(qat_class: type[nn.Module]) -> None:
    torch.manual_seed(0)
    make, shape, classes = QAT_CASES[qat_class]
    value = torch.randn(shape)
    prepared = trained_by_torch(nn.Sequential(*make()), QAT, value)
    assert type(prepared.get_submodule("0")) is qat_class
    theirs = torch_fx.convert_to_reference_fx(copy.deepcopy(prepared), backend_config=flows.torch_config("x86"))
    (made,) = assert_same_modules(prepared, theirs, value, "x86", is_decomposed=False)
    assert [type(part) for part in made.modules()] == classes
    assert not any(part.training for part in made.modules())


@pytest.mark.rule("QAT-03")
@pytest.mark.parametrize("root", [nn.Embedding, nn.EmbeddingBag])
def test_a_trained_embedding_becomes_torchs_reference_module(root: type[nn.Module]) -> None:
    torch.manual_seed(0)
    make, inputs = ROOTS[root]
    qconfig = flows.torch_qconfigs.default_embedding_qat_qconfig
    prepared = trained_by_torch(nn.Sequential(make()), qconfig, inputs(), "native")
    theirs = torch_fx.convert_to_reference_fx(copy.deepcopy(prepared), backend_config=flows.torch_config("native"))
    (made,) = assert_same_modules(prepared, theirs, inputs(), "native", is_decomposed=False)
    assert type(made) is references("native")[root]


@pytest.mark.rule("CVT-07")
@pytest.mark.rule("QAT-03")
def test_torchs_decomposed_form_of_a_qat_module_has_other_numbers_and_ours_the_same() -> None:
    """torch's observer sees the trained weight once more in one form only: the forms' scales differ there."""
    torch.manual_seed(0)
    value = torch.randn(4, 4)
    prepared = trained_by_torch(nn.Sequential(nn.Linear(4, 3)), QAT, value)
    torchs: dict[bool, Any] = {form: FORMS[form](copy.deepcopy(prepared)).get_submodule("0") for form in FORMS}
    module: Any = prepared.get_submodule("0")
    ours: dict[bool, Any] = {
        form: make_reference(module, QAT, references("x86"), is_decomposed=form, where="0") for form in FORMS
    }
    assert not torch.equal(torchs[True].weight_scale, torchs[False].weight_scale)
    assert torch.equal(ours[True].weight_scale, ours[False].weight_scale)
    assert torch.equal(ours[False].weight_scale, torchs[False].weight_scale)
    assert torch.equal(ours[True].get_weight(), ours[False].get_weight())


@pytest.mark.rule("QAT-03")
def test_learned_qparams_that_are_frozen_are_taken_as_they_are() -> None:
    torch.manual_seed(0)
    prepared = trained_by_torch(nn.Sequential(nn.Linear(4, 3)), QAT, torch.randn(4, 4))
    module: Any = prepared.get_submodule("0")
    module.weight_fake_quant.disable_observer()
    learned, _ = module.weight_fake_quant.calculate_qparams()
    made: Any = make_reference(module, QAT, references("x86"), is_decomposed=False, where="0")
    assert torch.equal(made.weight_scale, learned)
    fixed = QConfig(activation=QAT.activation, weight=lambda: copy.deepcopy(module.weight_fake_quant))
    after: Any = make_reference(module.to_float(), fixed, references("x86"), is_decomposed=False, where="0")
    assert flows.same(facts(made), facts(after)), "as calibration alone would have it, with the learned qparams"


@pytest.mark.rule("QAT-02")
def test_a_qat_module_gives_its_float_module_with_batch_norm_folded() -> None:
    torch.manual_seed(0)
    value = torch.randn(4, 2, 5, 5)
    prepared = trained_by_torch(nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.ReLU()), QAT, value)
    module: Any = prepared.get_submodule("0")
    floating = float_module_of(module, where="0")
    assert type(floating) is nni.ConvReLU2d
    assert not floating.training
    bn = module.bn
    scale = (bn.weight / torch.sqrt(bn.running_var + bn.eps)).reshape(-1, 1, 1, 1)
    expected = torch.nn.functional.conv2d(value, module.weight * scale, None) + (
        (module.bias - bn.running_mean) * scale.flatten() + bn.bias
    ).reshape(1, -1, 1, 1)
    torch.testing.assert_close(floating(value), expected.relu())
    plain = nn.Linear(2, 2)
    assert float_module_of(plain, where="1") is plain, "what is not a QAT module is itself"


@pytest.mark.rule("QAT-01")
@pytest.mark.parametrize("qat_class", QAT_CASES, ids=lambda kind: kind.__name__)
def test_a_module_becomes_its_qat_class_and_shares_its_tensors(qat_class: Any) -> None:
    torch.manual_seed(0)
    make, shape, _ = QAT_CASES[qat_class]
    parts = make()
    fused = nni.LinearBn1d if qat_class is nniqat.LinearBn1d else qat_class._FLOAT_MODULE
    module = parts[0] if len(parts) == 1 else fused(*parts)
    before = copy.deepcopy(module.state_dict())
    made: Any = make_qat_module(module, QAT, qat_class, where="layer")
    assert type(made) is qat_class
    assert made.qconfig is QAT
    assert not hasattr(module, "qconfig")
    assert not any(hasattr(part, "qconfig") for part in module.modules()), "the user's module is not changed"
    assert {id(parameter) for parameter in made.parameters()} == {id(parameter) for parameter in module.parameters()}
    made(torch.randn(shape)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in module.parameters()), "training it trains the user's model"
    moved = {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}
    assert all("running" in name or "tracked" in name for name in moved), "a forward changes nothing but statistics"


@pytest.mark.rule("QAT-01")
@pytest.mark.parametrize("mode", [True, False])
def test_a_qat_module_is_in_the_mode_of_its_float_module_where_torchs_trains(mode: bool) -> None:
    """In an eval model torch's batch norm goes on with the statistics of the batch, and changes the running ones."""
    torch.manual_seed(0)
    value = torch.randn(4, 2, 5, 5)
    float_model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)).train(mode)
    theirs: Any = torch_fx.prepare_qat_fx(
        copy.deepcopy(float_model), flows.global_mapping(QAT), (value,), backend_config=flows.torch_config("x86")
    )
    assert theirs.get_submodule("0").training, "torch's is in train mode either way"
    fused = nni.ConvBn2d(*copy.deepcopy(float_model)).train(mode)
    made: Any = make_qat_module(fused, QAT, nniqat.ConvBn2d, where="0")
    assert made.training is mode
    assert made.bn.training is mode
    made(value)
    assert (int(made.bn.num_batches_tracked) == 1) is mode


@pytest.mark.rule("QAT-01")
def test_hooks_move_over_and_parametrizations_stay() -> None:
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    layer = nn.Linear(2, 2)
    parametrize.register_parametrization(layer, "weight", Double())
    calls: list[str] = []
    layer.register_forward_pre_hook(lambda _module, args, kwargs: calls.append(f"before {kwargs}"), with_kwargs=True)
    layer.register_forward_hook(lambda *_: calls.append("after"))
    made: Any = make_qat_module(layer, QAT, nnqat.Linear, where="layer")
    assert torch.equal(made.weight, layer.weight), "still parametrized"
    assert parametrize.is_parametrized(made, "weight")
    made(torch.randn(3, 2))
    assert calls == ["before {}", "after"]


@pytest.mark.rule("QAT-01")
def test_a_qat_class_that_does_not_fit_is_the_configs_fault() -> None:
    with pytest.raises(ConfigError, match=r"'body.0'.*Conv2d.from_float\(Linear\).*AssertionError"):
        make_qat_module(nn.Linear(2, 2), QAT, nnqat.Conv2d, where="body.0")


@pytest.mark.rule("QAT-02")
def test_a_to_float_that_fails_is_the_configs_fault() -> None:
    class Stuck(nnqat.Linear):
        def to_float(self) -> nn.Linear:
            raise RuntimeError("no way back")

    stuck = Stuck(2, 2, qconfig=QAT)
    with pytest.raises(ConfigError, match=r"'layer'.*Stuck.to_float.*no way back"):
        make_reference(stuck, QAT, references("x86"), is_decomposed=False, where="layer")


class Observed(nn.Module):
    """A custom module's observed class; its quantized class has from_observed."""

    def __init__(self, inner: nn.Module, qconfig: Any) -> None:
        super().__init__()
        self.inner, self.qconfig = inner, qconfig

    @classmethod
    def from_float(cls, module: Any) -> Observed:
        return cls(module, module.qconfig)

    @classmethod
    def from_observed(cls, module: Observed) -> Observed:
        return cls(module.inner, None)


@pytest.mark.rule("CUS-01")
def test_custom_modules_are_made_by_the_protocol_and_see_their_qconfig() -> None:
    layer = nn.Linear(2, 2)
    observed: Any = swap_module(layer, flows.QCONFIG, Observed, where="custom")
    assert observed.qconfig is flows.QCONFIG
    assert observed.inner.weight is layer.weight
    assert not hasattr(layer, "qconfig")
    made: Any = swap_module(observed, flows.QCONFIG, Observed, how="from_observed", where="custom")
    assert made.qconfig is None
    assert made.inner.weight is layer.weight
    with pytest.raises(ConfigError, match=r"'custom'.*Linear.*from_observed"):
        swap_module(observed, flows.QCONFIG, nn.Linear, how="from_observed", where="custom")
