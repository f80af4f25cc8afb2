"""Lowering held against torch's, on reference models that torch made: same graph, same state dict keys, same bits.

The expectation is torch's own convert_fx of the same prepared model (rules LOW-01, LOW-02, CVT-03, CVT-04, CVT-11).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as torch_fx
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.backends.torch_engines.engine import engine as set_engine
from fx_quant_conformance.refimpl.graph.tracing import NOT_LOWERED
from fx_quant_conformance.refimpl.lower.lower import lower
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.canonical import canonical, difference

X3, X4, X5 = (
    torch.randn(2, 4, *size, generator=torch.Generator().manual_seed(1)) for size in ((8,), (8, 8), (5, 6, 6))
)
X2 = X3[:, :, 0]
DYNAMIC = flows.torch_qconfigs.default_dynamic_qconfig
FLOAT16 = flows.torch_qconfigs.float16_dynamic_qconfig


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


class Together(nn.Module):
    """Models beside each other, of the same input."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: Tensor) -> Any:
        return tuple(model(x) for model in self.models)


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


def spatial(rank: int) -> Iterator[nn.Module]:
    """Layers and functions that there are in one, two and three dimensions."""
    conv, transposed, bn = (getattr(nn, f"{name}{rank}d") for name in ("Conv", "ConvTranspose", "BatchNorm"))
    f_conv, f_transposed = getattr(F, f"conv{rank}d"), getattr(F, f"conv_transpose{rank}d")
    one, two = (1,) * rank, (2,) * rank
    weights = ((6, 4, *[3] * rank), (6,))
    yield nn.Sequential(conv(4, 6, 3, padding=1))
    yield nn.Sequential(conv(4, 6, 3, padding=1, padding_mode="reflect" if rank < 3 else "zeros"))
    yield nn.Sequential(conv(4, 6, 3, bias=False), nn.ReLU())
    yield nn.Sequential(conv(4, 6, 3, groups=2), bn(6), nn.ReLU())
    yield nn.Sequential(transposed(4, 6, 3, stride=2, output_padding=1))
    yield nn.Sequential(getattr(nn, f"InstanceNorm{rank}d")(4, affine=rank > 1))
    yield Net(lambda m, y: f_conv(y, m.w0, m.w1, one, one, one, 1), weights=weights)
    yield Net(lambda m, y: F.relu(f_conv(y, m.w0, m.w1, two, one, one, 1)), weights=weights)
    run = lambda m, y: m.parts[0](f_conv(y, m.w0, bias=m.w1, stride=two, padding=one, dilation=one, groups=1))  # noqa: E731
    yield Net(run, nn.ReLU(), weights=weights)
    run = lambda m, y: f_transposed(y, m.w0, m.w1, two, one, one, 1, one)  # noqa: E731
    yield Net(run, weights=((4, 6, *[3] * rank), (6,)))
    for name in ("MaxPool", "AvgPool", "AdaptiveAvgPool"):
        yield nn.Sequential(conv(4, 4, 1), getattr(nn, f"{name}{rank}d")(2))
    for name in ("max_pool", "avg_pool", "adaptive_avg_pool"):
        pool = getattr(F, f"{name}{rank}d")
        yield Net(lambda m, y, pool=pool: pool(m.parts[0](y), 2), conv(4, 4, 1))
    if rank > 1:
        yield nn.Sequential(bn(4))
        yield nn.Sequential(bn(4), nn.ReLU())


