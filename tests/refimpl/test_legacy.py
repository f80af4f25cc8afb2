"""The classes that take the place of torch's where torch has them no more, beside torch's, which are the oracle."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import legacy
from fx_quant_conformance.refimpl.legacy.dtypes import QuantizedDType, count_bits, find_dtype, is_dtype
from fx_quant_conformance.refimpl.legacy.weights import read_integers, to_plain
from fx_quant_conformance.refimpl.observers.default_qconfigs import default_embedding_fake_quant

PAIRS: Mapping[str, tuple[Any, SimpleNamespace]] = {
    "fused": (legacy.nni, legacy.own_classes("fused")),
    "qat": (legacy.nnqat, legacy.own_classes("qat")),
    "qat_dynamic": (legacy.nnqatd, legacy.own_classes("qat_dynamic")),
    "fused_qat": (legacy.nniqat, legacy.own_classes("fused_qat")),
    "reference": (legacy.nnqr, legacy.own_classes("reference")),
}
QCONFIG = refimpl.get_default_qat_qconfig("x86")
TABLE_QCONFIG = refimpl.QConfig(refimpl.PlaceholderObserver, default_embedding_fake_quant)
INPUTS = {"1d": (3, 4, 9), "2d": (3, 4, 7, 7), "3d": (2, 4, 5, 5, 5)}


def of_both(name: str, kind: str) -> tuple[Any, Any]:
    """Torch's class of a name and ours."""
    torchs, own = PAIRS[kind]
    return getattr(torchs, name), getattr(own, name)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(3)


@pytest.mark.parametrize("kind", PAIRS)
def test_there_is_one_for_each_of_torchs(kind: str) -> None:
    torchs, own = PAIRS[kind]
    named = {name for name, value in vars(torchs).items() if isinstance(value, type) or name.endswith("_bn_stats")}
    assert named == set(vars(own))
    assert all(pickle.loads(pickle.dumps(value)) is value for value in vars(own).values())


# -- fused and QAT modules --------------------------------------------------------------------------------------------


def make_norm(kind: str) -> Any:
    """A batch norm with statistics."""
    norm = getattr(nn, f"BatchNorm{kind}")(6)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.normal_()
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return norm


def make_parts(name: str) -> list[nn.Module]:
    """The parts of a fused module."""
    rank = name[-2:] if name[-2:] in INPUTS and "Conv" in name else "1d"
    bias = {"bias": "ReLU" in name}  # half of them have one
    root: nn.Module = (
        nn.Linear(4, 6, **bias) if "Linear" in name else getattr(nn, f"Conv{rank}")(4, 6, 3, groups=2, **bias)
    )
    return [root, *([make_norm(rank)] if "Bn" in name else []), *([nn.ReLU()] if "ReLU" in name else [])]


def input_of(name: str) -> Tensor:
    return torch.randn(5, 4) if "Linear" in name else torch.randn(INPUTS[name[-2:]])


def train(module: Any, x: Tensor, mode: bool) -> Iterator[Any]:
    """What it gives, its gradients and its state after two steps."""
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    for _ in range(2):
        optimizer.zero_grad()
        found = module.train(mode)(x)
        found.square().sum().backward()
        optimizer.step()
        yield found.detach()
    yield {name: value.grad for name, value in module.named_parameters()}
    yield module.state_dict()


FUSED_QAT = [name for name in vars(PAIRS["fused_qat"][1]) if not name.endswith("_stats")]


@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", FUSED_QAT)
def test_a_fused_module_trains_as_torchs(name: str, mode: bool) -> None:
    """The same bits: outputs, gradients, parameters, statistics, and the float module that comes of it."""
    parts, x, made = make_parts(name), input_of(name), []
    for fused, trainable in zip(of_both(name, "fused"), of_both(name, "fused_qat"), strict=True):
        module = fused(*copy.deepcopy(parts))
        module.qconfig = module[0].qconfig = QCONFIG
        made.append(trainable.from_float(module))
        assert all(made[-1].get_parameter(each) is module[0].get_parameter(each) for each in ("weight",))
    torchs, ours = (list(train(module, x, mode)) for module in made)
    torch.testing.assert_close(ours, torchs, rtol=0, atol=0)
    deployed = [module.eval().to_float() for module in made]
    assert type(deployed[0]).__name__ == type(deployed[1]).__name__
    torch.testing.assert_close(deployed[1](x), deployed[0](x), rtol=0, atol=0)


