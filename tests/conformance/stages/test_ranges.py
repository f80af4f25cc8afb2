"""Grids that calibration does not explain are found; those that it does are left alone (CVT-01)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.backends.discovery import find_backend
from fx_quant_conformance.conformance.claims.claim import enumerate_claims
from fx_quant_conformance.conformance.machine.fault import FaultFound
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.ranges import check_ranges
from fx_quant_conformance.conformance.whole_models.architectures import ARCHITECTURES
from fx_quant_conformance.conformance.whole_models.jobs import unit_of
from fx_quant_conformance.conformance.whole_models.setups import ModelSetup
from fx_quant_conformance.conformance.whole_models.units import quantize_model
from fx_quant_conformance.refimpl import MinMaxObserver, QConfig, QConfigMapping, convert_to_reference_decomposed_fx
from fx_quant_conformance.reports.verdicts import Verdict

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
WEIGHT: Any = MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
SCHEMES = {
    "affine": MinMaxObserver.with_args(dtype=torch.quint8),
    "symmetric": MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric),
    "seven bits": MinMaxObserver.with_args(dtype=torch.quint8, quant_min=0, quant_max=127),
}


def prepared(*layers: nn.Module, mapping: Any = None, batches: tuple[Any, ...] = ((X,), (2 * X,))) -> Any:
    torch.manual_seed(1)
    mapping = mapping or QConfigMapping().set_global(QConfig(SCHEMES["affine"], WEIGHT))
    found = refimpl.prepare_fx(nn.Sequential(nn.Linear(4, 4), *layers).eval(), mapping, (X,))
    with torch.no_grad():
        for batch in batches:
            found(*batch)
    return found


@pytest.mark.rule("CVT-01")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("offset", [0.0, 3.0, -3.0])
def test_grids_of_the_calibration_data_are_no_fault(scheme: str, offset: float) -> None:
    mapping = QConfigMapping().set_global(QConfig(SCHEMES[scheme], WEIGHT))
    batches = ((X + offset,), (2 * X + offset,))
    model = prepared(nn.ReLU(), nn.Flatten(), nn.Linear(4, 4), mapping=mapping, batches=batches)
    assert list(check_ranges(convert_to_reference_decomposed_fx(model), batches)) == []


def narrow(model: Any) -> None:
    model.get_submodule("activation_post_process_1").max_val.mul_(0.9)


def wide(model: Any) -> None:
    observer = model.get_submodule("activation_post_process_1")
    for bound in (observer.min_val, observer.max_val):
        bound.mul_(3)


def never_calibrated(model: Any) -> None:
    model.get_submodule("activation_post_process_1").reset_min_max_vals()


@pytest.mark.rule("CVT-01")
@pytest.mark.parametrize(
    ("fault", "message"),
    [(narrow, "in calibration"), (wide, "explains no such step"), (never_calibrated, "_0 is quantized to 0..255 in")],
)
@pytest.mark.filterwarnings("ignore:MinMaxObserver has seen no data")
def test_a_range_that_is_not_what_calibration_saw_is_found(fault: Callable[[Any], None], message: str) -> None:
    model = prepared(nn.Linear(4, 4))
    fault(model)
    found = next(check_ranges(convert_to_reference_decomposed_fx(model), ((X,), (2 * X,))))
    assert (found.rule, found.verdict) == ("CVT-01", Verdict.REFUTED)
    assert found.message.startswith("_0 is quantized to") and message in found.message


@pytest.mark.rule("CVT-01")
def test_whole_models_are_held_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(find_backend("qnnpack"), seed=0, profile="quick")
    claims = enumerate_claims(bench.config, bench.capabilities)
    case = next(each for each in ARCHITECTURES if each.is_small).case()
    setup = ModelSetup(flow="ptq", activation=torch.quint8, scheme="per_tensor_symmetric")
    unit = unit_of("a model", case.build(), case, claims, setup)
    reference = quantize_model(bench, unit).reference
    assert list(check_ranges(reference, unit.calibration)) == []
    honest = bench.convert

    def halved(model: Any) -> Any:
        slots = [slot for slot in refimpl.explain(model).plan.slots if slot.role == "output"]
        model.get_submodule(slots[0].name).max_val.mul_(0.5)
        return honest(model)

    monkeypatch.setattr(bench, "convert", halved)
    with pytest.raises(FaultFound, match=r"is quantized to .* in calibration") as caught:
        quantize_model(bench, unit)
    assert (caught.value.fault.rule, caught.value.fault.verdict) == ("CVT-01", Verdict.REFUTED)
