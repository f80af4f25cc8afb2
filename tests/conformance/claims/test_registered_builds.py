"""What a vendor registers: several builds, builds around a known root, complex patterns, ranges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic as nni
import torch.ao.nn.quantized.reference as nnqr
from torch import Tensor, nn

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.claims import registry
from fx_quant_conformance.conformance.claims.build import build_model
from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.inputs import draw_calibration_inputs
from fx_quant_conformance.conformance.claims.plan import BENDS, VALUE_RANGES, plan_cases
from fx_quant_conformance.conformance.claims.registry import register
from fx_quant_conformance.conformance.ops.op_model import Input
from fx_quant_conformance.conformance.ops.table import RECORDS
from fx_quant_conformance.refimpl import BackendPatternConfig, ConfigError, MatchAllNode
from tests.conformance.support.own_entries import (  # noqa: F401  (one is a fixture)
    U8_S8,
    OwnEntries,
    checks_of,
    claim_of,
    failures,
    no_registrations,
)
from tests.conformance.support.planning import planned

pytestmark = pytest.mark.usefixtures("no_registrations")


class Squared(nn.Module):
    """Not within the rules of any table."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(-2, 2).square()


class ConvSquared(nni._FusedModule):  # type: ignore[name-defined,misc]
    def __init__(self, conv: nn.Module, squared: nn.Module) -> None:
        super().__init__(conv, squared)


