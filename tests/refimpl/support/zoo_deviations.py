"""Where refimpl differs from torch, by rule: which cases of the list, at which stages, and what differs first.

A case without a row must not differ at all. A case with a row must differ at exactly the row's stages and, at the first
of them, in exactly this way: a deviation that goes away (on either side) fails until its row goes too. What a model
puts out may differ wherever its graph does, and need not. `EXCUSES` says the same for drawn models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fx_quant_conformance.refimpl.releases import has
from tests.refimpl.support.graph_generator import Program, Step
from tests.refimpl.support.graph_ops import OPS
from tests.refimpl.support.parity import STAGES, Run

LOWERED = ("lowered", "lowered names")
FROM_PREPARE = (
    "prepare",
    "prepare names",
    "calibrated",
    "reference",
    "reference names",
    "decomposed",
    "decomposed names",
    *LOWERED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A deviation: rule, reason, cases, stages where the graphs differ, and how the first one's summary begins."""

    rule: str
    why: str
    cases: tuple[str, ...]
    stages: tuple[str, ...]
    text: str  # a regular expression
    is_coarser: bool = False  # ours quantizes what torch leaves in float, and may be less accurate for it
    mended_by: str = ""  # a row of refimpl.releases: a torch that has it does not deviate


# What a summary may name where torch's op drops the output's own qparams and ours stays float with a quantize.
_FLOAT = r"nn\.modules\.(dropout\.Dropout|activation\.(Sigmoid|Softmax|Hardsigmoid|Tanh))"
_DROPOUT = r"ao\.nn\.quantized\.modules\.dropout\.Dropout"
_NATIVE = rf"{_DROPOUT}|ao\.nn\.quantized\.modules\.activation\.(Sigmoid|Softmax)|quantized\.dropout"
_FUNCTIONS = r"torch\.nn\.functional\.(dropout|hardsigmoid)|torch\.(sigmoid|tanh|quantize_per_tensor)"
_KIND = rf"\d+ (\.dequantize|\.sigmoid|\.tanh|get_attr|{_FLOAT}|{_NATIVE}|{_FUNCTIONS})"
REQUANTIZED = rf"(only torch: {_KIND}(, {_KIND})*; )?only refimpl: {_KIND}(, {_KIND})*$"
_OBSERVER = r"\d+ ao\.quantization\.\S+(Observer|FakeQuantize)"
TORN = rf"only torch: {_OBSERVER}( again)?(; only refimpl: {_OBSERVER}( again)?)?$|only refimpl: {_OBSERVER} again$"
_STATE = r"1 state blocks_\d+(_parts_\d+)?_input_(scale|zero_point)_\d+"
_INPUT_QPARAMS = rf"{_STATE}(, {_STATE})*"

# The stages of a weight that the model computes: torch computes it each time that the model runs.
FOLDED = ("reference", "reference names", "decomposed", "decomposed names")
_COMPUTED = r"only torch: 1 \.t; only refimpl: 1 get_attr$"

