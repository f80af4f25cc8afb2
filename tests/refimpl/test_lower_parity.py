"""Lowering held against torch's, on reference models that torch made: same graph, same state dict keys, same bits.

The expectation is torch's own convert_fx of the same prepared model (rules LOW-01, LOW-02, CVT-03, CVT-04, CVT-11).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as torch_fx
import torch.nn.functional as F
from torch import Tensor, nn

from refimpl.lower import NOT_LOWERED, lower
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.canonical import canonical, difference

X3, X4, X5 = (
    torch.randn(2, 4, *size, generator=torch.Generator().manual_seed(1)) for size in ((8,), (8, 8), (5, 6, 6))
)
X2 = X3[:, :, 0]
DYNAMIC = flows.torch_qconfigs.default_dynamic_qconfig
FLOAT16 = flows.torch_qconfigs.float16_dynamic_qconfig


@pytest.fixture
def set_engine() -> Iterator[Callable[[str], None]]:
    """Set the quantized engine for one test, and put the old one back."""
    before = torch.backends.quantized.engine

    def choose(name: str) -> None:
        if name not in torch.backends.quantized.supported_engines:
            pytest.skip(f"this build of torch has no engine {name}")
        torch.backends.quantized.engine = name

    yield choose
    torch.backends.quantized.engine = before


class Net(nn.Module):
    """A convolution (or nothing), then what a test gives: a function of the model and its input."""

    def __init__(self, run: Callable[..., Any], *parts: nn.Module, weights: tuple[tuple[int, ...], ...] = ()) -> None:
        super().__init__()
        self.run, self.parts = run, nn.ModuleList(parts)
        for index, shape in enumerate(weights):
            value = torch.randn(shape, generator=torch.Generator().manual_seed(index))
            setattr(self, f"w{index}", nn.Parameter(value))

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def fixed_mapping() -> Any:
    """MinMax everywhere, and torch's QConfigs where it has special ones: fixed qparams, PReLU, norms."""
    return flows.torch_mappings.get_default_qconfig_mapping("x86").set_global(flows.PER_CHANNEL)


def both(model: nn.Module, mapping: Any, batch: tuple[Any, ...], config: str = "native") -> tuple[Any, Any, Any]:
    """Return torch's reference model, our lowering of it, and torch's lowered model."""
    backend_config = flows.torch_config(config)
    prepared = torch_fx.prepare_fx(copy.deepcopy(model).eval(), mapping, batch, backend_config=backend_config)
    flows.calibrate(prepared, [batch])
    arguments = {"backend_config": backend_config, "_remove_qconfig": False}
    reference = torch_fx.convert_to_reference_fx(copy.deepcopy(prepared), **arguments)
    return reference, lower(reference), torch_fx.convert_fx(copy.deepcopy(prepared), **arguments)


def assert_same(ours: Any, theirs: Any, batch: tuple[Any, ...]) -> None:
    expected, found = canonical(theirs), canonical(ours)
    assert [line.structure for line in found] == [line.structure for line in expected], difference(expected, found)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    with torch.no_grad():
        assert flows.same(ours(*batch), theirs(*batch)), "same graph, other bits"


def on(x: Tensor, run: Callable[..., Any], *parts: nn.Module, weights: Any = ()) -> tuple[nn.Module, Tensor]:
    return Net(run, *parts, weights=weights), x


def sequence(x: Tensor, *parts: nn.Module) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*parts), x


