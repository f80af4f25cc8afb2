"""Ranges that are not finite: infinite values stay float, NaN is left out, and nothing of it is silent (OBS-18)."""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl.observers.qparams import INFINITE, saw_infinite
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.ratios import decibels, make, run, torch_ratios

X = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
Body = Callable[[Any, Tensor], Tensor]


class Attention(nn.Module):
    """Scores with a mask, and how much attention goes where; `mask` is the test's."""

    def __init__(self, mask: Body) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.q, self.k, self.softmax, self.mask = nn.Linear(8, 8), nn.Linear(8, 8), nn.Softmax(-1), mask
        self.register_buffer("hidden", torch.ones(6, 6, dtype=torch.bool).triu(1))
        self.register_buffer("added", torch.full((6, 6), -math.inf).triu(1))
        self.register_buffer("lowest", torch.full((6, 6), torch.finfo(torch.float32).min).triu(1))

    def forward(self, x: Tensor) -> Any:
        scores = (self.q(x) @ self.k(x).transpose(1, 2)) * 0.35
        return self.softmax(self.mask(self, scores))


MASKS: dict[str, Body] = {
    "added buffer": lambda net, scores: scores + net.added,
    "added first": lambda net, scores: torch.add(net.added, scores),
    "smallest float": lambda net, scores: scores + net.lowest,
    "computed buffer": lambda net, scores: scores + net.hidden.float().masked_fill(net.hidden, -math.inf),
    "masked_fill": lambda net, scores: scores.masked_fill(net.hidden, -math.inf),
    "where": lambda net, scores: torch.where(net.hidden, -math.inf, scores),
    "product with a number": lambda net, scores: scores + net.hidden.float() * torch.finfo(torch.float32).min,
    "reshaped": lambda net, scores: (scores + net.added).reshape(2, 6, 6),
}
HIDDEN = torch.ones(6, 6, dtype=torch.bool).triu(1)


@pytest.mark.rule("OBS-18")
@pytest.mark.parametrize("name", MASKS)
def test_no_attention_goes_to_masked_positions(name: str) -> None:
    made = make(Attention(MASKS[name]), X)
    assert made.worst > 25, made.ratios()
    for form in ("reference", "decomposed"):
        assert float(run(made.forms[form], (X,))[:, HIDDEN].abs().max()) == 0.0, "derived: exp(-inf) is 0"
    assert_decided(made.prepared)


def assert_decided(prepared: Any) -> None:
    rows = {row["node"]: row for row in refimpl.explain(prepared).rows()}
    assert rows["softmax"]["dtype config"] == "float"
    assert (
        rows["softmax"]["reason"].startswith("OBS-18: ") and "is infinite, by a constant" in rows["softmax"]["reason"]
    )
    assert rows["q"]["dtype config"] != "float"
    assert prepared(X).isfinite().all(), "no fake quantize sees it"


@pytest.mark.rule("OBS-18")
@pytest.mark.parametrize("name", ["masked_fill", "smallest float"])
def test_in_torchs_model_it_does(name: str) -> None:
    """The other side of the row of deviations.md."""
    assert min(torch_ratios(Attention(MASKS[name]), X).values()) < 17


@pytest.mark.rule("OBS-18")
def test_a_constant_mask_is_decided_about_before_anything_runs_in_training_too() -> None:
    mapping = refimpl.get_default_qat_qconfig_mapping("x86")
    assert_decided(refimpl.prepare_qat_fx(Attention(MASKS["added buffer"]).train(), mapping, (X,)))


@pytest.mark.rule("OBS-18")
def test_what_bounds_a_value_ends_it() -> None:
    made = make(Attention(lambda net, scores: (scores + net.added).clamp(-8.0, 8.0)), X)
    rows = {row["node"]: row for row in refimpl.explain(made.forms["reference"]).rows()}
    assert rows["add"]["dtype config"] == "float"
    assert rows["softmax"]["dtype config"] != "float"