DEVIATIONS = (
    Known(
        rule="OBS-16",
        why="torch's converted models compute a weight of parameters each time; ours hold it",
        cases=("FunctionalLinears, minmax", "FunctionalLinears, second call off"),
        stages=FOLDED,
        text=_COMPUTED,
    ),
    Known(
        rule="OBS-16",
        why="the same, of float16, which torch has no dynamic decomposed form of",
        cases=("FunctionalLinears, float16 dynamic",),
        stages=FOLDED[:2],
        text=_COMPUTED,
    ),
    Known(
        rule="TRC-01",
        why="torch drops an op in place whose result is not used",
        cases=("InPlace, minmax",),
        stages=("prepare", "calibrated", "reference", "decomposed", "lowered"),
        text=r"only torch: 1 \.mul_; only refimpl: 1 \.mul$",
    ),
    Known(
        rule="LOW-03",
        why="torch gives a module that is called at two places the output scale of one of them",
        cases=("SharedConv, minmax", "SharedAlias, minmax"),
        stages=LOWERED,
        text=r"only torch: \d+ ao\.nn\.(intrinsic\.)?quantized\.modules\.",
    ),
    Known(
        rule="LOW-03",
        why="torch's quantized sigmoid has fixed output qparams; lowering drops the ones that the next op asked for",
        cases=("Audio, minmax", "Activations, x86 minmax", "FunctionalActivations, minmax"),
        stages=LOWERED,
        text=REQUANTIZED,
    ),
    Known(
        rule="LOW-03",
        why="as OBS-16; torch runs a relu that is switched off on the quantized tensor, and drops the range behind it",
        cases=("FunctionalLinears, method off",),
        stages=(*FOLDED, *LOWERED),
        text=_COMPUTED,
    ),
    Known(
        rule="QCM-03",
        why="torch lowers a norm that prepare left in float, as the QConfig would quantize its weight",
        cases=("FunctionalNorms, native",),
        stages=("lowered",),
        text=r"only torch: 1 quantized\.layer_norm; only refimpl: 1 \.dequantize, 1 torch\.nn\.functional\.layer_norm",
    ),
    Known(
        rule="OBS-10",
        why="torch observes the indices that topk returns; its reference model cannot run",
        cases=("Pointer, minmax",),
        stages=(*FROM_PREPARE[:5], "decomposed", *LOWERED),
        text=rf"only torch: {_OBSERVER}, {_OBSERVER} again$",
    ),
    Known(
        rule="LOW-03",
        why="torch lowers a product with a float operand to one on quantized tensors, which cannot run",
        cases=("Gated, minmax",),
        stages=LOWERED,
        text="torch raises RuntimeError: empty_strided",
    ),
    Known(
        rule="LOW-02",
        why="torch's packing functions take no left-out arguments, numbers for lists, or weights by keyword",
        cases=("Functions, minmax", "FunctionalTransposed, minmax", "FunctionalTransposed, native"),
        stages=("lowered",),
        text="torch raises ",
    ),
    Known(
        rule="LOW-02",
        why="as OBS-16; torch drops the weight that it packs, though another op reads it",
        cases=("FunctionalLinears, second call off",),
        stages=(*FOLDED, "lowered"),
        text=_COMPUTED,
        mended_by="weight_of_two_ops",
    ),
    Known(
        rule="OBS-02",
        why="torch replaces a shared observer that a later op shares too at some places only; ours has one more",
        cases=("GlobalPools, minmax",),
        stages=FROM_PREPARE[:6],
        text=rf"only refimpl: {_OBSERVER} again$",
    ),
    Known(
        rule="DTY-03",
        why="torch does not hold a module's weight to the bounds of the config",
        cases=("PoolFunctions, wide weight",),
        stages=FROM_PREPARE[:-2],
        text="only torch: 1 ao.quantization.observer.MinMaxObserver",
    ),
    Known(
        rule="OBS-05",
        why="torch lets a static op share the dynamic observer that it finds upstream",
        cases=("Recommender, mixed",),
        stages=(*FROM_PREPARE[:6], *LOWERED),
        text="only torch: 6 ao.quantization.observer.PlaceholderObserver again; only refimpl: 1 ",
        is_coarser=True,
    ),
    Known(
        rule="QCM-07",
        why="torch quantizes a fused pattern by its relu though its linear is switched off",
        cases=("Containers, type off",),
        stages=FROM_PREPARE,
        text="only torch: 2 ao.quantization.observer.MinMaxObserver",
    ),
)
KNOWN = {case: known for known in DEVIATIONS for case in known.cases if not (known.mended_by and has(known.mended_by))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Excuse:
    """A deviation of drawn models: rule, reason, for which, at which stages, and how the first one's summary begins.

    ``example``: a program and a recipe that differ in this way; an excuse that its example does not need fails.
    """

    rule: str
    why: str
    holds: Callable[[Program, str, Run], bool]  # the program, the name of the recipe, torch's results
    stages: tuple[str, ...]
    text: str
    example: tuple[Program, str]


def _any_of(*ops: str) -> Callable[[Program, str, Run], bool]:
    return lambda program, recipe, torchs: not {step.op for step in program.steps}.isdisjoint(ops)


def _in(*recipes: str) -> Callable[[Program, str, Run], bool]:
    return lambda program, recipe, torchs: recipe in recipes


def _calls_twice(program: Program, recipe: str, torchs: Run) -> bool:
    made = [step.op for step in program.steps if OPS[step.op].make is not None]
    return any(step.shares and made.count(step.op) > 1 for step in program.steps)


def _reuses(program: Program, recipe: str, torchs: Run) -> bool:
    return recipe in ("fixed", "qat qnnpack", "qat onednn") and _any_of("reshape", "heads")(program, recipe, torchs)


TWICE = (Step("pointwise", (0,)), Step("pointwise", (1,), True))
REWRITTEN = (Step("cat of three", (0, 1, 0)), Step("ELU", (2,), opens_block=True), Step("x * 0.5", (1,)))
BETWEEN_QUANTIZED = (Step("attention", (0, 0)), Step("relu of x + 1", (1,)), Step("Identity", (2,)))
LOWERING = (*LOWERED, "lowered output")
EXCUSES = (
    Excuse(
        rule="QCM-06",
        why="torch raises where the parts of a fused module have different QConfigs by type",
        holds=_in("mixed"),
        stages=("prepare",),
        text="torch raises LookupError: During fusion",
        example=(Program(("maps",), (Step("conv relu", (0,)),)), "mixed"),
    ),
    Excuse(
        rule="OBS-02",
        why="torch replaces a shared observer that a later op shares too at some places only",
        holds=lambda program, recipe, torchs: bool(torchs.torn),
        stages=STAGES,
        text=TORN,
        example=(Program(("rows",), (Step("F.relu", (0,)), Step("linear", (1,)), Step("cat", (2, 0)))), "minmax"),
    ),
    Excuse(
        rule="OBS-05",
        why="torch lets a static op share the dynamic observer that it finds upstream",
        holds=_in("mixed"),
        stages=STAGES,
        text=r"only torch: \d+ ao\.quantization\.observer\.PlaceholderObserver again; only refimpl: ",
        example=(Program(("words",), (Step("linear on words", (0,)), Step("unsqueeze", (1,)))), "mixed"),
    ),
    Excuse(
        rule="OBS-14",
        why="torch puts the fixed qparams of an op's output on an input that nothing observes",
        holds=_any_of("Sigmoid", ".tanh", "F.hardsigmoid", "softmax"),
        stages=STAGES,
        text=r"only torch: \d+ ao\.quantization\.(observer\.FixedQParamsObserver|fake_quantize\.FixedQParamsFakeQuant)",
        example=(Program(("words",), (Step("Sigmoid", (0,)),)), "qat qnnpack"),
    ),
    Excuse(
        rule="OBS-12",
        why="torch takes the result of an op that reuses its input's observer for observed though the input is not",
        holds=_reuses,
        stages=STAGES,
        text=rf"only refimpl: {_OBSERVER}",
        example=(Program(("rows",), (Step("reshape", (0,)),)), "fixed"),
    ),
    Excuse(
        rule="FUS-07",
        why="torch fuses a module that is called at more than one place",
        holds=_calls_twice,
        stages=STAGES,
        text=r"only torch: \d+ ao\.nn\.intrinsic\.",
        example=(Program(("maps",), (*TWICE, Step("norm relu", (2,)))), "qat onednn"),
    ),
    Excuse(
        rule="CVT-01",
        why="the qparams of an input are named after its first user; a rewrite of its arguments makes torch's the last",
        holds=lambda program, recipe, torchs: True,
        stages=("reference names", "decomposed names", "lowered names"),
        text=rf"only torch: {_INPUT_QPARAMS}; only refimpl: {_INPUT_QPARAMS}$",
        example=(Program(("words", "words"), REWRITTEN), "x86 minmax"),
    ),
    Excuse(
        rule="QAT-03",
        why="torch observes the trained weight of a module that is called at several places once for each",
        holds=lambda *drawn: drawn[1].startswith("qat") and _calls_twice(*drawn),
        stages=("reference", "reference output"),
        text="same structure, other numbers",
        example=(Program(("maps",), TWICE), "qat onednn"),
    ),
    Excuse(
        rule="LOW-03",
        why="torch gives a module that is called at two places the output scale of one of them",
        holds=_calls_twice,
        stages=LOWERING,
        text=r"only torch: \d+ ao\.nn\.(intrinsic\.)?quantized\.modules\.|same structure, other numbers",
        example=(Program(("maps",), TWICE), "qat onednn"),
    ),
    Excuse(
        rule="LOW-03",
        why="torch's quantized op drops the output's own qparams",
        holds=_any_of("Sigmoid", ".tanh", "F.hardsigmoid", "softmax"),
        stages=LOWERING,
        text=REQUANTIZED,
        example=(Program(("rows",), (Step("Identity", (0,)), Step("Sigmoid", (1,)), Step("linear", (2,)))), "native"),
    ),
    Excuse(
        rule="QCM-03",
        why="torch lowers a sum that its QConfig leaves in float where what surrounds it is quantized",
        holds=_in("mixed"),
        stages=LOWERING,
        text=r"only torch: 1 quantized\.add_relu; only refimpl: 1 \.dequantize, 1 _operator\.add, ",
        example=(Program(("words",), BETWEEN_QUANTIZED), "mixed"),
    ),
)


def unexplained(
    program: Program, recipe: str, torchs: Run, differences: Mapping[str, str], excuses: Iterable[Excuse] = EXCUSES
) -> dict[str, str]:
    """Return the stages of a drawn model's differences that no excuse covers. An excuse starts where its text does."""
    left = dict(differences)
    for excuse in excuses:
        covered = [stage for stage in STAGES if stage in left and stage in excuse.stages]
        if covered and re.match(excuse.text, _summary(left[covered[0]])) and excuse.holds(program, recipe, torchs):
            left = {stage: text for stage, text in left.items() if stage not in covered}
    return left


def _summary(text: str) -> str:
    return text.partition("\n")[0]
