"""Torch's flow is the oracle: same graphs, same qparams, same bits, stage by stage, on many models (QCM to LOW).

A fixed list of models (`zoo`) and models drawn by Hypothesis (`graph_generator`) go through both flows (`parity`).
What differs is listed by rule: `zoo_deviations` for the list and for drawn models, `ON_BOTH_SIDES`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.graph_generator import Program, Step, build, programs
from tests.refimpl.support.parity import REFIMPL, TORCH, Case, Run, compare, less_accurate, parity, run
from tests.refimpl.support.zoo import CASES
from tests.refimpl.support.zoo_deviations import DEVIATIONS, EXCUSES, KNOWN, Excuse, unexplained
from tests.refimpl.support.zoo_recipes import RECIPES

RULES = (
    "PAT-07", "QCM-02", "QCM-03", "FUS-03", "FUS-05", "OBS-01", "OBS-02", "OBS-04", "OBS-05", "OBS-06", "OBS-07",
    "OBS-08", "OBS-09", "OBS-10", "OBS-13", "QAT-01", "QAT-02", "CVT-01", "CVT-02", "CVT-03", "CVT-04", "CVT-06",
    "CVT-07", "CVT-09", "CVT-11", "LOW-01", "LOW-02",
)  # fmt: skip


def held_to(*rules: str) -> Callable[[Any], Any]:
    """Mark a test with several rules."""

    def mark(test: Any) -> Any:
        for rule in rules:
            test = pytest.mark.rule(rule)(test)
        return test

    return mark


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The models are small: more threads take longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- the fixed list ---------------------------------------------------------------------------------------


def marks_of(case: Case) -> list[Any]:
    """The rule of a case's known deviation."""
    return [pytest.mark.rule(KNOWN[case.name].rule)] if case.name in KNOWN else []


@pytest.mark.slow
@held_to(*RULES)
@pytest.mark.parametrize("case", [pytest.param(case, marks=marks_of(case), id=case.name) for case in CASES])
def test_refimpl_does_what_torch_does(case: Case) -> None:
    found = parity(case)
    if case.name not in KNOWN:
        assert not found, show(case.name, found)
        return
    known = KNOWN[case.name]
    if known.is_coarser:
        found.pop("accuracy", None)
    graphs = {stage: text for stage, text in found.items() if not stage.endswith("output")}
    assert set(graphs) == set(known.stages), show(f"{case.name}: {known.rule} explains {known.stages}, but", found)
    assert set(found) <= {*known.stages, *(f"{stage} output" for stage in known.stages)}, show(case.name, found)
    first = graphs[known.stages[0]]
    assert re.match(known.text, first.partition("\n")[0]), show(
        f"{case.name}: {known.rule} explains {known.text!r}, but", found
    )


def show(title: str, differences: dict[str, str]) -> str:
    """Return a message with the diffs of every stage."""
    return "\n".join([title, *(f"[{stage}] {text}" for stage, text in differences.items())])


def test_the_names_of_the_list_are_unique_and_each_row_of_a_deviation_is_of_its_cases() -> None:
    assert max(Counter(case.name for case in CASES).values()) == 1
    deviating = [(name, bool(known.mended_by)) for known in DEVIATIONS for name in known.cases]
    assert set(KNOWN) <= {name for name, _ in deviating} <= {case.name for case in CASES}
    assert len(deviating) == len(set(deviating)), "a second row of a case holds until a torch mends it"


# ---- drawn models -----------------------------------------------------------------------------------------

CHUNKS, EXAMPLES = int(os.environ.get("PARITY_CHUNKS", "3")), 50
RECIPES_OF = {
    "chosen": (
        "minmax", "native", "per channel", "x86 minmax", "onednn minmax", "fixed", "dynamic", "mixed",
        "float16 dynamic", "float16 static", "qat qnnpack", "qat onednn",
    ),
    "defaults": (
        "x86", "fbgemm", "onednn", "qnnpack", "qat x86", "qat fbgemm", "qat onednn", "qat qnnpack", "dynamic",
        "dynamic x86", "dynamic fbgemm", "dynamic onednn", "dynamic per channel x86",
    ),
}  # fmt: skip


def generated(program: Program, recipe: str) -> Case:
    """Return the case of a drawn model."""
    return Case(name=f"{program}, {recipe}", build=partial(build, program), recipe=RECIPES[recipe])


@pytest.mark.slow
@held_to(*RULES, *sorted({excuse.rule for excuse in EXCUSES} - set(RULES)))
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("kind", RECIPES_OF)
def test_drawn_models_are_torchs(kind: str, chunk: int) -> None:
    """200 models of each kind, 500 in `tox -e parity`; a chunk is a seed, so every run draws the same ones."""

    @seed(chunk)
    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow],
        phases=[Phase.generate],  # shrinking would take minutes: what is reported is small enough
    )  # fmt: skip
    @given(program=programs(), recipe=st.sampled_from(RECIPES_OF[kind]))
    def check(program: Program, recipe: str) -> None:
        case = generated(program, recipe)
        torchs, ours = run(TORCH, case), run(REFIMPL, case)
        differences = compare(torchs, ours)
        found = unexplained(program, recipe, torchs, differences)
        assert not found, show(case.name, found)
        worse = less_accurate(case, torchs, ours) if differences else []
        assert not worse, f"{case.name}: {worse}"

    check()