@pytest.mark.rule("QAT-05")
@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", [name for name in FUSED_QAT if "Conv" in name and "Bn" in name])
def test_a_batch_norm_without_weight_divides_by_nothing(name: str, mode: bool) -> None:
    """Sums of other order: float32's rounding apart, it is torch's."""
    parts, x, made = make_parts(name), input_of(name), []
    with torch.no_grad():
        parts[1].get_parameter("weight")[0] = 0
    for fused, trainable in zip(of_both(name, "fused"), of_both(name, "fused_qat"), strict=True):
        module = fused(*copy.deepcopy(parts))
        module.qconfig = module[0].qconfig = QCONFIG
        made.append(trainable.from_float(module))
        made[-1]._enable_slow_path_for_better_numerical_stability = True
    torchs, ours = (list(train(module, x, mode)) for module in made)
    torch.testing.assert_close(ours[0], torchs[0])
    assert ours[0].isfinite().all()
    torch.testing.assert_close(ours[-1]["bn.running_var"], torchs[-1]["bn.running_var"])


def test_statistics_can_be_frozen() -> None:
    for fused, trainable, freeze, update in zip(
        of_both("ConvBn2d", "fused"),
        of_both("ConvBn2d", "fused_qat"),
        of_both("freeze_bn_stats", "fused_qat"),
        of_both("update_bn_stats", "fused_qat"),
        strict=True,
    ):
        module = fused(*make_parts("ConvBn2d"))
        module.qconfig = module[0].qconfig = QCONFIG
        made = trainable.from_float(module).train()
        made.apply(freeze)
        assert (made.training, made.bn.training, made.train().bn.training) == (True, False, False)
        made.apply(update)
        assert (made.bn.training, made.eval().bn.training) == (True, False)


@pytest.mark.parametrize("name", ["Linear", "Conv1d", "Conv2d", "Conv3d"])
def test_a_layer_trains_as_torchs(name: str) -> None:
    layer, x, made = make_parts(name)[0], input_of(name), []
    for trainable in of_both(name, "qat"):
        module: Any = copy.deepcopy(layer)
        module.qconfig = QCONFIG
        made.append(trainable.from_float(module))
    torchs, ours = (list(train(module, x, True)) for module in made)
    torch.testing.assert_close(ours, torchs, rtol=0, atol=0)
    torch.testing.assert_close(made[1].to_float()(x), made[0].to_float()(x), rtol=0, atol=0)


@pytest.mark.parametrize("layer", [nn.Embedding(10, 4, padding_idx=2), nn.EmbeddingBag(10, 4, mode="sum")], ids=str)
def test_a_table_trains_as_torchs(layer: nn.Module) -> None:
    indices, made = torch.tensor([[1, 2, 9], [0, 3, 3]]), []
    for trainable in of_both(type(layer).__name__, "qat"):
        module: Any = copy.deepcopy(layer)
        module.qconfig = TABLE_QCONFIG
        made.append(trainable.from_float(module))
    torch.testing.assert_close(made[1](indices), made[0](indices), rtol=0, atol=0)
    own = of_both(type(layer).__name__, "qat")[1]
    module.qconfig = QCONFIG
    with pytest.raises(TypeError, match=r"needs a fake quantize of scheme torch\.per_channel_affine_float_qparams"):
        own.from_float(module)


def test_what_they_are_not_made_of_is_named() -> None:
    own = {kind: pair[1] for kind, pair in PAIRS.items()}
    with pytest.raises(TypeError, match=r"^ConvReLU2d is made of Conv2d, ReLU; found Conv1d, ReLU$"):
        own["fused"].ConvReLU2d(nn.Conv1d(1, 1, 1), nn.ReLU())
    with pytest.raises(TypeError, match=r"^Linear\.from_float takes Linear, found ReLU$"):
        own["qat"].Linear.from_float(nn.ReLU())
    with pytest.raises(TypeError, match=r"^Linear needs a qconfig, whose weight\(\) is the weight's fake quantize$"):
        own["qat"].Linear.from_float(nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"^ConvBn2d is made by from_float, of a ConvBn2d$"):
        own["fused_qat"].ConvBn2d(4, 6, 3, qconfig=QCONFIG)
    with pytest.raises(TypeError, match=r"^Linear needs a qconfig"):
        own["qat"].Linear(1, 1)