def spatial(rank: int, x: Tensor) -> Iterator[tuple[str, tuple[nn.Module, Tensor]]]:
    """Layers and functions that there are in one, two and three dimensions."""
    conv, transposed, bn = (getattr(nn, f"{name}{rank}d") for name in ("Conv", "ConvTranspose", "BatchNorm"))
    f_conv, f_transposed = getattr(F, f"conv{rank}d"), getattr(F, f"conv_transpose{rank}d")
    one, two = (1,) * rank, (2,) * rank
    weights = ((6, 4, *[3] * rank), (6,))
    yield "conv", sequence(x, conv(4, 6, 3, padding=1))
    yield "conv reflect", sequence(x, conv(4, 6, 3, padding=1, padding_mode="reflect" if rank < 3 else "zeros"))
    yield "conv relu", sequence(x, conv(4, 6, 3, bias=False), nn.ReLU())
    yield "conv bn relu", sequence(x, conv(4, 6, 3, groups=2), bn(6), nn.ReLU())
    yield "transposed", sequence(x, transposed(4, 6, 3, stride=2, output_padding=1))
    yield "instance norm", sequence(x, getattr(nn, f"InstanceNorm{rank}d")(4, affine=rank > 1))
    yield "f conv", on(x, lambda m, y: f_conv(y, m.w0, m.w1, one, one, one, 1), weights=weights)
    yield "f conv relu", on(x, lambda m, y: F.relu(f_conv(y, m.w0, m.w1, two, one, one, 1)), weights=weights)
    run = lambda m, y: m.parts[0](f_conv(y, m.w0, bias=m.w1, stride=two, padding=one, dilation=one, groups=1))  # noqa: E731
    yield "f conv by keyword", on(x, run, nn.ReLU(), weights=weights)
    run = lambda m, y: f_transposed(y, m.w0, m.w1, two, one, one, 1, one)  # noqa: E731
    yield "f transposed", on(x, run, weights=((4, 6, *[3] * rank), (6,)))
    for name in ("MaxPool", "AvgPool", "AdaptiveAvgPool"):
        yield name, sequence(x, conv(4, 4, 1), getattr(nn, f"{name}{rank}d")(2))
    for name in ("max_pool", "avg_pool", "adaptive_avg_pool"):
        pool = getattr(F, f"{name}{rank}d")
        yield name, on(x, lambda m, y, pool=pool: pool(m.parts[0](y), 2), conv(4, 4, 1))
    if rank > 1:
        yield "bn", sequence(x, bn(4))
        yield "bn relu", sequence(x, bn(4), nn.ReLU())


MODULES = [
    nn.ELU(0.7), nn.LeakyReLU(0.2), nn.LeakyReLU(0.2, inplace=True), nn.Hardswish(), nn.Dropout(0.3), nn.PReLU(),
    nn.Hardsigmoid(), nn.Sigmoid(), nn.Tanh(), nn.Softmax(1), nn.Hardtanh(-0.5, 0.5), nn.Identity(), nn.ReLU(),
    nn.PixelShuffle(2), nn.PixelUnshuffle(2), nn.ReLU(inplace=True), nn.ReLU6(), nn.LayerNorm(8), nn.GroupNorm(2, 4),
    nn.LayerNorm([8, 8], elementwise_affine=False), nn.ChannelShuffle(2), nn.GELU(), nn.Flatten(),
]  # fmt: skip
FUNCTIONS: Mapping[str, Callable[[Tensor], Any]] = {
    "elu": lambda x: F.elu(x, 0.7, inplace=True), "hardswish": lambda x: F.hardswish(x, inplace=True),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2, True), "dropout": lambda x: F.dropout(x, 0.3, training=False),
    "group_norm": lambda x: F.group_norm(x, 2), "instance_norm": lambda x: F.instance_norm(x),
    "layer_norm": lambda x: F.layer_norm(x, [8]), "hardsigmoid": lambda x: F.hardsigmoid(x, inplace=True),
    "torch.sigmoid": torch.sigmoid, "x.sigmoid": lambda x: x.sigmoid(), "torch.tanh": torch.tanh,
    "x.tanh": lambda x: x.tanh(), "softmax": lambda x: F.softmax(x, 1), "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.5),
    "hardtanh_": lambda x: F.hardtanh_(x, -0.5, 0.5), "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), "relu6": F.relu6, "relu": F.relu,
    "x.relu_": lambda x: x.relu_(), "clamp": lambda x: torch.clamp(x, -0.5, 0.5), "x.clamp": lambda x: x.clamp(max=0.5),
    "flatten": lambda x: torch.flatten(x, 1), "x.flatten": lambda x: x.flatten(1),
    "mean": lambda x: torch.mean(x, (2, 3)),
    "x.mean": lambda x: x.mean([2, 3], keepdim=True), "narrow": lambda x: torch.narrow(x, 1, 0, 2),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, 2, 1), "transpose": lambda x: torch.transpose(x, 1, 2),
    "stack": lambda x: torch.stack([x, x], 1), "squeeze": torch.squeeze, "unsqueeze": lambda x: torch.unsqueeze(x, 0),
    "contiguous": lambda x: x.contiguous(),
    "detach_": lambda x: x.detach_(), "permute": lambda x: x.permute(0, 2, 3, 1),
    "repeat": lambda x: x.repeat(1, 2, 1, 1), "reshape": lambda x: x.reshape(x.size(0), -1, x.shape[1]),
    "resize_": lambda x: x.resize_(2, 256), "unsqueeze_": lambda x: x.unsqueeze_(1),
    "cat": lambda x: torch.cat([x, x], 1),
    "getitem": lambda x: x[:, 1:], "size": lambda x: x * x.size(1), "dim": lambda x: x.reshape(x.dim(), -1),
    "sub": lambda x: x - 1, "abs": lambda x: x.abs(), "channel_shuffle": lambda x: torch.channel_shuffle(x, 2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "same": lambda x: x * x, "number": lambda x: torch.add(2, F.relu(x * 2)),
    "number relu": lambda x: F.relu(0.5 + x), "iadd": lambda x: x.__class__.__add__(x, 1) * 2,
    "matmul": lambda x: F.relu(torch.matmul(x, x.transpose(2, 3))), "operator.matmul": lambda x: x @ x,
}  # fmt: skip
BINARY: Mapping[str, Callable[..., Any]] = {
    "+": lambda m, x: m.parts[0](x) + x, "add": lambda m, x: torch.add(m.parts[0](x), x),
    "* relu": lambda m, x: F.relu(m.parts[0](x) * x), "mul relu": lambda m, x: torch.relu(torch.mul(m.parts[0](x), x)),
    "+ relu": lambda m, x: m.parts[1](m.parts[0](x) + x), "add relu": lambda m, x: F.relu(torch.add(m.parts[0](x), x)),
}  # fmt: skip


