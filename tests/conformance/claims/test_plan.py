"""Cases: every claim has models that can be built and hold its pattern."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic as nni
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.backends.torch_engines.tables import TABLES, native_config
from fx_quant_conformance.conformance.claims.build import Preluded, build_model
from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.claim import Claim, enumerate_claims
from fx_quant_conformance.conformance.claims.inputs import draw_calibration_inputs
from fx_quant_conformance.conformance.claims.kinds import INTEGERS, Kind
from fx_quant_conformance.conformance.claims.pattern_plan import AddedModel
from fx_quant_conformance.conformance.claims.plan import VALUE_RANGES, plan_cases
from fx_quant_conformance.conformance.claims.quick import Share, shares_of
from fx_quant_conformance.conformance.ops.fused_modules import QAT_OF
from fx_quant_conformance.conformance.ops.op_model import Input, OneInput, Step
from fx_quant_conformance.refimpl import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    MatchAllNode,
)
from fx_quant_conformance.refimpl.config.patterns import leaves, pattern_name
from tests.conformance.support.dynamic_flows import flat
from tests.conformance.support.planning import claim_on, claims_of, names_of, planned

each_backend = pytest.mark.parametrize("name", TABLES)


def one_claim_per_pattern() -> list[Claim]:
    """Claims of all native configs; the models of one pattern are the same for all its dtype configs and flows."""
    return list({claim.pattern: claim for name in TABLES for claim in claims_of(name)}.values())


def same(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


# -- every claim ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@each_backend
def test_nearly_every_pair_has_cases_with_names_of_their_own(name: str) -> None:
    """What has none cannot match any model: an entry for a method that tensors do not have."""
    pairs: dict[tuple[str, str], list[str]] = {}
    for claim in claims_of(name):
        cases = plan_cases(claim, Capabilities())
        reasons = pairs.setdefault((claim.pattern, claim.dtype_config), [])
        if isinstance(cases, str):
            reasons.append(cases)
            continue
        assert len({case.name for case in cases}) == len(cases) >= 1
    left = [reason for reasons in pairs.values() for reason in reasons]
    assert sum(not reasons for reasons in pairs.values()) >= 0.98 * len(pairs), left
    assert all("can never match" in reason for reason in left)


@pytest.mark.slow
def test_a_few_cases_of_every_pattern_build_run_trace_and_follow_the_seed() -> None:
    for claim in one_claim_per_pattern():
        for case in () if isinstance(plan_cases(claim, Capabilities()), str) else planned(claim, 2):
            torch.manual_seed(7)
            model, inputs = build_model(case), draw_calibration_inputs(case)[0]
            torch.manual_seed(7)
            assert same(model, build_model(case)), (claim.id, case.name)
            traced = torch.fx.symbolic_trace(model) if not is_leaf(model) else model
            expected, found = (flat(each(*(x.clone() for x in inputs))) for each in (model, traced))
            assert all(map(torch.equal, expected, found)), (claim.id, case.name)
            assert all(bool(each.isfinite().all()) for each in expected) and not model.training


def is_leaf(model: nn.Module) -> bool:
    """Tell whether a model holds modules that tracing goes into though prepare does not: fused and QAT ones."""
    return any(type(module) in (*QAT_OF, nni.ConvAdd2d, nni.ConvAddReLU2d) for module in model.modules())


@pytest.mark.slow
def test_models_hold_the_modules_that_the_pattern_names() -> None:
    """A fused class itself, of a chain each member."""
    for claim in one_claim_per_pattern():
        found = leaves(claim.entry.normal_pattern)
        members = [leaf for leaf in found if isinstance(leaf, type) and leaf is not MatchAllNode]
        if members and not isinstance(plan_cases(claim, Capabilities()), str):
            kinds = [type(module) for module in build_model(planned(claim, 1)[0]).modules()]
            assert all(kinds.count(member) == members.count(member) for member in members), claim.id


@pytest.mark.slow
@pytest.mark.rule("CFG-06")
def test_patterns_that_add_a_second_input_add_it_where_they_say() -> None:
    added = [
        claim
        for claim in claims_of("onednn")
        if isinstance(claim.entry.normal_pattern, tuple) and MatchAllNode in leaves(claim.entry.normal_pattern)
    ]
    orders: set[bool] = set()
    for claim in added:
        case = planned(claim)[0]
        model = build_model(case)
        assert isinstance(model, AddedModel) and len(case.inputs) == 2
        x, y = draw_calibration_inputs(case)[0]
        total, orders = model.chain(x), orders | {model.added.is_first}
        assert total.shape == y.shape
        wanted = model.added.op(total, y)
        has_relu = any(leaf is nn.ReLU for leaf in leaves(claim.entry.normal_pattern))
        assert torch.equal(model(x, y), wanted.relu() if has_relu else wanted)
        (call,) = (node for node in torch.fx.symbolic_trace(model).graph.nodes if node.target is model.added.op)
        assert (call.args[1].op == "placeholder") == model.added.is_first == (call.args[0].op != "placeholder")
    assert orders == {True, False}


def test_a_batch_norm_gets_inputs_of_its_rank() -> None:
    for pattern, rank in (("nn.Conv2d+nn.BatchNorm2d", 4), ("nn.Linear+nn.BatchNorm1d", 2)):
        assert {len(case.inputs[0].shape) for case in planned(claim_on(pattern))} == {rank}
    assert {len(case.inputs[0].shape) for case in planned(claim_on("nn.Conv2d"))} == {3, 4}


# -- which cases ------------------------------------------------------------------------------------------------------


def test_the_claims_on_one_op_share_out_its_first_cases() -> None:
    """The same float ops with the same kind of dtypes are one op, a module and a function are two."""
    claims = [each for each in claims_of("qnnpack") if each.kind in INTEGERS]
    share_of = shares_of(claims)

    def shared(*patterns: str) -> list[list[str]]:
        named = [each for each in claims if each.pattern in patterns]
        plans = [plan_cases(each, Capabilities(), limit=8, share=share_of[each.id]) for each in named]
        return [[case.name for case in plan] for plan in plans if not isinstance(plan, str)]

    pools = shared("nn.MaxPool2d")
    assert [len(names) for names in pools] == [2, 2, 2, 2], "two dtypes, two flows"
    assert len({name for names in pools for name in names}) == 8
    convolutions = shared("nn.Conv2d", "nnqat.Conv2d")
    assert len({each.of for each in share_of.values() if each.of > 8}) > 0
    assert all(names for names in convolutions)
    fused = {share_of[each.id].of for each in claims if each.pattern in ("nni.ConvReLU2d", "nn.Conv2d+F.relu")}
    assert len(fused) == 1 and share_of[claim_on("torch.conv2d").id] != share_of[claim_on("nn.Conv2d").id]


def test_a_limit_takes_first_what_is_at_its_defaults_and_what_has_most_arguments_away_from_them() -> None:
    pool = claim_on("nn.AvgPool2d")
    every, few = planned(pool), planned(pool, 6)
    assert few[0].name == every[0].name and not few[0].varied
    assert [len(case.varied) > 1 for case in few] == [False, True, True, False, True, False]  # Thue and Morse
    assert {name for case in few for name in case.varied} >= {"ceil_mode", "padding", "stride", "count_include_pad"}
    assert len({case.value_range.name for case in few}) > 3
    assert sorted(case.name for case in planned(pool, 10**6)) == sorted(case.name for case in every)


def test_a_limit_takes_arguments_that_change_something_and_shapes_alone() -> None:
    for pattern in ("nn.AvgPool2d", "nn.MaxPool2d"):
        few = planned(claim_on(pattern), 9)
        named = [case for case in few if "ceil_mode=True" in case.variant]
        assert any("ceil_mode" not in case.idle for case in named), "a window begins where the input ends"
        assert any("ceil_mode" in case.idle for case in named), "no window does"
    plain = [case.variant for case in planned(claim_on("torch.conv2d"), 9) if len(case.varied) == 1]
    assert any(name.startswith("shape=") for name in plain)


@pytest.mark.rule("NUM-04")
def test_the_first_claim_on_an_op_has_results_that_are_a_bias_of_few_steps_where_cases_are_limited() -> None:
    linear = claim_on("nn.Linear")

    def biases(**options: Any) -> list[Case]:
        cases = plan_cases(linear, Capabilities(), **options)
        assert not isinstance(cases, str), cases
        return [case for case in cases if case.value_range.rests]

    torch.manual_seed(0)
    (case,) = biases(limit=9)
    assert not biases() and not biases(limit=9, share=Share(place=1, of=2))
    model, (low, high) = build_model(case), case.value_range.ranges[0]
    weight, bias = model.get_parameter("op0.weight"), model.get_parameter("op0.bias")
    outputs = torch.cat([model(*inputs) for inputs in draw_calibration_inputs(case)]) * case.value_range.output
    step, output_step = (high - low) / 255 * weight.abs().max() / 127, (outputs.max() - outputs.min()) / 255
    assert 2 * output_step < step
    assert (bias.abs() < 127 * output_step).all(), "within the range of the output"


def value_ranges_of(claim: Claim) -> set[str]:
    return {case.value_range.name for case in planned(claim)}


def test_every_value_range_that_matters_is_met() -> None:
    every = {value_range.name for value_range in VALUE_RANGES}
    assert value_ranges_of(claim_on("nn.Linear")) == every
    biases, outputs = {"large_bias", "largest_bias"}, {"coarse_output", "fine_output", "finest_output"}
    assert value_ranges_of(claim_on("operator.add")) == every - biases
    assert value_ranges_of(claim_on("nn.ReLU")) == every - biases - outputs
    assert value_ranges_of(claim_on("nn.Conv2d+nn.BatchNorm2d")) == every - {"largest_bias"}
    assert value_ranges_of(claim_on("torch.sigmoid", kind=Kind.FIXED)) == value_ranges_of(claim_on("nn.ReLU"))
    assert value_ranges_of(claim_on("nn.Linear", kind=Kind.DYNAMIC)) == {"signed", "large_bias"}
    assert value_ranges_of(claim_on("nn.EmbeddingBag", kind=Kind.WEIGHT_ONLY)) == {"signed", "large_bias"}


def test_two_operands_and_a_bias_meet_every_value_range_that_matters() -> None:
    """A sum with a number shares its input's grid, so an output's range of its own is met by two tensors alone."""
    for pattern in ("operator.add", "torch.mul"):  # what only moves integers is not run in all of them
        claim = claim_on(pattern)
        assert {case.value_range.name for case in planned(claim) if len(case.inputs) > 1} == value_ranges_of(claim), (
            pattern
        )
    for pattern in ("nn.Linear", "nn.Conv2d", "torch.conv2d", "nn.ConvTranspose2d", "nn.Linear+nn.ReLU"):
        large = [case for case in planned(claim_on(pattern)) if case.value_range.bias > 1.0]
        assert any(build_model(case).state_dict().keys() & BIASES for case in large), pattern


BIASES = {"op0.bias", "bias0"}


def test_what_lies_outside_of_a_backends_limits_is_not_tried() -> None:
    """The limits of the root hold in all patterns."""
    limits = {"nn.Conv2d": {"padding_mode": ("zeros",), "stride": (1,)}}
    for pattern in ("nn.Conv2d", "nni.ConvReLU2d", "nn.Conv2d+nn.ReLU"):
        free, bound = planned(claim_on(pattern)), planned(claim_on(pattern), limits=limits)
        assert any("padding_mode" in case.varied for case in free) and any("stride" in case.varied for case in free)
        assert not any({"padding_mode", "stride"} & set(case.varied) for case in bound)
    assert names_of(claim_on("nn.Linear"), limits=limits) == names_of(claim_on("nn.Linear"))


@pytest.mark.parametrize("pattern", ["nniqat.ConvBn1d", "nniqat.ConvBnReLU2d"])
def test_a_training_class_that_is_claimed_alone_is_built_in_each_of_its_cases(pattern: str) -> None:
    """torch's classes of a convolution and a norm split a padding given by a word in its letters."""
    entry = next(each for each in native_config("fbgemm").configs if pattern_name(each.normal_pattern) == pattern)
    alone = BackendConfig("alone").set_backend_pattern_configs([entry])
    [claim, *_] = enumerate_claims(alone, Capabilities())
    assert claim.flow == "ptq"
    for case in planned(claim):
        build_model(case)(*draw_calibration_inputs(case)[0])