def test_a_sum_that_is_fused_takes_a_second_input() -> None:
    conv, x, y = nn.Conv2d(4, 6, 3), torch.randn(1, 4, 5, 5), torch.randn(1, 6, 3, 3)
    for name, rest in {"ConvAdd2d": (torch.add,), "ConvAddReLU2d": (torch.add, nn.ReLU())}.items():
        torchs, ours = (kind(conv, *rest)(x, y) for kind in of_both(name, "fused"))
        torch.testing.assert_close(ours, torchs, rtol=0, atol=0)


# -- reference modules ------------------------------------------------------------------------------------------------

LAYERS: Mapping[str, tuple[nn.Module, tuple[int, ...]]] = {
    "Linear": (nn.Linear(4, 6), (3, 4)),
    "Conv1d": (nn.Conv1d(4, 6, 3, bias=False), (3, 4, 9)),
    "Conv2d": (nn.Conv2d(4, 6, 3, stride=2, padding=1), (3, 4, 7, 7)),
    "Conv3d": (nn.Conv3d(4, 6, 2, groups=2), (2, 4, 5, 5, 5)),
    "ConvTranspose1d": (nn.ConvTranspose1d(4, 6, 3), (3, 4, 9)),
    "ConvTranspose2d": (nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), (3, 4, 7, 7)),
    "ConvTranspose3d": (nn.ConvTranspose3d(4, 6, 2), (2, 4, 5, 5, 5)),
}


def qparams_of(weight: Tensor, axis: int | None, dtype: Any, ends: tuple[int, int]) -> dict[str, Any]:
    """Qparams of a weight by its largest values, which reach beyond the range where it is narrow."""
    size = weight.abs().amax() if axis is None else weight.movedim(axis, 0).flatten(1).abs().amax(1)
    scheme = torch.per_tensor_affine if axis is None else torch.per_channel_affine
    scale = size.detach() / 100
    zero = torch.full_like(scale, 3 if dtype is legacy.quint8 else 0).long() + (100 if dtype is legacy.quint8 else 0)
    ranges = {"quant_min": ends[0], "quant_max": ends[1]}
    return {"qscheme": scheme, "dtype": dtype, "scale": scale, "zero_point": zero, "axis": axis or 0, **ranges}