def cases() -> Iterator[tuple[str, tuple[nn.Module, Tensor]]]:
    for rank, x in enumerate((X3, X4, X5), 1):
        yield from ((f"{name} {rank}d", case) for name, case in spatial(rank, x))
    for part in MODULES:
        yield str(part), sequence(X4, nn.Conv2d(4, 4, 1), part)
    for name, function in FUNCTIONS.items():
        yield name, on(X4, lambda m, x, f=function: f(m.parts[0](x)), nn.Conv2d(4, 4, 1))
    for name, run in BINARY.items():
        yield name, on(X4, run, nn.Conv2d(4, 4, 1), nn.ReLU())
    yield "linear", sequence(X2, nn.Linear(4, 3))
    yield "linear bn", sequence(X2, nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3))
    yield "linear relu", sequence(X2, nn.Linear(4, 3), nn.ReLU())
    yield "f linear", on(X2, lambda m, x: F.linear(x, m.w0, m.w1), weights=((3, 4), (3,)))
    yield "f linear relu", on(X2, lambda m, x: m.parts[0](F.linear(x, m.w0)), nn.ReLU(), weights=((3, 4),))
    yield "computed weight", on(X2, lambda m, x: F.linear(x, m.w0 * 2 + 1, bias=m.w1), weights=((3, 4), (3,)))


STATIC = dict(cases())


@pytest.mark.slow
@pytest.mark.rule("LOW-01")
@pytest.mark.rule("LOW-02")
@pytest.mark.parametrize("name", STATIC)
def test_every_static_op_is_lowered_as_torch_does(name: str, set_engine: Any) -> None:
    set_engine("fbgemm")
    model, x = STATIC[name]
    _, ours, theirs = both(model, fixed_mapping(), (x,))
    assert_same(ours, theirs, (x,))


@pytest.mark.rule("LOW-01")
@pytest.mark.parametrize("engine", ["x86", "onednn", "qnnpack"])
@pytest.mark.parametrize("name", ["conv relu 2d", "f conv by keyword 2d", "transposed 1d", "linear", "+ relu", "mean"])
def test_every_engine_packs_for_itself(name: str, engine: str, set_engine: Any) -> None:
    set_engine(engine)
    model, x = STATIC[name if (name, engine) != ("transposed 1d", "onednn") else "conv 1d"]
    _, ours, theirs = both(model, fixed_mapping(), (x,), engine)
    assert_same(ours, theirs, (x,))