@pytest.mark.slow
@pytest.mark.parametrize("excuse", [pytest.param(e, marks=pytest.mark.rule(e.rule), id=e.why) for e in EXCUSES])
def test_an_excuse_is_needed(excuse: Excuse) -> None:
    """One that torch or refimpl has outgrown fails, until it goes too."""
    program, recipe = excuse.example
    case = generated(program, recipe)
    torchs = run(TORCH, case)
    differences = compare(torchs, run(REFIMPL, case))
    assert not unexplained(program, recipe, torchs, differences)
    others = [each for each in EXCUSES if each is not excuse]
    assert unexplained(program, recipe, torchs, differences, others), f"not needed: {excuse.why}"


# ---- deviations: what both do, by rule --------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.other, self.bn = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)
        self.bn.running_mean = torch.tensor([1.0, -1.0])
        self.norm, self.relu, self.run = nn.LayerNorm(4), nn.ReLU(), run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """What differs on a model: the count of a kind of node in both reference graphs, or the largest error."""

    rule: str
    run: Callable[..., Any]
    kind: str = "call_function quantize_per_tensor"
    counts: tuple[int, int] | None = None  # torch's and ours
    error: float | None = None  # ours is within it, torch's is not
    engine: str = "qnnpack"


@pytest.mark.rule("OBS-02")
def test_torch_tears_sharing_apart_that_a_later_op_extends() -> None:
    """x feeds relu and cat, both sharing: torch gives x the observer of cat, and relu's output keeps the old one."""
    steps = (Step("F.relu", (0,)), Step("linear", (1,)), Step("cat", (2, 0)))
    case = generated(Program(("rows",), steps, 1, "tuple"), "minmax")
    assert [run(side, case).torn for side in (TORCH, REFIMPL)] == [("relu",), ()]


@pytest.mark.rule("QAT-03")
@pytest.mark.parametrize(("shares", "equal"), [(False, [True, True]), (True, [False, True])])
def test_torch_observes_the_trained_weight_of_a_shared_module_once_for_each_call(
    shares: bool, equal: list[bool]
) -> None:
    """In the decomposed form the harness has both observe it once; so the quantized-tensor form shall too."""
    program = Program(("maps",), (Step("pointwise", (0,)), Step("pointwise", (1,), shares)))
    runs = [run(side, generated(program, "qat qnnpack")) for side in (TORCH, REFIMPL)]
    assert [weights(found, "reference") == weights(found, "decomposed") for found in runs] == equal


def weights(found: Run, stage: str) -> list[str]:
    """List the weights of a stage's reference modules, with their qparams."""
    lines = found.results[stage]
    assert not isinstance(lines, str)
    held = [line.numbers for line in lines if "weight_scale: " in line.numbers]
    assert held
    return held


@pytest.mark.rule("OBS-12")
def test_torch_leaves_a_float_input_after_an_op_that_reuses_an_observer_that_is_not_there() -> None:
    """The default mapping lets reshape reuse its input's observer; a float input has none, and linear needs one."""
    case = generated(Program(("rows",), (Step("reshape", (0,)), Step("linear", (1,)))), "fixed")
    made = [run(side, case).results["reference"] for side in (TORCH, REFIMPL)]
    kinds = [[line.kind for line in lines if not isinstance(line, str)] for lines in made]
    linears = [found.index("ao.nn.quantized.reference.modules.linear.Linear") for found in kinds]
    assert ["torch.quantize_per_tensor" in found[:at] for found, at in zip(kinds, linears, strict=True)] == [
        False,
        True,
    ]


@pytest.mark.rule("CVT-01")
def test_torch_names_the_qparams_of_an_input_after_a_later_user_when_it_rewrote_the_first_ones_arguments() -> None:
    steps = (Step("cat", (0, 1)), Step("ELU", (2,), opens_block=True), Step("x * 0.5", (1,)))
    case = generated(Program(("words", "words"), steps), "x86 minmax")
    made = [run(side, case).results["reference names"] for side in (TORCH, REFIMPL)]
    scales = [re.findall(r"blocks_\d_input_scale_\d", name) for name in map(str, made)]
    # The cat is not needed for the output; in both its other input was named first, and then dropped.
    assert scales == [["blocks_1_input_scale_0"], ["blocks_0_input_scale_1"]]


ON_BOTH_SIDES = (
    Deviation(
        rule="PAT-08",  # keyword arguments are arguments
        run=lambda net, x: torch.cat(tensors=[net.conv(x), net.other(x)]),
        counts=(3, 4),
    ),
    Deviation(
        rule="PAT-08",
        run=lambda net, x: net.relu(input=net.conv(x)),
        kind="module ConvReLU2d(Conv2d, ReLU)",
        counts=(0, 1),
    ),
    Deviation(rule="FUS-07", run=lambda net, x: net.bn(net.conv(x)) + net.conv(x), error=0.1),
    Deviation(
        rule="LOW-03",  # a fused add has no alpha
        run=lambda net, x: torch.add(net.conv(x), x, alpha=2),
        error=0.1,
        engine="onednn",
    ),
)


@pytest.mark.parametrize(
    "deviation",
    [pytest.param(d, marks=pytest.mark.rule(d.rule), id=f"{d.rule}-{i}") for i, d in enumerate(ON_BOTH_SIDES)],
)
def test_deviations_are_known_on_both_sides(deviation: Deviation) -> None:
    model, batches = Net(deviation.run).eval(), [(torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(0)),)]
    both = [
        flow(model, flows.global_mapping(), batches, deviation.engine) for flow in (flows.torch_flow, flows.our_flow)
    ]
    if deviation.counts is not None:
        assert tuple(flows.kinds(flow.reference)[deviation.kind] for flow in both) == deviation.counts
    if deviation.error is not None:
        with torch.no_grad():
            errors = [float((flow(*batches[0]) - model(*batches[0])).abs().max()) for flow in both]
        assert errors[1] < deviation.error < errors[0], f"errors of torch and ours against the float model: {errors}"
