"""What each of the two reference forms can say, and what is refused in it (rules CVT-03, CVT-04, CVT-07, CVT-10)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized.reference as nnqr
from torch import nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.backends.torch_engines.engine import engine
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.both_core import NAMED, Net, X, calls, prepared


@pytest.mark.rule("CVT-03")
@pytest.mark.rule("CVT-10")
@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"quant_min": 0, "quant_max": 100}, r"dynamic torch.quint8 in \(0, 100\); .* \(0, 255\) or \(0, 127\)"),
        ({"quant_min": 10, "quant_max": 255}, r"in \(10, 255\)"),
        ({"quant_min": 0, "quant_max": 255, "qscheme": torch.per_tensor_symmetric}, "dynamic symmetric qparams"),
    ],
    ids=["range", "low end", "scheme"],
)
def test_what_the_dynamic_op_cannot_express_is_refused_where_torch_drops_it(asked: dict[str, Any], told: str) -> None:
    activation = flows.torchs.PlaceholderObserver.with_args(dtype=torch.quint8, is_dynamic=True, eps=2**-10, **asked)
    mapping = flows.global_mapping(NAMED.QConfig(activation, flows.QCONFIG.weight))
    model = Net(lambda net, x: net.a(x)).eval()
    with engine("qnnpack"):
        theirs = flows.torch_flow(model, mapping, [(X,)], "native").reference
    quantize = next(node for node in theirs.graph.nodes if node.op == "call_function")
    assert quantize.args[1:] == (torch.quint8, False)
    found = prepared(model, mapping)
    with pytest.raises(refimpl.QConfigError, match=told):
        refimpl.convert_to_reference_fx(found)
    decomposed = refimpl.convert_to_reference_decomposed_fx(found)
    choose = next(node for node in decomposed.graph.nodes if "choose" in node.name)
    assert choose.args[1:] == (asked["quant_min"], asked["quant_max"], 2**-10, torch.uint8)


@pytest.mark.rule("CVT-07")
@pytest.mark.rule("CVT-10")
@pytest.mark.parametrize(
    ("dtype", "quantized", "decomposed"),
    [
        (torch.int8, False, True),
        (torch.uint16, False, True),
        (torch.quint4x2, False, False),
        (torch.qint32, True, True),
    ],
    ids=str,
)
def test_a_dtype_that_a_form_does_not_have_is_refused(dtype: torch.dtype, quantized: bool, decomposed: bool) -> None:
    entry = refimpl.BackendPatternConfig(nn.ReLU).add_dtype_config(refimpl.DTypeConfig(dtype, dtype))
    config = refimpl.BackendConfig("wide").set_backend_pattern_config(entry)
    qconfig = refimpl.QConfig(refimpl.MinMaxObserver.with_args(dtype=dtype), refimpl.MinMaxObserver)
    mapping, x = refimpl.QConfigMapping().set_global(qconfig), torch.tensor([[0.0, 1.0]])
    found = refimpl.prepare_fx(nn.Sequential(nn.ReLU()).eval(), mapping, (x,), backend_config=config)
    found(x)
    forms: tuple[Callable[..., Any], ...] = (
        refimpl.convert_to_reference_fx,
        refimpl.convert_to_reference_decomposed_fx,
    )
    for convert, is_there in zip(forms, (quantized, decomposed), strict=True):
        if is_there:
            assert torch.allclose(convert(found)(x), x, atol=1 / 255)
        else:
            with pytest.raises(refimpl.QConfigError, match=f"CVT-10: .*{dtype}"):
                convert(found)


@pytest.mark.rule("CVT-03")
@pytest.mark.rule("CVT-10")
def test_dynamic_32_bits_have_the_decomposed_form_alone() -> None:
    """quantize_per_tensor_dynamic knows quint8, qint8 and float16: for qint32 it fails when the model is run."""
    entry = refimpl.BackendPatternConfig(nn.Linear).set_root_module(nn.Linear)
    entry.set_reference_quantized_module(nnqr.Linear)
    entry.add_dtype_config(refimpl.DTypeConfig(torch.qint32, torch.float32, torch.qint8, is_dynamic=True))
    config = refimpl.BackendConfig("wide").set_backend_pattern_config(entry)
    activation = refimpl.PlaceholderObserver.with_args(dtype=torch.qint32, is_dynamic=True)
    mapping = refimpl.QConfigMapping().set_global(refimpl.QConfig(activation, flows.QCONFIG.weight))
    found = refimpl.prepare_fx(nn.Sequential(nn.Linear(4, 4)).eval(), mapping, (X,), backend_config=config)
    with pytest.raises(refimpl.QConfigError, match=r"dynamic torch.qint32.*can express dynamic quint8 and qint8"):
        refimpl.convert_to_reference_fx(found)
    assert calls(refimpl.convert_to_reference_decomposed_fx(found))[0] == "choose_qparams.tensor"