MODULES = [
    nn.ELU(0.7),
    nn.LeakyReLU(0.2),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Hardswish(),
    nn.Dropout(0.3),
    nn.PReLU(),
    nn.Hardsigmoid(),
    nn.Sigmoid(),
    nn.Tanh(),
    nn.Softmax(1),
    nn.Hardtanh(-0.5, 0.5),
    nn.Identity(),
    nn.ReLU(),
    nn.PixelShuffle(2),
    nn.PixelUnshuffle(2),
    nn.ReLU(inplace=True),
    nn.ReLU6(),
    nn.LayerNorm(8),
    nn.GroupNorm(2, 4),
    nn.LayerNorm([8, 8], elementwise_affine=False),
    nn.ChannelShuffle(2),
    nn.GELU(),
    nn.Flatten(),
]
FUNCTIONS: tuple[Callable[[Tensor], Any], ...] = (
    lambda x: F.elu(x, 0.7, inplace=True),
    lambda x: F.hardswish(x, inplace=True),
    lambda x: F.leaky_relu(x, 0.2, True),
    lambda x: F.dropout(x, 0.3, training=False),
    lambda x: F.group_norm(x, 2),
    lambda x: F.instance_norm(x),
    lambda x: F.layer_norm(x, [8]),
    lambda x: F.hardsigmoid(x, inplace=True),
    torch.sigmoid,
    lambda x: x.sigmoid(),
    torch.tanh,
    lambda x: x.tanh(),
    lambda x: F.softmax(x, 1),
    lambda x: F.hardtanh(x, -0.5, 0.5),
    lambda x: F.hardtanh_(x, -0.5, 0.5),
    lambda x: F.interpolate(x, scale_factor=2),
    lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    F.relu6,
    F.relu,
    lambda x: x.relu_(),
    lambda x: torch.clamp(x, -0.5, 0.5),
    lambda x: x.clamp(max=0.5),
    lambda x: torch.flatten(x, 1),
    lambda x: x.flatten(1),
    lambda x: torch.mean(x, (2, 3)),
    lambda x: x.mean([2, 3], keepdim=True),
    lambda x: torch.narrow(x, 1, 0, 2),
    lambda x: torch.repeat_interleave(x, 2, 1),
    lambda x: torch.transpose(x, 1, 2),
    lambda x: torch.stack([x, x], 1),
    torch.squeeze,
    lambda x: torch.unsqueeze(x, 0),
    lambda x: x.contiguous(),
    lambda x: x.detach_(),
    lambda x: x.permute(0, 2, 3, 1),
    lambda x: x.repeat(1, 2, 1, 1),
    lambda x: x.reshape(x.size(0), -1, x.shape[1]),
    lambda x: x.resize_(2, 256),
    lambda x: x.unsqueeze_(1),
    lambda x: torch.cat([x, x], 1),
    lambda x: x[:, 1:],
    lambda x: x * x.size(1),
    lambda x: x.reshape(x.dim(), -1),
    lambda x: x - 1,
    lambda x: x.abs(),
    lambda x: torch.channel_shuffle(x, 2),
    lambda x: F.pixel_shuffle(x, 2),
    lambda x: x * x,
    lambda x: torch.add(2, F.relu(x * 2)),
    lambda x: F.relu(0.5 + x),
    lambda x: x.__class__.__add__(x, 1) * 2,
    lambda x: F.relu(torch.matmul(x, x.transpose(2, 3))),
    lambda x: x @ x,
)
BINARY: tuple[Callable[..., Any], ...] = (
    lambda m, x: m.parts[0](x) + x,
    lambda m, x: torch.add(m.parts[0](x), x),
    lambda m, x: F.relu(m.parts[0](x) * x),
    lambda m, x: torch.relu(torch.mul(m.parts[0](x), x)),
    lambda m, x: m.parts[1](m.parts[0](x) + x),
    lambda m, x: F.relu(torch.add(m.parts[0](x), x)),
)


def linear() -> Iterator[nn.Module]:
    yield nn.Sequential(nn.Linear(4, 3))
    yield nn.Sequential(nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3))
    yield nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    yield Net(lambda m, x: F.linear(x, m.w0, m.w1), weights=((3, 4), (3,)))
    yield Net(lambda m, x: m.parts[0](F.linear(x, m.w0)), nn.ReLU(), weights=((3, 4),))
    yield Net(lambda m, x: F.linear(x, m.w0 * 2 + 1, bias=m.w1), weights=((3, 4), (3,)))


def after_a_convolution(function: Callable[[Tensor], Any]) -> nn.Module:
    return Net(lambda m, x: function(m.parts[0](x)), nn.Conv2d(4, 4, 1))


GROUPS: Mapping[str, tuple[Iterable[nn.Module], Tensor]] = {
    "1d": (spatial(1), X3),
    "2d": (spatial(2), X4),
    "3d": (spatial(3), X5),
    "modules": ((nn.Sequential(nn.Conv2d(4, 4, 1), part) for part in MODULES), X4),
    "functions": (map(after_a_convolution, FUNCTIONS), X4),
    "binary": ((Net(run, nn.Conv2d(4, 4, 1), nn.ReLU()) for run in BINARY), X4),
    "linear": (linear(), X2),
}