@pytest.mark.rule("DTY-05")
def test_a_claim_of_fixed_qparams_is_also_given_inputs_outside_of_them() -> None:
    claim = claim_on("torch.sigmoid", kind=Kind.FIXED)
    cases = plan_cases(claim, Capabilities(), has_prelude=True)
    assert not isinstance(cases, str)
    built = [build_model(case) for case in cases]
    kinds = [isinstance(model, Preluded) for model in built]
    assert kinds[:4] == [True, False, True, False]
    assert all(("behind an identity" in case.name) == kind for case, kind in zip(cases, kinds, strict=True))
    x = torch.linspace(-9, 9, 5)
    assert torch.equal(built[0](x), x.sigmoid())
    assert not any(isinstance(build_model(case), Preluded) for case in planned(claim))


def exact(scale: float, zero_point: int = 128) -> DTypeConfig:
    fixed = DTypeWithConstraints(torch.quint8, scale_exact_match=scale, zero_point_exact_match=zero_point)
    return DTypeConfig(fixed, fixed)


def planned_of(*patterns: Any, dtypes: DTypeConfig) -> list[dict[str, Case]]:
    """The cases of each pattern alone, of a config that takes an identity, by name."""
    entries = [BackendPatternConfig(pattern).set_dtype_configs([dtypes]) for pattern in patterns]
    claims = enumerate_claims(BackendConfig("c").set_backend_pattern_configs(entries), Capabilities())
    plans = [plan_cases(each, Capabilities(), limit=2, has_prelude=True) for each in claims if each.flow == "ptq"]
    return [{case.name: case for case in plan} for plan in plans if not isinstance(plan, str)]


