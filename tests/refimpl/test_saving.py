"""A model that was saved and loaded is the one that it was: names, notes, values, what convert makes of it (CVT-12)."""

from __future__ import annotations

import copy
import io
import typing
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized as nnq
import torch.ao.nn.quantized.reference as nnqr
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.ns import _numeric_suite_fx

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, DTypeConfig
from tests.refimpl.support.both_core import X

pytestmark = pytest.mark.filterwarnings(  # what is not meant here
    "ignore:QConfigMapping. module_name_object_type_order:UserWarning",
    "ignore:convert_fx. not lowered:UserWarning",
    "ignore:up .ConvTranspose2d.:UserWarning",
)
SUITE: Any = _numeric_suite_fx  # not annotated
INT8 = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)
IMAGE = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0))
FORMS: tuple[Callable[[Any], Any], ...] = (
    refimpl.convert_to_reference_fx,
    refimpl.convert_to_reference_decomposed_fx,
    refimpl.convert_fx,
)


def travel(model: Any) -> Any:
    """Save a model as a whole, and load it."""
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def make_local() -> nn.Module:
    """A model of a class that no other module can find, which calls functions itself."""

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.weight = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Any:
            y = F.relu(self.a(x))  # fused: the later relus keep the names that they had beside it
            y = F.relu(F.linear(F.relu(x + y), self.weight))
            return torch.cat([F.relu(self.b(y)), torch.sigmoid(F.relu(y))])

    return Local().eval()


class Counting(nn.Module):
    """Writes to a buffer, computes of it alone, and reads a shape before it needs it: to trace again changes these."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        rows = x.shape
        y = F.max_pool2d(self.a(x).unsqueeze(0), 1).squeeze(0)
        self.seen.mul_(0.5)
        self.seen.add_(y.detach().mean(0))
        return self.b(y * (self.seen.abs() + 1)).reshape(rows) + self.seen


def make_annotated(annotation: Any) -> nn.Module:
    class Annotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return self.a(x)

    Annotated.forward.__annotations__["x"] = annotation
    return Annotated().eval()


WRITES = "a model that writes"
MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "a class in a function": make_local,
    "such a class inside": lambda: nn.Sequential(make_local(), nn.ReLU()).eval(),
    "a graph module": lambda: torch.fx.symbolic_trace(make_local()),
    "a fused model": lambda: refimpl.fuse_fx(make_local()),
    "a graph module inside": lambda: nn.Sequential(torch.fx.symbolic_trace(make_local())).eval(),
    WRITES: lambda: Counting().eval(),
    "an exported program": lambda: torch.export.export(make_local(), (X,)).module(),
}


def prepare(name: str, *, is_qat: bool = False, custom: Any = None) -> Any:
    mapping = (refimpl.get_default_qat_qconfig_mapping if is_qat else refimpl.get_default_qconfig_mapping)("x86")
    mapping.set_module_name_object_type_order("", F.relu, 1, None)
    model = MODELS[name]()
    door = refimpl.prepare_qat_fx if is_qat else refimpl.prepare_fx
    prepared = door(model.train() if is_qat else model, mapping, (X,), custom)
    prepared(X)
    return prepared.eval()


def assert_is_the_same(loaded: Any, model: Any) -> None:
    """Hold a loaded model to the one that was saved."""
    assert type(loaded).__mro__[1:] == type(model).__mro__[1:]
    calls = [[(node.op, node.name, str(node.target)) for node in each.graph.nodes] for each in (loaded, model)]
    assert calls[0] == calls[1]
    assert {name: type(part) for name, part in loaded.named_modules()} == {
        name: type(part) for name, part in model.named_modules()
    } | {"": type(loaded)}
    assert loaded.state_dict().keys() == model.state_dict().keys() and loaded.meta.keys() == model.meta.keys()
    assert torch.equal(loaded(X), model(X))


@pytest.mark.slow
@pytest.mark.rule("CVT-12")
@pytest.mark.rule("OBS-15")
@pytest.mark.parametrize(
    ("name", "is_qat"), [*((name, False) for name in MODELS), *((name, True) for name in ("a graph module", WRITES))]
)
def test_a_loaded_model_is_the_one_that_was_saved_and_is_converted_as_that_is(name: str, is_qat: bool) -> None:
    prepared = prepare(name, is_qat=is_qat)
    loaded_prepared = travel(prepared)
    assert refimpl.explain(loaded_prepared).rows() == refimpl.explain(prepared).rows()
    for convert in FORMS:
        assert_is_the_same(convert(loaded_prepared), convert(prepared))
    for model in (*(convert(prepared) for convert in FORMS), prepared):
        loaded = travel(travel(model))
        assert type(loaded).__name__ == type(model).__name__
        assert_is_the_same(loaded, model)
        assert_is_the_same(copy.deepcopy(loaded), model)


@pytest.mark.slow
@pytest.mark.rule("STD-01")
@pytest.mark.rule("CVT-12")
def test_a_standalone_module_of_a_class_in_a_function_is_saved_with_its_parent() -> None:
    custom = refimpl.PrepareCustomConfig().set_standalone_module_name("0", None, (X,), None, None)
    prepared = prepare("such a class inside", custom=custom)
    for convert in FORMS:
        assert torch.equal(travel(convert(prepared))(X), convert(prepared)(X))
    assert torch.equal(travel(prepared)(X), prepared(X))
    assert torch.equal(refimpl.convert_fx(travel(prepared))(X), refimpl.convert_fx(prepared)(X))


def make_class() -> type:
    class InFunction:
        pass

    return InFunction


ANNOTATIONS: Mapping[str, tuple[Any, Any]] = {
    "a tensor": (Tensor, Tensor),
    "optional": (typing.Optional[Tensor], typing.Optional[Tensor]),  # noqa: UP045
    "a list of a class in a function": (list[make_class()], None),  # type: ignore[misc]
    "a word": ("Tensor", None),
    "a list of a word": (list["Nothing"], None),  # type: ignore[name-defined]  # noqa: F821
    "annotated": (typing.Annotated[Tensor, 3], None),
    "a callable": (Callable[[int], Tensor], None),
}


@pytest.mark.rule("CVT-12")
@pytest.mark.parametrize("what", ANNOTATIONS)
def test_an_annotation_that_cannot_be_saved_is_dropped_and_any_other_kept(what: str) -> None:
    annotation, kept = ANNOTATIONS[what]
    prepared = refimpl.prepare_fx(make_annotated(annotation), refimpl.get_default_qconfig_mapping("x86"), (X,))
    prepared(X)
    reference = refimpl.convert_to_reference_fx(travel(prepared))
    assert [model.graph.find_nodes(op="placeholder")[0].type for model in (prepared, reference)] == [kept, kept]
    assert torch.equal(travel(reference)(X), reference(X))


@pytest.mark.rule("CVT-12")
@pytest.mark.rule("CVT-10")
def test_a_reference_class_in_a_function_is_named_by_convert_of_a_loaded_model_and_given_again() -> None:
    class InFunction(nnqr.Linear):
        @classmethod
        def from_float(cls, float_linear: Any, weight_qparams: Any) -> Any:
            made = nnqr.Linear.from_float(float_linear, weight_qparams)
            made.__class__ = cls
            return made

    entry = BackendPatternConfig(nn.Linear).add_dtype_config(INT8).set_root_module(nn.Linear)
    config = BackendConfig().set_backend_pattern_config(entry.set_reference_quantized_module(InFunction))
    mapping = refimpl.QConfigMapping().set_global(refimpl.get_default_qconfig("qnnpack"))
    prepared = refimpl.prepare_fx(make_local(), mapping, (X,), backend_config=config)
    prepared(X)
    loaded = travel(prepared)
    with pytest.raises(refimpl.ConfigError, match=r"'a': .*if they are set.*give convert the backend_config"):
        refimpl.convert_to_reference_fx(loaded)
    found = refimpl.convert_to_reference_fx(loaded, backend_config=config)
    assert type(found.get_submodule("a")) is InFunction
    assert torch.equal(found(X), refimpl.convert_to_reference_fx(prepared)(X))


class Convolutions(nn.Module):
    """A lowered convolution of each kind that qnnpack has, at several depths; one is called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))
        self.up, self.flat = nn.ConvTranspose2d(4, 4, 2), nn.Conv1d(4, 4, 1)
        self.weight = nn.Parameter(torch.randn(4, 4, 1, 1))

    def forward(self, x: Tensor) -> Any:
        y = self.body[3](self.up(self.body(x)))
        return F.conv2d(y, self.weight) + self.flat(y.flatten(2)).reshape(2, 4, 4, 4)


