"""Torch's flow is the oracle: same graphs, same qparams, same bits, stage by stage, on many models (QCM to LOW).

A fixed list of models (`zoo`) and models drawn by Hypothesis (`graph_generator`) go through both flows (`parity`).
What differs is listed by rule: `zoo_deviations` for the list and for drawn models.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.graph_generator import Program, build, programs
from tests.refimpl.support.parity import REFIMPL, TORCH, Case, compare, less_accurate, parity, run
from tests.refimpl.support.zoo import CASES
from tests.refimpl.support.zoo_deviations import DEVIATIONS, EXCUSES, KNOWN, Excuse, unexplained
from tests.refimpl.support.zoo_recipes import RECIPES

RULES = (
    "PAT-07",
    "QCM-02",
    "QCM-03",
    "FUS-03",
    "FUS-05",
    "OBS-01",
    "OBS-02",
    "OBS-04",
    "OBS-05",
    "OBS-06",
    "OBS-07",
    "OBS-08",
    "OBS-09",
    "OBS-10",
    "OBS-13",
    "QAT-01",
    "QAT-02",
    "CVT-01",
    "CVT-02",
    "CVT-03",
    "CVT-04",
    "CVT-06",
    "CVT-07",
    "CVT-09",
    "CVT-11",
    "LOW-01",
    "LOW-02",
)


def held_to(*rules: str) -> Callable[[Any], Any]:
    """Mark a test with several rules."""

    def mark(test: Any) -> Any:
        for rule in rules:
            test = pytest.mark.rule(rule)(test)
        return test

    return mark


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
        "minmax",
        "native",
        "per channel",
        "x86 minmax",
        "onednn minmax",
        "fixed",
        "dynamic",
        "mixed",
        "float16 dynamic",
        "float16 static",
        "qat qnnpack",
        "qat onednn",
    ),
    "defaults": (
        "x86",
        "fbgemm",
        "onednn",
        "qnnpack",
        "qat x86",
        "qat fbgemm",
        "qat onednn",
        "qat qnnpack",
        "dynamic",
        "dynamic x86",
        "dynamic fbgemm",
        "dynamic onednn",
        "dynamic per channel x86",
    ),
}


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
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
        phases=[Phase.generate],  # shrinking would take minutes: what is reported is small enough
    )
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


# ---- a deviation that no drawn model has -------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.other, self.relu, self.run = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1), nn.ReLU(), run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


@pytest.mark.rule("PAT-08")
@pytest.mark.parametrize(
    ("call", "kind", "counts"),
    [
        (
            lambda net, x: torch.cat(tensors=[net.conv(x), net.other(x)]),
            "call_function quantize_per_tensor",
            {"torch": 3, "refimpl": 4},
        ),
        (lambda net, x: net.relu(input=net.conv(x)), "module ConvReLU2d(Conv2d, ReLU)", {"torch": 0, "refimpl": 1}),
    ],
    ids=["cat", "relu"],
)
def test_torch_does_not_see_an_operand_by_keyword(call: Callable[..., Any], kind: str, counts: dict[str, int]) -> None:
    model, batches = Net(call).eval(), [(torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(0)),)]
    both = {"torch": flows.torch_flow, "refimpl": flows.our_flow}
    made = {side: flow(model, flows.global_mapping(), batches) for side, flow in both.items()}
    assert {side: flows.kinds(flow.reference)[kind] for side, flow in made.items()} == counts