class ConvSum(nni._FusedModule):  # type: ignore[name-defined,misc]
    """A convolution and a second input, with a forward of its own and no attribute ``add``."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__(conv)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self[0](x) + y


def on_conv(entry: BackendPatternConfig) -> BackendPatternConfig:
    return entry.set_root_module(nn.Conv2d).set_reference_quantized_module(nnqr.Conv2d).set_dtype_configs([U8_S8])


def variants_of(cases: tuple[Case, ...]) -> set[str]:
    return {case.variant for case in cases}


def run(case: Case) -> None:
    build_model(case)(*draw_calibration_inputs(case)[0])


# -- several builds ---------------------------------------------------------------------------------------------------


def squared(size: int = 7, rank: int = 2) -> nn.Module:
    model = nn.Sequential(Squared()).eval()
    model.register_buffer("size", torch.tensor([size] * rank))
    return model


def test_a_builder_with_variants_is_called_with_each_and_so_are_its_inputs() -> None:
    register(
        Squared,
        squared,
        lambda size, rank: [(size,) * rank],
        variants=[{"size": 7, "rank": 2}, {"size": 8, "rank": 2}, {"size": 7, "rank": 4}],
        roundings=1,
    )
    cases = planned(claim_of(BackendPatternConfig(Squared)))
    shapes = {case.variant: (case.inputs[0].shape, case.varied) for case in cases}
    assert shapes == {
        "registered size=7,rank=2": ((7, 7), ()),
        "registered size=8,rank=2": ((8, 8), ("size",)),
        "registered size=7,rank=4": ((7, 7, 7, 7), ("rank",)),
    }
    assert len({case.name for case in cases}) == len(cases)
    first = [case.value_range for case in cases if case.variant == "registered size=7,rank=2"]
    assert set(first) == {value_range for value_range in (*VALUE_RANGES, *BENDS) if value_range.bias <= 1.0}
    for case in cases:
        assert build_model(case).get_buffer("size").tolist() == list(case.inputs[0].shape)


def test_of_several_builders_each_is_tried_with_its_inputs_or_all_with_the_same() -> None:
    builds = [lambda: squared(2), lambda: squared(3)]
    each: Any = [[(2, 2)], [Input(shape=(3, 3))]]
    register(Squared, builds, each)
    cases = planned(claim_of(BackendPatternConfig(Squared)))
    assert {(case.variant, case.inputs[0].shape) for case in cases} == {
        ("registered 1", (2, 2)),
        ("registered 2", (3, 3)),
    }
    register(Squared, builds, [(5,)])
    assert {case.inputs for case in planned(claim_of(BackendPatternConfig(Squared)))} == {(Input(shape=(5,)),)}


def test_every_model_that_is_given_is_tried_in_every_profile() -> None:
    """A claim's share of an op's first cases may have only some of them."""
    register(Squared, squared, [(9, 9)], variants=[{"size": size} for size in range(12)])
    claim = claim_of(BackendPatternConfig(Squared))
    for limit in (1, 8, None):
        assert len(variants_of(planned(claim, limit))) == 12


def test_ranges_are_tried_in_addition_in_every_profile() -> None:
    register(Squared, lambda: squared(), [(2, 7)], ranges=[(-2.5, 0.5), (0.0, 2.0)])
    for limit in (None, 8):
        cases = planned(claim_of(BackendPatternConfig(Squared)), limit)
        assert [case.value_range.ranges[0] for case in cases][-2:] == [(-2.5, 0.5), (0.0, 2.0)]
        assert [case.value_range for case in cases][-5:-2] == list(BENDS)


class Inverse(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return (x + 1000).log()


def test_a_value_range_in_which_the_results_are_no_numbers_is_left_out() -> None:
    register(Inverse, lambda: nn.Sequential(Inverse()).eval(), [(2, 7)])
    names = {case.value_range.name for case in planned(claim_of(BackendPatternConfig(Inverse)))}
    assert "wide" not in names and {"signed", "narrow", "far_input"} <= names
    register(Inverse, lambda: nn.Sequential(Inverse()).eval(), [(2, 7)], ranges=[(-1000.0, 0.0)])
    assert len({case.value_range.name for case in planned(claim_of(BackendPatternConfig(Inverse)))}) == len(names)


# -- around a known root ----------------------------------------------------------------------------------------------


def squared_after(root: nn.Module) -> nn.Module:
    return nn.Sequential(root, Squared()).eval()


def test_a_builder_that_takes_the_root_gets_its_variants_and_the_backends_limits_hold() -> None:
    register((nn.Conv2d, Squared), squared_after)
    claim = claim_of(BackendPatternConfig((nn.Conv2d, Squared)), U8_S8)
    cases = planned(claim)
    own = [arguments for _, arguments in RECORDS[nn.Conv2d].variants(whole=False, known=False)]
    assert len(variants_of(cases)) == len(own)
    assert {case.value_range for case in cases} == {*VALUE_RANGES, *BENDS}
    groups = set()
    for case in cases:
        conv: Any = build_model(case)[0]  # type: ignore[index]
        assert type(conv) is nn.Conv2d
        groups.add(conv.groups)
    assert {1, 2, 8, 16} <= groups
    bound = planned(claim, limits={"nn.Conv2d": {"stride": (1,), "padding_mode": ("zeros",)}})
    assert not any({"stride", "padding_mode"} & set(case.varied) for case in bound)


def test_the_root_of_a_fused_class_is_the_entrys_root_module() -> None:
    register(ConvSquared, lambda root: nn.Sequential(ConvSquared(root, Squared())).eval())
    cases = planned(claim_of(on_conv(BackendPatternConfig(ConvSquared)), U8_S8))
    assert len(variants_of(cases)) > 20
    run(cases[0])
    unknown = plan_cases(claim_of(BackendPatternConfig(ConvSquared)), Capabilities())
    assert isinstance(unknown, str) and unknown.endswith("nor a root_module: register a build without root")


def test_of_a_function_the_builder_gets_a_module_that_calls_it() -> None:
    register((torch.conv2d, Squared), squared_after)
    cases = planned(claim_of(BackendPatternConfig((torch.conv2d, Squared)), U8_S8))
    calls = [node.target for node in torch.fx.symbolic_trace(build_model(cases[0])).graph.nodes]
    assert calls.count(torch.conv2d) == 1
    run(cases[0])


class NeedsBatch(nn.Module):
    def forward(self, x: Tensor) -> Any:
        batch, channels, height, width = x.shape
        return x.reshape(batch, channels, height * width).reshape(batch, channels, height, width) * 2


def test_a_variant_in_which_the_vendors_model_cannot_run_is_left_out() -> None:
    register((nn.Conv2d, NeedsBatch), lambda root: nn.Sequential(root, NeedsBatch()).eval())
    cases = planned(claim_of(BackendPatternConfig((nn.Conv2d, NeedsBatch)), U8_S8))
    assert not any("_unbatched" in case.varied for case in cases) and len(variants_of(cases)) > 20


# -- complex patterns -------------------------------------------------------------------------------------------------

ADDED: Any = (torch.add, nn.Conv2d, MatchAllNode)


class Summed(nn.Module):
    def __init__(self, root: nn.Module, fuse: Callable[[nn.Module], nn.Module] | None = None) -> None:
        super().__init__()
        self.root, self.is_fused = (root if fuse is None else fuse(root)), fuse is not None

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.root(x, y) if self.is_fused else torch.add(self.root(x), y)


def make_sum(is_qat: bool, add: Any, conv: nn.Module, extra: Any) -> nn.Module:
    return ConvSum(conv)


def conv_of(pattern: Any) -> Any:
    return pattern[1]


def extra_of(pattern: Any) -> list[Any]:
    return [pattern[2]]


@pytest.mark.slow
def test_a_complex_pattern_with_an_extra_input_is_fused_quantized_and_judged() -> None:
    """It was an internal error of the suite: the oracle took the fused module for one of torch's own."""
    pair = BackendPatternConfig()._set_pattern_complex_format(ADDED).set_dtype_configs([U8_S8])
    pair.set_fuser_method(make_sum).set_fused_module(ConvSum)
    pair._set_root_node_getter(conv_of)._set_extra_inputs_getter(extra_of)
    fused = on_conv(BackendPatternConfig(ConvSum))
    backend = OwnEntries(pair, fused, on_conv(BackendPatternConfig(nn.Conv2d)))
    register(ADDED, lambda root: Summed(root).eval(), lambda shape: [shape])
    register(ConvSum, lambda root: Summed(root, ConvSum).eval(), lambda shape: [shape])
    for pattern in ("torch.add(nn.Conv2d,*)", f"{__name__}.ConvSum"):
        assert failures(checks_of(backend, pattern)) == []
    cases = planned(claim_of(pair, U8_S8))
    assert all(len(case.inputs) == 2 for case in cases)
    assert any(case.variant == "registered default" for case in cases), "beside the suite's own"