@pytest.mark.rule("CVT-12")
@pytest.mark.rule("LOW-02")
@pytest.mark.parametrize("engine", ["qnnpack", "fbgemm", "onednn"])
def test_a_lowered_model_with_convolutions_can_be_loaded_again_and_again(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.quantized, "engine", engine)
    prepared = refimpl.prepare_fx(Convolutions().eval(), refimpl.get_default_qconfig_mapping(engine), (IMAGE,))
    prepared(IMAGE)
    lowered = refimpl.convert_fx(prepared)
    before = dict(lowered.named_modules(remove_duplicate=False))
    loaded = travel(travel(nn.Sequential(lowered)))[0]
    assert dict(lowered.named_modules(remove_duplicate=False)) == before, "what is saved is not changed"
    convolutions = [type(part) for part in lowered.modules() if isinstance(part, nnq.Conv1d | nnq.Conv2d)]
    assert len(convolutions) == 4
    assert [type(part) for part in loaded.modules()][1:] == [type(part) for part in lowered.modules()][1:]
    assert torch.equal(loaded(IMAGE), lowered(IMAGE))
    assert loaded.state_dict().keys() == lowered.state_dict().keys()
    with torch.no_grad():
        assert not torch.equal(copy.deepcopy(loaded)(2 * IMAGE), lowered(IMAGE))


@pytest.mark.slow
@pytest.mark.rule("CVT-12")
def test_the_numeric_suite_finds_the_layers_of_a_loaded_model() -> None:
    prepared = prepare("a class in a function")
    found = []
    for model in (prepared, travel(prepared)):
        weights = SUITE.extract_weights("prepared", model, "lowered", refimpl.convert_fx(model))
        found.append({layer: [row["fqn"] for row in each["weight"]["prepared"]] for layer, each in weights.items()})
    assert found[0] == found[1] and len(found[0]) == 3
