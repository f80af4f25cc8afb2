"""Lowering to torch's native engines (rules LOW-01 to LOW-04)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as torch_fx
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import ModelError
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize, is_quantize
from fx_quant_conformance.refimpl.graph.tracing import NOT_LOWERED
from fx_quant_conformance.refimpl.lower.lower import lower
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.lowering import (  # noqa: F401  (a fixture)
    Net,
    X,
    an_engine,
    each_engine,
    float_ops,
    small,
    torch_lowered,
)
from tests.refimpl.support.zoo import build_named


@each_engine
@pytest.mark.rule("LOW-01")
@pytest.mark.rule("LOW-02")
@pytest.mark.parametrize(
    ("name", "ops"),
    [
        ("Residual", {"ConvReLU2d": 1, "Conv2d": 1, "add_relu": 1}),
        ("Mlp", {"LinearReLU": 2, "Linear": 1}),
        ("Functions", {"linear_relu": 1, "conv1d": 1, "unsqueeze": 1}),
        ("ConvNet(3)", {"Conv3d": 1, "ConvReLU3d": 1, "MaxPool3d": 1, "AvgPool3d": 1, "relu": 1}),
    ],
)
def test_the_graph_has_the_quantized_ops_and_gives_the_reference_models_integers(
    name: str, ops: dict[str, int], engine: str
) -> None:
    model, batches = build_named(name)
    flow, _ = small(model, batches)
    lowered = refimpl.convert_fx(flow.prepared)
    found: dict[str, int] = {}
    for node in lowered.graph.nodes:
        if node.op == "call_module":
            part = lowered.get_submodule(str(node.target))
            assert "quantized" in type(part).__module__ or "Pool" in type(part).__name__, f"{part} is a float module"
            found[type(part).__name__] = found.get(type(part).__name__, 0) + 1
        elif node.op in ("call_function", "call_method") and not (is_quantize(node) or is_dequantize(node)):
            called = node.target if isinstance(node.target, str) else node.target.__name__
            found[called.split(".")[0]] = found.get(called.split(".")[0], 0) + 1
    assert found == ops
    assert lowered.meta[NOT_LOWERED] == ()
    if (name, engine) == ("ConvNet(3)", "qnnpack"):
        with pytest.raises(RuntimeError, match="QNNPACK backend doesn't support"):
            lowered(*batches[0])
        return
    with torch.no_grad():
        step = max(numbers[1][0] for numbers in flows.qparams(flow.reference))
        assert (lowered(*batches[0]) - flow(*batches[0])).abs().max() <= 1.01 * step


BLOCKED: list[tuple[Callable[..., Any], str, str]] = [
    (lambda net, x: torch.add(net.conv(x), net.other(x), alpha=2), "add", "arguments {'alpha': 2} cannot be expressed"),
    (lambda net, x: net.conv(x) + net.offset, "add", "is not dequantized: the op would mix float and quantized"),
    (lambda net, x: net.same(x), "same", "padding 'same': the quantized op takes numbers"),
    (lambda net, x: net.norm(x), "norm", "track_running_stats: the quantized op takes its input's statistics"),
    (lambda net, x: F.group_norm(net.conv(x), 2), "group_norm", "LOW-01: torch has no quantized op for it"),
    (lambda net, x: F.interpolate(net.conv(x), scale_factor=2.0, mode="bicubic"), "interpolate", "no quantized kernel"),
    (lambda net, x: F.dropout(net.conv(x), 1.0, training=True), "dropout", "the quantized op never drops"),
    (lambda net, x: net.conv(x).mean(1, dtype=torch.float32), "mean", "the mean of a quantized tensor has its dtype"),
    (
        lambda net, x: F.interpolate(net.conv(x), (3, 3), mode="bilinear", antialias=True),
        "interpolate",
        "the quantized kernel has no antialias",
    ),
    (
        lambda net, x: torch.add(x, x).resize_(2, 32, memory_format=torch.contiguous_format),
        "resize_",
        "the quantized op has no memory_format",
    ),
    (lambda net, x: net.circular(x), "circular", "padding_mode 'circular': not in the quantized op"),
    (lambda net, x: net.up(x, [8, 8]), "up", "output_size: the quantized op has output_padding alone"),
]


@pytest.mark.rule("LOW-03")
@pytest.mark.rule("LOW-04")
@pytest.mark.parametrize(("run", "node", "reason"), BLOCKED, ids=[reason for *_, reason in BLOCKED])
def test_what_the_quantized_op_cannot_express_stays_and_is_listed(
    run: Any, node: str, reason: str, engine: str
) -> None:
    flow, _ = small(Net(run).eval(), [(X,)])
    lowered = refimpl.convert_fx(flow.prepared)
    listed = {entry.node: entry for entry in lowered.meta[NOT_LOWERED]}
    assert reason in str(listed[node]), f"listed: {list(map(str, listed.values()))}"
    with torch.no_grad():
        assert (lowered(X) - flow(X)).abs().max() < 0.05, "right numbers all the same"


@pytest.mark.rule("LOW-01")
@pytest.mark.parametrize("run", [lambda net, x: net.up(x, None), lambda net, x: net.up(x, output_size=None)])
def test_an_argument_of_none_is_as_if_it_were_not_given(run: Any, engine: str) -> None:
    flow, _ = small(Net(run).eval(), [(X,)])
    lowered = refimpl.convert_fx(flow.prepared)
    assert lowered.meta[NOT_LOWERED] == ()
    with torch.no_grad():
        assert (lowered(X) - flow(X)).abs().max() < 0.05


@pytest.mark.rule("LOW-03")
def test_torch_drops_alpha_and_the_sum_is_another(engine: str) -> None:
    model = Net(lambda net, x: torch.add(net.conv(x), net.other(x), alpha=2)).eval()
    prepared = torch_fx.prepare_fx(model, flows.global_mapping(), (X,), backend_config=flows.torch_config("qnnpack"))
    prepared(X)
    assert (torch_fx.convert_fx(prepared)(X) - model(X)).abs().max() > 0.2, "torch is right now: drop this deviation"
    flow, _ = small(model, [(X,)])
    assert (refimpl.convert_fx(flow.prepared)(X) - model(X)).abs().max() < 0.1


@pytest.mark.rule("LOW-03")
def test_an_op_in_place_on_a_value_that_others_read_is_not_lowered(engine: str) -> None:
    def run(net: Any, x: Tensor) -> Any:
        y = net.conv(x)
        z = y.relu_()
        return torch.cat([z, net.other(x)], 1), z

    flow, _ = small(Net(run).eval(), [(X,)])
    lowered = refimpl.convert_fx(flow.prepared)
    with torch.no_grad():
        for found, expected in zip(lowered(X), flow(X), strict=True):
            assert (found - expected).abs().max() < 0.05


@pytest.mark.rule("LOW-03")
def test_a_shape_op_between_different_qparams_is_not_lowered(engine: str) -> None:
    config = refimpl.BackendConfig("test").set_backend_pattern_configs(flows.our_config("qnnpack").configs)
    different = refimpl.BackendPatternConfig("view").add_dtype_config(refimpl.DTypeConfig(torch.quint8, torch.quint8))
    config.set_backend_pattern_config(different)  # view, with another observer at its output
    model = Net(lambda net, x: net.conv(x).view(-1)).eval()
    fixed = refimpl.FixedQParamsObserver.with_args(scale=0.25, zero_point=3, dtype=torch.quint8)
    mapping = refimpl.QConfigMapping().set_global(flows.QCONFIG)
    mapping.set_object_type("view", refimpl.QConfig(fixed, flows.QCONFIG.weight))
    prepared = refimpl.prepare_fx(model, mapping, backend_config=config)
    prepared(X)
    lowered = refimpl.convert_fx(prepared)
    assert "differ in qparams; the op keeps its input's" in str(lowered.meta[NOT_LOWERED][0])


@pytest.mark.rule("LOW-04")
def test_a_value_with_two_users_blocks_only_its_own_site(engine: str) -> None:
    model, batches = nn.Sequential(nn.Linear(4, 4)).eval(), [(torch.randn(3, 4),)]
    reference = small(model, batches)[0].reference
    linear = next(node for node in reference.graph.nodes if node.op == "call_module")
    with reference.graph.inserting_after(linear):
        spy = reference.graph.call_function(torch.abs, (linear,))
    output = next(node for node in reference.graph.nodes if node.op == "output")
    output.args = ((output.args[0], spy),)
    reference.recompile()
    (entry,) = lower(reference).meta[NOT_LOWERED]
    assert "has 2 users; one quantized op has one output" in entry.reason


@pytest.mark.rule("LOW-01")
def test_lowering_leaves_the_reference_model_as_it_was(engine: str) -> None:
    model, batches = build_named("Residual")
    flow, _ = small(model, batches)
    code, expected = flow.reference.code, flow(*batches[0])
    lower(flow.reference)
    assert flow.reference.code == code
    assert torch.equal(flow(*batches[0]), expected)
    with pytest.raises(ModelError, match="expected a GraphModule, found Linear"):
        lower(nn.Linear(2, 2))  # type: ignore[arg-type]


@pytest.mark.rule("LOW-02")
def test_a_weight_of_a_function_is_packed_with_its_geometry(engine: str) -> None:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.w, self.b = nn.Parameter(torch.randn(4, 1, 3, 3)), nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Any:
            return F.relu(F.conv2d(x, self.w, bias=self.b, stride=(2, 1), padding=1, dilation=1, groups=2))

    flow, _ = small(Strided().eval(), [(X,)])
    lowered = refimpl.convert_fx(flow.prepared)
    assert lowered.meta[NOT_LOWERED] == () and not float_ops(lowered)
    with torch.no_grad():
        assert (lowered(X) - flow(X)).abs().max() <= 1.01 * flows.qparams(flow.reference)[-1][1][0]


@pytest.mark.rule("LOW-03")
@pytest.mark.parametrize("index", [0, 1], ids=["antialias", "memory_format"])
def test_torch_lowers_to_ops_without_such_an_argument(index: int, engine: str) -> None:
    run = [run for run, _, reason in BLOCKED if "antialias" in reason or "memory_format" in reason][index]
    lowered: Any = torch_lowered(Net(run).eval(), flows.global_mapping(), [(X,)])
    with torch.no_grad(), pytest.raises((RuntimeError, NotImplementedError), match=r"QuantizedCPU|memory format"):
        lowered(X)
