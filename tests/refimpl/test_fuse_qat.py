"""Fusing for training, and patterns of two modules without a fuser (rules FUS-01, FUS-02, FUS-06, QAT-02)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic as nni
import torch.ao.quantization.quantize_fx as torch_fx
from torch import Tensor, nn
from torch.ao.quantization.backend_config import get_qnnpack_backend_config
from torch.fx import GraphModule, symbolic_trace

from fx_quant_conformance import refimpl
from fx_quant_conformance.backends.torch_engines.engine import engine
from fx_quant_conformance.backends.torch_engines.tables import native_config
from fx_quant_conformance.refimpl import BackendPatternConfig, ConfigError, ModelError
from fx_quant_conformance.refimpl.fuse.fuse import fuse
from fx_quant_conformance.refimpl.graph.example_run import Examples
from fx_quant_conformance.refimpl.graph.tracer import trace
from fx_quant_conformance.refimpl.graph.tracing import finish
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.fusing import CUBE, ROWS, Net, X, called, config_of


def both_fused_for_qat(model: nn.Module, engine: str, inputs: Any = None) -> tuple[Any, GraphModule]:
    draft = trace(copy.deepcopy(model))
    fuse(draft, native_config(engine), is_qat=True, examples=Examples(draft, inputs))  # type: ignore[arg-type]
    torch_model = symbolic_trace(copy.deepcopy(model))
    return finish(draft, draft.graph, draft), torch_fx._fuse_fx(
        torch_model, True, backend_config=flows.torch_config(engine)
    )


QAT: tuple[tuple[Callable[[Any, Tensor], Any], str, str], ...] = (
    (lambda net, x: net.bn(net.conv(x)), "qnnpack", "ConvBn2d"),
    (lambda net, x: net.relu(net.bn(net.conv(x))), "fbgemm", "ConvBnReLU2d"),
    (lambda net, x: net.relu(net.conv(x)), "x86", "ConvReLU2d"),
    (lambda net, x: net.bn1d(net.fc(x.mean((2, 3)))), "qnnpack", "LinearBn1d"),
    (lambda net, x: net.relu(net.bn(x)), "qnnpack", "BNReLU2d"),
    (lambda net, x: net.relu(torch.add(x, net.conv(x))), "onednn", "ConvAddReLU2d"),
)


@pytest.mark.rule("FUS-06")
@pytest.mark.rule("QAT-02")
@pytest.mark.parametrize("is_train", [True, False])
@pytest.mark.parametrize(("run", "engine", "expected"), QAT, ids=[expected for _, _, expected in QAT])
def test_in_qat_batch_norm_stays_a_part_in_either_mode(run: Any, engine: str, expected: str, is_train: bool) -> None:
    model = Net(run).train(is_train)
    ours, theirs = both_fused_for_qat(model, engine)
    assert called(ours)[-1] == called(theirs)[-1] == expected
    assert [node.name for node in ours.graph.nodes] == [node.name for node in theirs.graph.nodes]
    one, other = dict(ours.state_dict()), dict(theirs.state_dict())
    assert flows.same(one, {name: other[name] for name in one})
    assert [m.training for m in ours.modules()] == [is_train] * sum(1 for _ in ours.modules())
    assert flows.same(ours(X), model(X))


@pytest.mark.rule("FUS-06")
def test_in_qat_parts_in_different_modes_are_refused_too() -> None:
    model = Net(lambda net, x: net.bn(net.conv(x))).train()
    model.bn.eval()
    with pytest.raises(ModelError, match=r"is_qat=True.* or all in eval mode; found Conv2d: train, Batch"):
        both_fused_for_qat(model, "qnnpack")


@pytest.mark.rule("FUS-06")
def test_in_qat_a_linear_of_rank_three_is_not_fused_and_no_statistics_change() -> None:
    model = Net(lambda net, x: net.bn1d(net.fc(x))).train()
    before = copy.deepcopy(dict(model.state_dict()))
    ours, theirs = both_fused_for_qat(model, "qnnpack", (CUBE,))
    assert called(ours) == ["Linear", "BatchNorm1d"]
    assert called(theirs) == ["LinearBn1d"]
    assert "of an output of rank 3" in ours.meta["not_fused"][0]
    after = dict(ours.state_dict())
    assert flows.same(after, {name: before[name] for name in after})


@pytest.mark.rule("FUS-02")
def test_in_qat_a_fuser_may_not_fold() -> None:
    entry = BackendPatternConfig((nn.Conv2d, nn.BatchNorm2d)).set_fuser_method(lambda is_qat, conv, bn: conv)
    config = config_of(entry.set_fused_module(nni.ConvBn2d))
    model = Net(lambda net, x: net.bn(net.conv(x)))
    fuse(trace(model.eval()), config, is_qat=False)
    with pytest.raises(ConfigError, match=r"is_qat=True, Conv2d, BatchNorm2d.* returned Conv2d; expected .*ConvBn2d"):
        fuse(trace(model.train()), config, is_qat=True)


# ---- an entry of two modules without a fuser method -------------------------------------------------------


@pytest.mark.rule("FUS-01")
@pytest.mark.rule("LOW-03")
def test_a_linear_and_relu_without_a_fuser_keep_the_relu_that_torchs_lowering_loses() -> None:
    config = get_qnnpack_backend_config()
    for entry in config.configs:
        if entry.pattern == (nn.Linear, nn.ReLU):
            entry.fuser_method, entry.fused_module = None, None
    symmetric = flows.torchs.MinMaxObserver.with_args(dtype=torch.quint8, qscheme=torch.per_tensor_symmetric)
    mapping = flows.global_mapping(flows.torch_qconfigs.QConfig(symmetric, flows.QCONFIG.weight))
    model, found = Net(lambda net, x: net.relu(net.fc(x))).eval(), {}
    for name, flow in (("ours", refimpl), ("torch", torch_fx)):
        prepared = flow.prepare_fx(copy.deepcopy(model), mapping, (ROWS,), backend_config=config)
        prepared(ROWS)
        with engine("qnnpack"):
            found[name] = flow.convert_fx(prepared, backend_config=config)(ROWS)
    assert float(found["torch"].min()) < 0 == float(found["ours"].min())
