"""Small constructs of users' networks: a right lowering of each is judged, and what cannot be judged is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.backends.reference import ReferenceBackend
from fx_quant_conformance.conformance.machine.fault import FaultFound
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.whole_models.judging import verify_model
from fx_quant_conformance.reports.schema import Check
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.whole_models.test_float_parts import evidence_of, quantize

Compute = Callable[[Any, Tensor], Any]


class Construct(nn.Module):
    """Layers of six features, what is held, and what a construct computes with them."""

    state: Tensor
    cache: Tensor
    factor: Tensor

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.lstm, self.projected = nn.LSTM(6, 4, batch_first=True), nn.LSTM(6, 4, proj_size=3, batch_first=True)
        self.rnn = nn.RNN(6, 6, batch_first=True)
        self.register_buffer("state", torch.zeros(6))
        self.register_buffer("cache", torch.zeros(4, 4, 6))
        self.register_buffer("factor", torch.tensor(0.5, dtype=torch.bfloat16))
        self._compute = compute

    def forward(self, x: Tensor) -> Any:
        return self._compute(self, x)


def judge(compute: Compute, *shape: int, model: nn.Module | None = None) -> Check:
    torch.manual_seed(1)
    reference, batches = quantize(ReferenceBackend(), (model or Construct(compute)).eval(), (torch.randn(*shape),))
    bench = Bench(ReferenceBackend(), seed=0, profile="quick")
    return verify_model(bench, "construct", reference, batches, takes_apart=True)


def _write_by_index(model: Any, x: Tensor) -> Any:
    low = torch.zeros(x.shape[0], 3, 3)
    rows, columns = torch.tensor([[0, 1, 1, 2, 2, 2], [0, 0, 1, 0, 1, 2]])
    low[:, rows, columns] = model.a(x)
    return model.b(low.flatten(1)[:, [0, 3, 4, 6, 7, 8]])


def _write_part(model: Any, x: Tensor) -> Any:
    y = torch.zeros(x.shape[0], 6) + model.a(x)
    y[:, :2].relu_()
    return model.b(y)


def _write_whole(model: Any, x: Tensor) -> Any:
    y = torch.zeros(x.shape[0], 6) + model.a(x)
    part = y[:, :3]
    y.relu_()
    return model.b(torch.cat([part + part, part * part], 1))


def _write_constant(model: Any, x: Tensor) -> Any:
    y = torch.zeros(4, 6)
    y[:, torch.tensor([0, 2, 4])] = model.a(x)[:, :3]
    return model.b(y)


def _write_reshaped(model: Any, x: Tensor) -> Any:
    y = torch.zeros(4, 2, 3)
    y[:, torch.tensor([0, 1]), torch.tensor([0, 2])] = model.a(x)[:, :2]
    return model.b(y.flatten(1))


def _cache(model: Any, x: Tensor) -> Any:
    model.cache.index_copy_(1, torch.tensor([1, 2]), model.a(x)[:, None].expand(-1, 2, -1))
    return model.b(model.cache)


def _softmax_in_float32(model: Any, x: Tensor) -> Any:
    scores = model.a(x).masked_fill(torch.arange(6) > 3, -1e4)
    return model.b(torch.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype) @ model.a.weight)


def _spectrum(model: Any, x: Tensor) -> Any:
    spectrum = torch.fft.rfft(model.a(x))
    kept = torch.zeros_like(spectrum)
    kept[..., :2] = spectrum[..., :2].sum(0, keepdim=True) * (0.5 + 0.25j)
    return model.b(torch.fft.irfft(kept, n=6)), torch.log1p(spectrum.abs())


def _solve(model: Any, x: Tensor) -> Any:
    y = model.a(x)
    gram = y.mT @ y + 4 * torch.eye(6)
    return model.b(torch.linalg.solve(gram, y.mT).mT), torch.logdet(gram)


def _mean_of_numbers(model: Any, x: Tensor) -> Any:
    y = model.a(x).masked_fill(torch.arange(6) > 3, float("nan"))
    return model.b(torch.nanmean(y, -1, keepdim=True).expand(-1, 6))


CONSTRUCTS: dict[str, tuple[Compute, tuple[int, ...]]] = {
    "written by index, through a view": (_write_by_index, (4, 6)),
    "a part written in place": (_write_part, (4, 6)),
    "all written, of which a part is read": (_write_whole, (4, 6)),
    "a constant that is written": (_write_constant, (4, 6)),
    "a constant that is written, and read in another shape": (_write_reshaped, (4, 6)),
    "a cache that is written before it is read": (_cache, (4, 6)),
    "states of an LSTM, its output unread": (lambda model, x: model.lstm(model.a(x))[1], (2, 3, 6)),
    "an LSTM with a projection": (lambda model, x: model.projected(model.a(x))[0], (2, 3, 6)),
    "an RNN": (lambda model, x: model.b(model.rnn(x)[0]), (2, 3, 6)),
    "places of a pool": (lambda model, x: model.pool(model.conv(x)), (2, 1, 6, 6)),
    "unpooled": (lambda model, x: model.unpool(*model.pool(model.conv(x))), (2, 1, 6, 6)),
    "softmax with a dtype": (_softmax_in_float32, (4, 6)),
    "spectra": (_spectrum, (4, 6)),
    "complex results": (lambda model, x: torch.fft.rfft(model.a(x)), (4, 6)),
    "a solution": (_solve, (4, 6)),
    "mean of numbers": (_mean_of_numbers, (4, 6)),
    "slope in evaluation": (lambda model, x: model.b(F.rrelu(model.a(x), training=model.training)), (4, 6)),
    "the smallest distance": (lambda model, x: F.softmin(torch.cdist(model.a(x), model.b.weight, p=1), -1), (4, 6)),
    "a float that is cast": (lambda model, x: model.b(model.a(x) * model.factor.type(x.dtype)), (4, 6)),
    "largest of groups": (
        lambda model, x: model.b(torch.zeros(4, 6).scatter_reduce(1, (x > 9).long(), model.a(x), "amax")),
        (4, 6),
    ),
}


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_a_right_lowering_is_judged(name: str) -> None:
    compute, shape = CONSTRUCTS[name]
    check = judge(compute, *shape)
    shown = evidence_of(check)
    assert check.verdict is Verdict.UNSHOWN and shown["otherwise"] == "VERIFIED", check
    assert max(shown["decided"], shown.get("decided_within", 0.0)) > 0.8


def _count(model: Any, x: Tensor) -> Any:
    model.state.mul_(0.5).add_(model.a(x).mean(0))
    return model.b(x + model.state)


@pytest.mark.parametrize(
    ("compute", "told"),
    [
        (_count, "the model keeps state from run to run, so that the same input gives another output"),
        (
            lambda model, x: model.b((model.a(x).double() + x).to(x.dtype)),
            "what convert made of the model does not run: AssertionError: Expecting input to have dtype torch.float32",
        ),
    ],
    ids=["state", "float64"],
)
def test_what_the_flow_cannot_judge_is_no_fault_of_the_backend(compute: Compute, told: str) -> None:
    with pytest.raises(FaultFound, match=told) as found:
        judge(compute, 4, 6)
    assert found.value.fault.verdict is Verdict.UNEXERCISED


def _pass_by_nothing(model: Any, x: Tensor) -> Any:
    y = model.a(x)
    for _ in range(5):  # so deep that end to end nothing is decided
        y = model.a(20 * y).relu()
    return model.b(torch.cat([y.cos(), torch.ops.aten.slice(y, 1, 6, 9)], 1))


@pytest.mark.rule("NUM-04")
def test_a_part_without_elements_leaves_nothing_undecided() -> None:
    """As where rotary positions turn a whole head: what is passed by is empty."""
    shown = evidence_of(judge(_pass_by_nothing, 4, 6))
    assert shown["decided"] < 0.5 and shown["otherwise"] == "VERIFIED"


def test_hooks_that_convert_leaves_out_are_named() -> None:
    model = Construct(lambda model, x: model.b(model.a(x)))
    model.a.register_forward_hook(lambda module, inputs, output: output / 2)
    with pytest.raises(FaultFound, match="convert leaves out the hooks of a, as torch's does") as found:
        judge(model._compute, 4, 6, model=model)
    assert found.value.fault.verdict is Verdict.UNEXERCISED


def _divide_by_zero(model: Any, x: Tensor) -> Any:
    y = torch.cat([model.a(x).abs() * 1e-4 + 1e-6, model.b(x) * 100], -1)[..., :6]  # quantized, the small ones are 0
    return y / y.norm(dim=-1, keepdim=True)


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("after", [lambda model, y: y, lambda model, y: model.b(y)], ids=["float", "quantized"])
def test_of_what_is_no_number_nothing_is_known(after: Compute) -> None:
    check = judge(lambda model, x: after(model, _divide_by_zero(model, x)), 4, 6)
    assert check.verdict is Verdict.UNEXERCISED and evidence_of(check)["decided"] == 0
    assert check.message.endswith("is that of truediv (operator.truediv), which is no number (NaN)")


def test_the_op_without_a_bound_is_named() -> None:
    check = judge(lambda model, x: model.b(torch.linalg.qr(model.a(x).mT @ model.a(x))[1].abs()), 8, 6)
    assert check.verdict is Verdict.UNEXERCISED
    assert "the first result without a bound is that of linalg_qr (torch._C._linalg.linalg_qr)" in check.message