class Given(nn.Module):
    """The mask is an input."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.q, self.out, self.softmax = nn.Linear(8, 6), nn.Linear(6, 6), nn.Softmax(-1)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return self.out(self.softmax(self.q(x) + mask))


MASK = torch.full((6, 6), -math.inf).triu(1)
OWN = ("MinMaxObserver", "MovingAverageMinMaxObserver")


def observers(owner: Any, name: str) -> Any:
    kind = getattr(owner, name)
    return refimpl.QConfig(
        kind.with_args(dtype=torch.quint8),
        refimpl.MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric),
    )


KINDS = [
    pytest.param(observers(owner, name), id=f"{owner.__name__} {name}")
    for owner in (flows.torchs, refimpl)
    for name in ("MinMaxObserver", "HistogramObserver")
]


def save(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.rule("OBS-18")
@pytest.mark.parametrize("qconfig", KINDS)
@pytest.mark.parametrize("travel", [lambda model: model, copy.deepcopy, save], ids=["itself", "copied", "saved"])
def test_a_mask_that_is_an_input_leaves_its_patterns_in_float_with_the_reason(qconfig: Any, travel: Any) -> None:
    model = Given().eval()
    mapping = refimpl.get_default_qconfig_mapping("qnnpack").set_global(qconfig)  # softmax has its fixed qparams
    prepared = refimpl.prepare_fx(model, mapping, (X, MASK))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of histograms
        for mask in (MASK, torch.zeros(6, 6), MASK):
            prepared(X, mask)
    prepared = travel(prepared)
    want = run(model, (X, MASK))
    for convert in (refimpl.convert_to_reference_fx, refimpl.convert_to_reference_decomposed_fx, refimpl.convert_fx):
        converted = convert(prepared)
        assert decibels(want, run(converted, (X, MASK))) > 25
        log = refimpl.explain(converted)
        rows = {row["node"]: row for row in log.rows()}
        assert rows["add"]["dtype config"] == rows["softmax"]["dtype config"] == "float"
        assert rows["add"]["reason"] == "OBS-18: mask is infinite in calibration"
        assert rows["softmax"]["reason"] == "OBS-18: add is infinite in calibration"
        assert {each["node"] for each in log.to_dict()["left_float"]} == {"add", "softmax"}
        assert rows["q"]["dtype config"] != "float" and rows["out"]["dtype config"] != "float"


@pytest.mark.rule("OBS-18")
@pytest.mark.parametrize("name", [*OWN, "HistogramObserver"])
def test_the_state_dict_of_torchs_kinds_carries_it(name: str) -> None:
    """A histogram's range holds finite values only, as torch's: what saw an infinite one is known to the module."""
    observer = getattr(refimpl, name)()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        observer(torch.tensor([1.0, -math.inf, 2.0]))
        observer(torch.tensor([1.0, 2.0]))
    assert saw_infinite(observer)
    loaded = getattr(refimpl, name)()
    loaded.load_state_dict(observer.state_dict())
    assert saw_infinite(loaded) == (name != "HistogramObserver")
    assert not saw_infinite(getattr(refimpl, name)())


@pytest.mark.rule("OBS-18")
def test_a_fake_quantize_passes_infinite_values_on_and_keeps_its_qparams() -> None:
    for fake in (refimpl.FakeQuantize(), refimpl.FusedMovingAvgObsFakeQuantize()):
        fake(torch.tensor([-1.0, 1.0]))
        scale = fake.scale.clone()
        x = torch.tensor([-math.inf, 0.3])
        assert torch.equal(fake(x), x) and torch.equal(fake.scale, scale)


@pytest.mark.rule("OBS-18")
@pytest.mark.parametrize("is_qat", [False, True], ids=["ptq", "qat"])
def test_a_prepared_model_with_torchs_observers_can_be_scripted_and_notes_it_there(is_qat: bool) -> None:
    assert INFINITE == 1.7014117331926443e38, "the number in note_infinite, which TorchScript compiles"
    prepare: Any = refimpl.prepare_qat_fx if is_qat else refimpl.prepare_fx
    qat_mapping = flows.torch_mappings.get_default_qat_qconfig_mapping("qnnpack")
    mapping = qat_mapping if is_qat else flows.global_mapping()
    prepared = prepare(nn.Sequential(nn.Linear(8, 8)).train(is_qat), mapping, (X,))
    scripted: Any = torch.jit.script(prepared)
    for values, expected in ((X, False), (torch.full((1, 8), math.inf), True)):
        scripted(values)
        assert bool(scripted.activation_post_process_0.saw_infinite) is expected


# -- NaN --------------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.last(F.relu(self.first(x)))


def with_nan() -> Tensor:
    x = X.clone()
    x[0, 0, 0] = math.nan
    return x


@pytest.mark.rule("OBS-18")
@pytest.mark.parametrize("name", [*OWN, "HistogramObserver"])
def test_observers_leave_nan_out_and_say_so_once_with_the_node(name: str) -> None:
    mapping = refimpl.QConfigMapping().set_global(observers(refimpl, name))
    found = []
    for batches in ([X, X], [X, with_nan()]):
        prepared = refimpl.prepare_fx(Layers().eval(), mapping, (X,))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in (*batches, batches[1]):
                prepared(batch)
        found.append((refimpl.convert_to_reference_fx(prepared), [str(each.message) for each in caught]))
    (clean, silent), (converted, said) = found
    assert silent == [] and decibels(run(clean, (X,)), run(converted, (X,))) > 25
    assert said[0] == f"{name} of 'x': 1 of 96 values are NaN, and are left out"
    assert len(said) == 3, "one for each observer that saw some: of x, of first and of last"


@pytest.mark.rule("OBS-18")
def test_a_channel_without_a_number_has_the_range_0_and_others_theirs() -> None:
    observer = refimpl.PerChannelMinMaxObserver(dtype=torch.qint8)
    with pytest.warns(UserWarning, match="3 of 6 values are NaN, and are left out"):
        observer(torch.tensor([[1.0, math.nan, -2.0], [math.nan] * 2 + [3.0]]))
    assert observer.min_val.tolist() == [-2.0, 3.0] and observer.max_val.tolist() == [1.0, 3.0]
    empty = refimpl.PerChannelMinMaxObserver(dtype=torch.qint8)
    with pytest.warns(UserWarning, match="are NaN"):
        empty(torch.tensor([[1.0, 2.0], [math.nan, math.nan]]))
    assert empty.min_val.tolist() == [1.0, 0.0] and not saw_infinite(empty)


@pytest.mark.rule("OBS-18")
@pytest.mark.parametrize("name", [*OWN, "HistogramObserver"])
def test_a_batch_of_nan_changes_nothing(name: str) -> None:
    observer = getattr(refimpl, name)()
    with pytest.warns(UserWarning, match="2 of 2 values are NaN"):
        observer(torch.tensor([math.nan, math.nan]))
    observer(torch.tensor([-1.0, 1.0]))
    before = [buffer.clone() for buffer in observer.buffers()]
    observer(torch.tensor([math.nan, math.nan]))
    assert all(torch.equal(new, old) for new, old in zip(observer.buffers(), before, strict=True))


@pytest.mark.rule("OBS-18")
def test_training_goes_on_after_a_batch_with_nan() -> None:
    mapping = refimpl.get_default_qat_qconfig_mapping("x86")
    prepared = refimpl.prepare_qat_fx(Layers().train(), mapping, (X,))
    prepared(X)
    with pytest.warns(UserWarning, match="FusedMovingAvg|MovingAverage"):
        prepared(with_nan())
    prepared(X)
    reference = refimpl.convert_to_reference_fx(prepared.eval())
    assert decibels(run(Layers().eval(), (X,)), run(reference, (X,))) > 20


@pytest.mark.rule("OBS-18")
@pytest.mark.parametrize("name", ["MinMaxObserver", "MovingAverageMinMaxObserver"])
def test_convert_refuses_qparams_that_are_not_finite_and_names_the_value(name: str) -> None:
    """Torch's observers take NaN for a range, and its convert says nothing."""
    prepared = refimpl.prepare_fx(
        Layers().eval(), refimpl.QConfigMapping().set_global(observers(flows.torchs, name)), (X,)
    )
    prepared(with_nan())
    with pytest.raises(
        refimpl.QConfigError,
        match=rf"observer of 'x' \(input\): {name} gives (scale \[nan\].*NaN or infinite|no qparams: min nan)",
    ):
        refimpl.convert_to_reference_fx(prepared)


class FunctionalLayer(Layers):
    def forward(self, x: Tensor) -> Any:
        return F.linear(x, self.weight)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))


@pytest.mark.rule("OBS-18")
@pytest.mark.parametrize(("build", "engine"), [(Layers, "x86"), (FunctionalLayer, "qnnpack")])
def test_convert_refuses_a_weight_with_nan_and_leaves_an_infinite_one_in_float(build: Any, engine: str) -> None:
    for bad in (math.nan, math.inf):
        model = build().eval()
        (model.weight if build is FunctionalLayer else model.last.weight).data[0, 0] = bad
        prepared = refimpl.prepare_fx(model, refimpl.get_default_qconfig_mapping(engine), (X,))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prepared(X)
        if math.isnan(bad):
            with pytest.raises(
                refimpl.ModelError, match=r"weight.*1 of the 32 values of the weight are NaN|'last'.*1 of"
            ):
                refimpl.convert_to_reference_fx(prepared)
            continue
        rows = refimpl.explain(refimpl.convert_to_reference_fx(prepared)).rows()
        assert [row["reason"] for row in rows][-1].startswith("OBS-18: ")