@pytest.mark.rule("DTY-05")
def test_a_claim_that_fixes_a_grid_is_tried_on_it_and_beyond_it_in_every_profile() -> None:
    relu, add = planned_of(nn.ReLU, torch.add, dtypes=exact(2.0**-4))
    for cases in (relu, add):
        given, beyond = cases["default fixed_grid"], cases["default beyond_fixed_grid"]
        assert given.value_range.ranges == ((-8.0, 7.9375),) and beyond.value_range.ranges[0] == (
            -8 - 15.9375,
            7.9375 + 15.9375,
        )
        assert given.value_range.goes_beyond and beyond.value_range.goes_beyond
    (sigmoid,) = planned_of(nn.Sigmoid, dtypes=exact(2.0**-8, 0))
    assert not [name for name in sigmoid if "fixed_grid" in name], "its results are all on the grid"
    (clipped,) = planned_of(nn.Sigmoid, dtypes=exact(2.0**-9, 0))
    assert [name for name in clipped if "fixed_grid" in name] == ["default fixed_grid", "default beyond_fixed_grid"]


def test_an_identity_stands_before_a_pattern_of_one_input() -> None:
    relu, add = planned_of(nn.ReLU, torch.add, dtypes=exact(2.0**-4))
    assert [any("behind an identity" in name for name in cases) for cases in (relu, add)] == [True, False]
    assert all(build_model(case)(*draw_calibration_inputs(case)[0]) is not None for case in add.values())