def test_an_op_of_two_others_is_the_other_meaning_of_three_ops() -> None:
    tree: Any = (torch.add, nn.ReLU, Squared)
    register(tree, lambda: nn.Sequential(nn.ReLU()).eval(), [(2,)])
    entry = BackendPatternConfig()._set_pattern_complex_format(tree)
    assert {case.variant for case in planned(claim_of(entry))} == {"registered"}


# -- what cannot be used ----------------------------------------------------------------------------------------------


def test_a_builder_that_fails_is_named_with_its_error() -> None:
    register(Squared, lambda: nn.Sequential(nn.Linear(3, 3), Squared()).eval(), [(2, 7)])
    reason = plan_cases(claim_of(BackendPatternConfig(Squared)), Capabilities())
    assert isinstance(reason, str) and reason.startswith(f"the model registered for {__name__}.Squared cannot be run: ")
    assert "registered: RuntimeError: mat1 and mat2 shapes cannot be multiplied" in reason
    no_inputs: Any = lambda shape: "none"  # noqa: E731
    register((nn.Conv2d, Squared), squared_after, no_inputs)
    reason = plan_cases(claim_of(BackendPatternConfig((nn.Conv2d, Squared)), U8_S8), Capabilities())
    assert isinstance(reason, str) and "are no inputs: give a callable that builds a model, and a shape" in reason


@pytest.mark.parametrize(
    ("arguments", "keywords", "expected"),
    (
        ((squared_after, [(2, 7)]), {}, "as inputs none, or a callable of the root's output shape"),
        ((squared_after,), {"variants": [{}]}, "give no variants"),
        ((None, [(2,)]), {}, "give a callable that builds a model, and a shape for each input"),
        ((nn.ReLU, []), {}, "give a callable that builds a model, and a shape for each input"),
        (([squared, squared], [[(2, 2)]]), {}, "give the inputs of each of the 2 builds, found 1"),
        (([],), {}, "give a list of callables"),
        (([squared, 3], [(2, 2)]), {}, "give a list of callables"),
        ((squared, [(2, 2)]), {"variants": [{"size": 1}, {"size": 1}]}, "give every variant once; size=1"),
        ((squared, lambda size: size), {"variants": [{"size": 1}]}, "a shape for each input"),
        ((squared, [(2, 2)]), {"ranges": [(1.0, 1.0)]}, "found the range"),
        ((squared, [(2, 2)]), {"ranges": [(0.0, float("inf"))]}, "within ±1e6"),
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_go_together_is_an_error(arguments: Any, keywords: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=r"^register\(.*") as raised:
        register(Squared, *arguments, **keywords)
    assert expected in str(raised.value)
    assert registry._registered == {}
