"""Ops with fixed qparams under default mappings and others: whose observer stands on their input (OBS-14)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized.reference as nnqr
import torch.ao.quantization.quantize_fx as torch_fx
from torch import nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.backends.torch_engines.engine import engine
from fx_quant_conformance.refimpl.observers.observers import FixedQParamsObserver
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.both_flows import torch_mappings
from tests.refimpl.support.ratios import decibels

ENGINES = [name for name in ("x86", "qnnpack") if name in torch.backends.quantized.supported_engines]


@pytest.mark.rule("OBS-14")
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("gate", [nn.Sigmoid(), nn.Tanh(), nn.Softmax(-1), nn.Hardsigmoid()], ids=lambda m: str(m)[:7])
def test_an_input_that_nothing_observes_has_the_global_observer_where_torchs_is_clipped(
    gate: nn.Module, name: str
) -> None:
    """Torch puts the fixed qparams of the output on it: what lies outside of 0..1 (of -1..1 for tanh) is lost."""
    x = torch.linspace(-6, 6, 64).reshape(4, 16)
    model, mapping = nn.Sequential(gate).eval(), torch_mappings.get_default_qconfig_mapping(name)
    torchs, ours = torch_fx.prepare_fx(model, mapping, (x,)), refimpl.prepare_fx(model, mapping, (x,))
    with torch.no_grad(), engine(name):
        theirs, found = (
            side.convert_to_reference_fx(prepared)(x)
            for side, prepared in ((torch_fx, torchs), (refimpl, ours))
            if prepared(x) is not None
        )
    exact = gate(x)
    assert decibels(exact, theirs) < 15, "torch is right now: drop this deviation"
    # 7 bits over 12 are steps of 0.1, off by 0.03 in the mean; a slope of 1 at most takes no more into the output
    assert decibels(exact, found) > 20
    first, last = refimpl.explain(ours).plan.slots
    assert type(first.make()) is type(mapping.global_qconfig.activation())
    assert type(last.make()).__name__ == FixedQParamsObserver.__name__


@pytest.mark.rule("OBS-14")
@pytest.mark.parametrize("is_qat", [False, True], ids=["ptq", "qat"])
def test_without_a_global_qconfig_an_input_of_fixed_qparams_is_measured(is_qat: bool) -> None:
    kind = refimpl.get_default_qat_qconfig_mapping("x86") if is_qat else refimpl.get_default_qconfig_mapping("x86")
    mapping = refimpl.QConfigMapping().set_object_type(nn.Sigmoid, kind.object_type_qconfigs[nn.Sigmoid])
    x = torch.linspace(-6, 6, 64).reshape(4, 16)
    prepare: Any = refimpl.prepare_qat_fx if is_qat else refimpl.prepare_fx
    prepared = prepare(nn.Sequential(nn.Sigmoid()).train(is_qat), mapping, (x,))
    prepared(x)
    first: Any = prepared.get_submodule(refimpl.explain(prepared).plan.slots[0].name)
    scale, zero_point = first.calculate_qparams()
    assert float(scale) == pytest.approx(12 / 255) and 0 <= int(zero_point) <= 255


@pytest.mark.rule("OBS-14")
@pytest.mark.parametrize("is_bounded", [True, False])
def test_bounds_that_a_dtype_config_claims_for_the_input_are_kept(is_bounded: bool) -> None:
    """The mapping has 0..127 for all and 0..255 for one producer, as for PReLU on x86."""
    config = refimpl.BackendConfig("half")
    for pattern, most in ((nn.Linear, 255), (nn.Hardswish, 127 if is_bounded else 255)):
        taken = refimpl.DTypeWithConstraints(torch.quint8, quant_min_lower_bound=0, quant_max_upper_bound=most)
        dtypes = refimpl.DTypeConfig(taken, taken, torch.qint8 if pattern is nn.Linear else None)
        config.set_backend_pattern_config(
            refimpl.BackendPatternConfig(pattern)
            .add_dtype_config(dtypes)
            .set_root_module(nn.Linear)
            .set_reference_quantized_module(nnqr.Linear)
        )
    seven = refimpl.MinMaxObserver.with_args(dtype=torch.quint8, reduce_range=True)
    mapping = flows.global_mapping(refimpl.QConfig(seven, flows.QCONFIG.weight))
    mapping.set_object_type(nn.Linear, flows.QCONFIG)
    model = nn.Sequential(OrderedDict(layer=nn.Linear(4, 4), act=nn.Hardswish())).eval()
    slots = refimpl.explain(refimpl.prepare_fx(model, mapping, torch.randn(2, 4), backend_config=config)).plan.slots
    own = [("layer", "OBS-14", 127)] if is_bounded else []
    expected: list[Any] = [("input_1", "OBS-01", 255), ("layer", "OBS-01", 255), *own, ("act", "OBS-01", 127)]
    assert [(slot.value, slot.rule, slot.make().quant_max) for slot in slots] == expected


@pytest.mark.rule("OBS-14")
@pytest.mark.parametrize("ends", ["output", "both"])
@pytest.mark.parametrize("has_global", [True, False])
def test_qparams_that_are_fixed_of_the_output_alone_do_not_stand_on_the_input(ends: str, has_global: bool) -> None:
    """The dtype config says nothing of the input's scale; torch puts the output's there all the same."""
    exact = refimpl.DTypeWithConstraints(torch.quint8, 0, 255, scale_exact_match=1 / 256, zero_point_exact_match=0)
    entry = refimpl.BackendPatternConfig(nn.Sigmoid)
    entry.add_dtype_config(refimpl.DTypeConfig(exact if ends == "both" else torch.quint8, exact))
    config = refimpl.BackendConfig("table").set_backend_pattern_config(entry)
    fixed = refimpl.QConfig(FixedQParamsObserver.with_args(scale=1 / 256, zero_point=0), flows.QCONFIG.weight)
    mapping = refimpl.QConfigMapping().set_object_type(nn.Sigmoid, fixed)
    if has_global:
        mapping.set_global(flows.QCONFIG)
    x = torch.linspace(-6, 6, 64).reshape(4, 16)
    prepared = refimpl.prepare_fx(nn.Sequential(nn.Sigmoid()).eval(), mapping, (x,), backend_config=config)
    prepared(x)
    first, last = (prepared.get_submodule(slot.name) for slot in refimpl.explain(prepared).plan.slots)
    assert type(last) is FixedQParamsObserver and type(first) is not FixedQParamsObserver
    found = refimpl.convert_to_reference_fx(prepared)(x)
    assert float((found - x.sigmoid()).abs().max()) < 0.01  # half a step of each end, at a slope of 1/4