# -- building ---------------------------------------------------------------------------------------------------------


def case_of(build: Any, *shapes: tuple[int, ...], value_range: Any = VALUE_RANGES[0]) -> Case:
    return Case(name="c", build=build, inputs=tuple(Input(shape=shape) for shape in shapes), value_range=value_range)


def test_a_model_that_gives_only_zeros_is_drawn_again() -> None:
    class Constant(OneInput):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.get_buffer("factor")

    drawn = iter((0.0, 0.0, 2.0, 3.0))

    def build() -> OneInput:
        model = Constant([])
        model.register_buffer("factor", torch.tensor(next(drawn)))
        return model

    model = build_model(case_of(build, (2,)))
    assert float(model.get_buffer("factor")) == 2.0
    assert not model.training


def test_a_value_range_scales_weights_and_biases_of_modules_and_functions() -> None:
    def build() -> OneInput:
        torch.manual_seed(0)
        return OneInput([Step(op=nn.Linear(3, 3)), Step(op=F.linear, parameters=(torch.ones(2, 3), torch.ones(2)))])

    value_range = next(value_range for value_range in VALUE_RANGES if value_range.name == "large_bias")
    plain, scaled = build(), build_model(case_of(build, (2, 3), value_range=value_range))
    for name, parameter in scaled.named_parameters():
        factor = value_range.bias if "bias" in name else value_range.weight
        assert torch.equal(parameter, plain.get_parameter(name) * factor), name
    assert value_range.bias == 2**7  # more, and behind a batch norm the bias is beyond int32 in steps of s_x·s_w


@pytest.mark.parametrize("value_range", VALUE_RANGES, ids=lambda value_range: value_range.name)
def test_the_statistics_of_a_norm_are_as_large_as_what_comes_to_it(value_range: Any) -> None:
    """Else its mean, or its variance, would be all that is left of a narrow or a wide input."""

    def build() -> OneInput:
        torch.manual_seed(3)
        norm = nn.BatchNorm2d(3)
        norm.running_mean, norm.running_var = torch.tensor([0.5, -1, 0.25]), torch.tensor([1.0, 2, 0.5])
        return OneInput([Step(op=norm)])

    plain, scaled = (
        build().get_submodule("op0"),
        build_model(case_of(build, (2, 3, 4, 4), value_range=value_range)).get_submodule("op0"),
    )
    reach = max(abs(end) for end in value_range.ranges[0])
    for name, power in (("running_mean", 1), ("running_var", 2)):
        assert torch.equal(scaled.get_buffer(name), plain.get_buffer(name) * reach**power)
