"""The samples of ops with a weight: complete, buildable, and directed at what they say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic as nni
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.backends.torch_engines.tables import native_config
from fx_quant_conformance.conformance.ops.fused_modules import EPILOGUES, MEMBERS, QAT_OF
from fx_quant_conformance.conformance.ops.op_model import MODEL_OF
from fx_quant_conformance.conformance.ops.weighted import RECORDS, count_out_channels, draw_weight, transpose_weight
from fx_quant_conformance.refimpl import (
    FakeQuantize,
    MinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PlaceholderObserver,
    QConfig,
)
from fx_quant_conformance.refimpl.config.patterns import is_chain, leaves


def ran(op: Any, arguments: dict[str, Any]) -> Tensor:
    samples = RECORDS[op]
    torch.manual_seed(0)
    inputs = [torch.randn(each.shape) for each in samples.inputs(arguments)]
    with torch.no_grad():
        found: Tensor = MODEL_OF[len(inputs)]([samples.step(op, arguments)])(*inputs)
    return found


def test_what_is_rarely_quantized_stands_apart() -> None:
    for op in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        for varied, arguments in RECORDS[op].variants():
            if arguments["padding_mode"] != "zeros":
                assert set(varied) == {"padding", "padding_mode"}
                assert isinstance(arguments["padding"], tuple)
            if arguments["padding"] == "same":
                assert set(varied) <= {"padding", "kernel_size", "dilation"}
            if arguments["_unbatched"] or arguments["_network"] is not None:
                assert len(varied) == 1


def test_positional_and_named_options_mean_the_same() -> None:
    for op in (F.conv2d, F.conv_transpose2d):
        positional = [arguments for _, arguments in RECORDS[op].variants() if arguments["_positional"]]
        assert len(positional) > 5
        for arguments in positional:
            assert torch.equal(ran(op, arguments), ran(op, {**arguments, "_positional": False}))


# -- weights ----------------------------------------------------------------------------------------------------------


def test_a_drawn_weight_has_channels_that_differ_and_ends_side_by_side() -> None:
    torch.manual_seed(0)
    weight = draw_weight(9, 8, 3, 3)
    largest = weight.abs().amax(dim=(1, 2, 3))
    assert (largest / largest[0]).tolist() == pytest.approx([1, 1 / 2, 1 / 4, 1 / 8, 1, 1 / 2, 1 / 4, 1 / 8, 1])
    assert [int(channel.count_nonzero()) for channel in weight][6] == 1
    assert bool((weight[3] <= 0).all())
    assert bool((weight[0] < 0).any())
    for channel in (0, 3, 8):
        by_kernel, by_input = weight[channel, 0].flatten()[:4].abs(), weight[channel, :4, 0, 0].abs()
        assert torch.equal(by_kernel, largest[channel].expand(4))
        assert torch.equal(by_input, largest[channel].expand(4))
    assert len(set(weight[0].flatten().tolist())) > 60  # and the rest is drawn


@pytest.mark.parametrize("groups", (1, 2, 4))
def test_a_transposed_layout_holds_the_same_operands(groups: int) -> None:
    """With a kernel of 1 and a stride of 1 the two kinds of convolution are the same function."""
    torch.manual_seed(groups)
    weight, x = draw_weight(12, 8 // groups, 1), torch.randn(2, 8, 5)
    turned = transpose_weight(weight, groups)
    assert turned.shape == (8, 12 // groups, 1)
    expected = F.conv1d(x, weight, groups=groups)
    torch.testing.assert_close(F.conv_transpose1d(x, turned, groups=groups), expected)


def test_transposed_samples_scale_by_output_channel() -> None:
    """Channel 6 has one weight; in the transposed layout it is on the second axis, group by group."""
    samples = RECORDS[nn.ConvTranspose2d]
    layers = samples.arguments["shape"]
    assert isinstance(layers, tuple)
    layer = next(layer for layer in layers if layer.c_out > 7 and layer.groups == 1)
    step = samples.step(nn.ConvTranspose2d, {**samples.base(), "shape": layer})
    assert isinstance(step.op, nn.ConvTranspose2d)
    counts = step.op.weight.count_nonzero(dim=(0, 2, 3))
    assert (counts == 1).nonzero().flatten().tolist() == [6]


# -- fused and QAT classes, epilogues ---------------------------------------------------------------------------------


def root(kind: Any) -> nn.Module:
    made = RECORDS[kind].step(kind, RECORDS[kind].base()).op
    assert isinstance(made, nn.Module)
    return made


def fused(kind: Any) -> nn.Module:
    torch.manual_seed(1)
    first, *rest = MEMBERS[kind]
    channels = count_out_channels(RECORDS[first].base()) if first in RECORDS else 5
    made = root(first) if first in RECORDS else EPILOGUES[first](channels).op
    module: nn.Module = kind(made, *(op if op is torch.add else EPILOGUES[op](channels).op for op in rest))
    return module.eval()


@pytest.mark.parametrize("kind", MEMBERS, ids=lambda kind: kind.__name__)
def test_fused_modules_take_their_members_in_this_order(kind: Any) -> None:
    module, members = fused(kind), MEMBERS[kind]
    samples = RECORDS.get(members[0])
    shape = (2, 5, 4, 4, 4) if samples is None else samples.inputs(samples.base())[0].shape
    x = torch.randn(shape[: 4 if members[0] is nn.BatchNorm2d else 5])
    if torch.add not in members:
        result = x
        for member in module.children():
            result = member(result)
        assert [type(member) for member in module.children()] == list(members)
        torch.testing.assert_close(module(x), result)
        return
    inner = next(module.children())
    y = torch.randn_like(inner(x))
    expected = inner(x) + y
    torch.testing.assert_close(module(x, y), expected.relu() if nn.ReLU in members else expected)


QAT_QCONFIG = QConfig(
    activation=FakeQuantize.with_args(observer=MinMaxObserver, dtype=torch.quint8),
    weight=FakeQuantize.with_args(observer=MinMaxObserver, dtype=torch.qint8, qscheme=torch.per_tensor_symmetric),
)
ROWS_QCONFIG = QConfig(
    activation=PlaceholderObserver,
    weight=FakeQuantize.with_args(
        observer=MovingAveragePerChannelMinMaxObserver,
        dtype=torch.quint8,
        ch_axis=0,
        qscheme=torch.per_channel_affine_float_qparams,
        quant_min=0,
        quant_max=255,
    ),
)


@pytest.mark.parametrize("kind", QAT_OF, ids=lambda kind: f"{kind.__module__.split('.')[3]}.{kind.__name__}")
def test_qat_modules_are_made_of_these_float_classes(kind: Any) -> None:
    origin = QAT_OF[kind]
    is_embedding = origin in (nn.Embedding, nn.EmbeddingBag)
    module: Any = origin(7, 3) if is_embedding else fused(origin) if origin in MEMBERS else root(origin)
    for each in module.train().modules():  # some classes read the fused module's QConfig, some that of its first member
        each.qconfig = ROWS_QCONFIG if is_embedding else QAT_QCONFIG
    made = kind.from_float(module)
    assert type(made) is kind
    assert hasattr(made, "weight_fake_quant")


NATIVE = ("native", "qnnpack", "fbgemm", "x86", "onednn")


def patterns() -> Iterator[Any]:
    for name in NATIVE:
        for entry in native_config(name).configs:  # type: ignore[arg-type]
            yield entry.normal_pattern


def test_every_fused_and_qat_class_of_the_configs_is_known() -> None:
    named = {leaf for pattern in patterns() for leaf in leaves(pattern) if isinstance(leaf, type)}
    qat = {leaf for leaf in named if ".qat" in leaf.__module__}
    fused_classes = {leaf for leaf in named if issubclass(leaf, nni._FusedModule)} - qat  # type: ignore[attr-defined]
    assert len(qat) > 15
    assert qat <= set(QAT_OF)
    assert fused_classes <= set(MEMBERS)
    assert set(QAT_OF.values()) <= {*MEMBERS, *RECORDS, nn.Embedding, nn.EmbeddingBag}


def test_every_op_after_a_weighted_one_is_a_epilogue() -> None:
    chains = [list(leaves(pattern)) for pattern in patterns() if is_chain(pattern)]
    assert sum(chain[0] in RECORDS and len(chain) > 1 for chain in chains) > 30
    for chain in chains:
        assert chain[0] not in RECORDS or set(chain[1:]) <= set(EPILOGUES), chain
    for members in MEMBERS.values():
        assert set(members[1:]) <= {*EPILOGUES, torch.add}


def test_a_batch_norm_that_follows_is_none_that_can_be_left_out() -> None:
    torch.manual_seed(0)
    norm: Any = EPILOGUES[nn.BatchNorm2d](6).op
    assert norm.eps != nn.BatchNorm2d(6).eps
    assert (norm.weight > 0).tolist() == [True, False] * 3
    assert bool((norm.running_var != 1).all())
    assert bool((norm.running_mean != 0).all())
    assert bool((norm.bias != 0).all())