@pytest.mark.rule("CVT-02")
@pytest.mark.parametrize("ends", [(-128, 127), (-90, 90)], ids=str)
@pytest.mark.parametrize("axis", [None, 0, 1], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_reference_layer_computes_as_torchs(name: str, axis: int | None, ends: tuple[int, int]) -> None:
    layer, shape = LAYERS[name]
    x, qparams = torch.randn(shape), qparams_of(layer.weight, axis, legacy.qint8, ends)  # type: ignore[arg-type]
    torchs, ours = (kind.from_float(layer, qparams | {"is_decomposed": True}) for kind in of_both(name, "reference"))
    assert torch.equal(ours.get_quantized_weight(), to_plain(torchs.get_quantized_weight()))
    assert torch.equal(read_integers(ours), read_integers(torchs)) and int(read_integers(ours).min()) >= ends[0]
    torch.testing.assert_close(ours.get_weight(), torchs.get_weight(), rtol=0, atol=0)
    torch.testing.assert_close(ours(x), torchs(x), rtol=0, atol=0)
    names = ("scale", "zero_point", "axis", "qscheme", "dtype", "axis_int", "quant_min", "quant_max")
    assert [str(getattr(ours, f"weight_{each}")) for each in names] == [
        str(getattr(torchs, f"weight_{each}")) for each in names
    ]
    assert ours.weight is not layer.weight and torch.equal(ours.weight, layer.get_parameter("weight"))


def test_a_weight_in_half_precision_is_left_as_it_is() -> None:
    layer: Any = nn.Linear(4, 6)
    qparams = {"qscheme": None, "dtype": torch.float16, "is_decomposed": False}
    torchs, ours = (kind.from_float(layer, qparams) for kind in of_both("Linear", "reference"))
    assert torch.equal(ours.get_weight(), torchs.get_weight()) and torch.equal(ours.get_weight(), layer.weight)
    assert torch.equal(read_integers(ours), read_integers(torchs)) and read_integers(ours).dtype is torch.float16


@pytest.mark.parametrize("dtype", ["quint8", "quint4x2"])
@pytest.mark.parametrize("layer", [nn.Embedding(10, 4), nn.EmbeddingBag(10, 4, mode="mean")], ids=str)
def test_a_reference_table_computes_as_torchs(layer: nn.Module, dtype: str) -> None:
    """Its zero points are real numbers; torch packs integers of four bits, two to a byte."""
    steps = 15 if dtype == "quint4x2" else 255
    weight: Any = layer.weight
    low, high = weight.detach().amin(1), weight.detach().amax(1)
    scale = (high - low) / steps
    scheme = torch.per_channel_affine_float_qparams
    qparams = {"qscheme": scheme, "dtype": find_dtype(dtype), "scale": scale, "zero_point": -low / scale, "axis": 0}
    name, indices = type(layer).__name__, torch.tensor([[1, 2, 9], [0, 3, 3]])
    torchs, ours = (kind.from_float(layer, qparams | {"is_decomposed": False}) for kind in of_both(name, "reference"))
    assert torch.equal(read_integers(ours), read_integers(torchs)) and int(read_integers(ours).max()) <= steps
    torch.testing.assert_close(ours(indices), torchs(indices))


RECURRENT: Mapping[str, tuple[nn.Module, tuple[int, ...]]] = {
    "LSTM": (nn.LSTM(4, 3, 2, bidirectional=True), (5, 2, 4)),
    "GRU": (nn.GRU(4, 3, bias=False), (5, 2, 4)),
    "LSTMCell": (nn.LSTMCell(4, 3), (2, 4)),
    "GRUCell": (nn.GRUCell(4, 3), (4,)),
    "RNNCell": (nn.RNNCell(4, 3, nonlinearity="relu"), (2, 4)),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_reference_module_computes_as_torchs(name: str) -> None:
    layer, shape = RECURRENT[name]
    weights = {key: value for key, value in layer.named_parameters() if key.startswith("weight")}
    qparams: dict[str, Any] = {key: qparams_of(value, 0, legacy.qint8, (-128, 127)) for key, value in weights.items()}
    for each in qparams.values():
        each.update({key: value.tolist() for key, value in each.items() if isinstance(value, Tensor)})
    qparams["is_decomposed"] = False
    torchs, ours = (kind.from_float(layer, copy.deepcopy(qparams)) for kind in of_both(name, "reference"))
    for key in weights:
        assert torch.equal(read_integers(ours, key), read_integers(torchs, key))
    x = torch.randn(shape)
    torch.testing.assert_close(ours(x), torchs(x if x.dim() > 1 else x[None]) if x.dim() > 1 else torchs(x))


# -- dtypes -----------------------------------------------------------------------------------------------------------


def test_a_dtype_that_is_gone_is_one_object_with_torchs_spelling() -> None:
    """So claims, messages and files compare."""
    gone: Any = QuantizedDType("qint8")
    assert str(gone) == str(torch.qint8) and is_dtype(gone) and is_dtype(torch.qint8) and not is_dtype("qint8")
    assert copy.deepcopy(gone) is copy.copy(gone) is gone and gone is not QuantizedDType("qint8")
    assert pickle.loads(pickle.dumps(gone)) is find_dtype("qint8") is legacy.qint8
    assert [count_bits(QuantizedDType(name)) for name in ("quint8", "qint32", "quint4x2")] == [
        torch.iinfo(dtype).bits for dtype in (torch.quint8, torch.qint32, torch.quint4x2)
    ]
    with pytest.raises(TypeError, match=r"^expected the name of a dtype, such as 'int8', found 'linear'$"):
        find_dtype("linear")


def test_the_front_door_has_them() -> None:
    assert refimpl.nnqr is legacy.nnqr and refimpl.qint8 is legacy.qint8 is torch.qint8
    assert refimpl.nni.LinearReLU is torch.nn.intrinsic.LinearReLU
