"""What invariance measures and does not judge: results of nonfinite inputs, and of strided indices. (NUM-07)"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.claim import enumerate_claims
from fx_quant_conformance.conformance.ops.op_model import Role
from fx_quant_conformance.conformance.stages.nonfinite import measure_nonfinite
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, DTypeConfig
from fx_quant_conformance.reports.numbers import Scalar
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.varying_kernels import (  # noqa: F401  (one is a fixture)
    Function,
    by_memory,
    case_of,
    compared_of,
    one_thread,
    rerun,
)

pytestmark = pytest.mark.rule("NUM-07")


def measured(lowered: Function, case: Case, *, dynamic_batch: bool = True) -> dict[str, Scalar]:
    """The values that are measured of a case."""
    entry = BackendPatternConfig(nn.ReLU).set_dtype_configs([DTypeConfig(torch.quint8, torch.quint8)])
    claim = enumerate_claims(BackendConfig("c").set_backend_pattern_config(entry), Capabilities())[0]
    (measurement,) = measure_nonfinite(claim, compared_of(lowered, case), dynamic_batch=dynamic_batch)
    assert (measurement.kind, measurement.topic, measurement.subject) == ("measurement", "nonfinite", claim.id)
    return measurement.values


def test_what_is_made_of_nonfinite_inputs_is_recorded() -> None:
    def quantized(x: Tensor) -> Tensor:
        if bool(x.isposinf().any()):
            raise ValueError("infinite")
        return x.nan_to_num(nan=0.0).clamp(-500, 500)

    values = measured(quantized, case_of(lambda x: x, (2, 3)))
    assert values == {
        "nan": "changes 1 of 6 values, to 0",
        "+inf": "raises ValueError: infinite",
        "-inf": "changes 1 of 6 values, to -500",
        "no rows": "gives shape (0, 3)",
    }


def test_a_backend_of_fixed_batches_is_not_asked_for_none() -> None:
    """A device that declares ``dynamic_batch=False`` got batches without rows all the same."""
    values = measured(lambda x: x, case_of(lambda x: x, (2, 3)), dynamic_batch=False)
    assert list(values) == ["nan", "+inf", "-inf"]


def test_what_is_made_of_nan_is_told_in_one_order_and_chance_as_such() -> None:
    def spreading(x: Tensor) -> Tensor:
        return torch.tensor([[float("nan"), 4, float("nan")], [2, float("nan"), 7]]) if bool(x.isnan().any()) else x

    calls = itertools.count()

    def by_chance(x: Tensor) -> Tensor:
        return x.nan_to_num(nan=float(next(calls)))

    case = case_of(lambda x: x, (2, 3))
    assert measured(spreading, case)["nan"] == "changes 6 of 6 values, to nan, 2, 4, 7"
    assert measured(by_chance, case)["nan"] == "varies from run to run"


def test_what_is_made_of_strided_indices_is_recorded() -> None:
    table = torch.rand(9, 3)

    def lookup(i: Tensor) -> Tensor:
        if not i.is_contiguous():
            raise RuntimeError("not contiguous")
        return table[i]

    values = measured(lookup, case_of(lambda i: table[i], (4,), role=Role.INDEX))
    assert values == {"strided indices": "raises RuntimeError: not contiguous", "no rows": "gives shape (0, 3)"}


def test_a_changed_run_that_varies_by_itself_is_marked_as_chance() -> None:
    calls = itertools.count()

    def by_chance(x: Tensor) -> Tensor:
        return x + next(calls) if not x.is_contiguous() else x

    case = case_of(lambda x: x, (4, 5))
    check = rerun(by_chance, case).check
    assert check.verdict is Verdict.REFUTED and check.evidence["nondeterministic"] is True
    steady = rerun(by_memory, case).check
    assert steady.verdict is Verdict.REFUTED and "nondeterministic" not in steady.evidence