ONEDNN: Mapping[str, tuple[nn.Module, Tensor]] = {
    "leaky": sequence(X2, nn.Linear(4, 3), nn.LeakyReLU(0.1)),
    "tanh": sequence(X2, nn.Linear(4, 3), nn.Tanh()),
    "f leaky": on(X2, lambda m, x: F.leaky_relu(F.linear(x, m.w0), 0.1), weights=((3, 4),)),
    "conv + x": on(X4, lambda m, x: m.parts[0](x) + m.parts[1](x), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)),
    "x + conv": on(X4, lambda m, x: torch.add(x, m.parts[0](x)), nn.Conv2d(4, 4, 1)),
    "relu(conv + x)": on(X4, lambda m, x: m.parts[1](m.parts[0](x) + x), nn.Conv2d(4, 4, 1), nn.ReLU()),
}


@pytest.mark.rule("LOW-01")
@pytest.mark.parametrize("name", ONEDNN)
def test_the_fused_modules_of_onednn(name: str, set_engine: Any) -> None:
    set_engine("onednn")
    model, x = ONEDNN[name]
    _, ours, theirs = both(model, flows.global_mapping(), (x,), "onednn")
    assert_same(ours, theirs, (x,))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = (
            nn.LSTM(4, 4, 2, batch_first=True, bidirectional=True, dropout=0.5),
            nn.GRU(8, 4, batch_first=True),
        )
        self.cells = nn.ModuleList([nn.LSTMCell(4, 4), nn.GRUCell(4, 4), nn.RNNCell(4, 4, nonlinearity="relu")])

    def forward(self, x: Tensor) -> Any:
        y, (h, c) = self.lstm(x)
        z, _ = self.gru(y)
        h, c = self.cells[0](z[:, 0], (h[0], c[0]))
        return self.cells[2](self.cells[1](h, c))


RUN_TIME: Mapping[str, tuple[nn.Module, Tensor]] = {
    "linear": sequence(X2, nn.Linear(4, 3), nn.Linear(3, 3, bias=False), nn.ReLU()),
    "function": on(X2, lambda m, x: F.relu(F.linear(F.linear(x, m.w0, m.w1), m.w2)), weights=((4, 4), (4,), (3, 4))),
    "by keyword": on(X2, lambda m, x: m.parts[0](F.linear(x, m.w0, bias=m.w1)), nn.ReLU(), weights=((4, 4), (4,))),
    "torch.relu": on(X2, lambda m, x: torch.relu(F.linear(x, m.w0)), weights=((4, 4),)),
    "called twice": on(X2, lambda m, x: m.parts[0](m.parts[0](x)), nn.Linear(4, 4)),
    "recurrent": (Recurrent(), X3[:, :, :4]),
}


@pytest.mark.rule("LOW-02")
@pytest.mark.rule("CVT-03")
@pytest.mark.rule("CVT-04")
@pytest.mark.parametrize(  # qnnpack has no float16
    ("qconfig", "engine"),
    [(DYNAMIC, "fbgemm"), (DYNAMIC, "qnnpack"), (FLOAT16, "fbgemm")],
    ids=["8", "8 qnnpack", "16"],
)
@pytest.mark.parametrize("name", RUN_TIME)
def test_dynamic_ops_are_lowered_as_torch_does(name: str, qconfig: Any, engine: str, set_engine: Any) -> None:
    set_engine(engine)
    model, x = RUN_TIME[name]
    _, ours, theirs = both(model, flows.global_mapping(qconfig), (x,))
    assert ours.meta[NOT_LOWERED] == ()
    assert_same(ours, theirs, (x,))


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(10, 12)
        self.bag = nn.EmbeddingBag(10, 12, mode="sum", include_last_offset=True)
        self.first, self.second = nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, index: Tensor, offsets: Tensor) -> Any:
        return self.first(self.one(index)), self.second(self.bag(index, offsets)), self.one(offsets)


@pytest.mark.rule("LOW-02")
@pytest.mark.rule("CVT-11")
@pytest.mark.parametrize("bits", [8, 4])
def test_embeddings_quantize_the_weight_alone(bits: int, set_engine: Any) -> None:
    set_engine("fbgemm")
    suffix = "" if bits == 8 else "_4bit"
    qconfig = getattr(flows.torch_qconfigs, f"float_qparams_weight_only_qconfig{suffix}")
    mapping = flows.global_mapping().set_object_type(nn.Embedding, qconfig).set_object_type(nn.EmbeddingBag, qconfig)
    batch = (torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]))
    _, ours, theirs = both(Embeddings(), mapping, batch)
    assert_same(ours, theirs, batch)