@pytest.mark.rule("LOW-01")
@pytest.mark.rule("LOW-02")
@pytest.mark.parametrize("name", GROUPS)
def test_every_static_op_is_lowered_as_torch_does(name: str) -> None:
    models, x = GROUPS[name]
    with set_engine("fbgemm"):
        _, ours, theirs = both(Together(models), fixed_mapping(), (x,))
        assert_same(ours, theirs, (x,))


@pytest.mark.rule("LOW-01")
@pytest.mark.parametrize("engine", ["x86", "onednn", "qnnpack"])
def test_every_engine_packs_for_itself(engine: str) -> None:
    function = Net(
        lambda m, x: F.relu(F.conv2d(x, m.w0, m.w1, (1, 1), (1, 1), (1, 1), 1)), weights=((6, 4, 3, 3), (6,))
    )
    models = (nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU()), function, nn.Linear(8, 3), after_a_convolution(torch.relu))
    with set_engine(engine):
        _, ours, theirs = both(Together(models), fixed_mapping(), (X4,), engine)
        assert_same(ours, theirs, (X4,))


ONEDNN: Mapping[str, tuple[Iterable[nn.Module], Tensor]] = {
    "linear": (
        (
            nn.Sequential(nn.Linear(4, 3), nn.LeakyReLU(0.1)),
            nn.Sequential(nn.Linear(4, 3), nn.Tanh()),
            Net(lambda m, x: F.leaky_relu(F.linear(x, m.w0), 0.1), weights=((3, 4),)),
        ),
        X2,
    ),
    "sums": (
        (
            Net(lambda m, x: m.parts[0](x) + m.parts[1](x), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)),
            Net(lambda m, x: torch.add(x, m.parts[0](x)), nn.Conv2d(4, 4, 1)),
            Net(lambda m, x: m.parts[1](m.parts[0](x) + x), nn.Conv2d(4, 4, 1), nn.ReLU()),
        ),
        X4,
    ),
}


@pytest.mark.rule("LOW-01")
@pytest.mark.parametrize("name", ONEDNN)
def test_the_fused_modules_of_onednn(name: str) -> None:
    models, x = ONEDNN[name]
    with set_engine("onednn"):
        _, ours, theirs = both(Together(models), flows.global_mapping(), (x,), "onednn")
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


ROWS = (
    nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3, bias=False), nn.ReLU()),
    Net(lambda m, x: F.relu(F.linear(F.linear(x, m.w0, m.w1), m.w2)), weights=((4, 4), (4,), (3, 4))),
    Net(lambda m, x: m.parts[0](F.linear(x, m.w0, bias=m.w1)), nn.ReLU(), weights=((4, 4), (4,))),
    Net(lambda m, x: torch.relu(F.linear(x, m.w0)), weights=((4, 4),)),
    Net(lambda m, x: m.parts[0](m.parts[0](x)), nn.Linear(4, 4)),
)


@pytest.mark.rule("LOW-02")
@pytest.mark.rule("CVT-03")
@pytest.mark.rule("CVT-04")
@pytest.mark.parametrize(  # qnnpack has no float16
    ("qconfig", "engine"),
    [(DYNAMIC, "fbgemm"), (DYNAMIC, "qnnpack"), (FLOAT16, "fbgemm")],
    ids=["8", "8 qnnpack", "16"],
)
def test_dynamic_ops_are_lowered_as_torch_does(qconfig: Any, engine: str) -> None:
    for model, x in ((Together(ROWS), X2), (Recurrent(), X3[:, :, :4])):
        with set_engine(engine):
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
def test_embeddings_quantize_the_weight_alone(bits: int) -> None:
    suffix = "" if bits == 8 else "_4bit"
    qconfig = getattr(flows.torch_qconfigs, f"float_qparams_weight_only_qconfig{suffix}")
    mapping = flows.global_mapping().set_object_type(nn.Embedding, qconfig).set_object_type(nn.EmbeddingBag, qconfig)
    batch = (torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]))
    with set_engine("fbgemm"):
        _, ours, theirs = both(Embeddings(), mapping, batch)
        assert_same(ours, theirs, batch)
