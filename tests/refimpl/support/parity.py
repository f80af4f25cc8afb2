"""The parity harness: one case through torch's flow and through refimpl, compared stage by stage.

Both flows get the same QConfigs, mappings, custom configs and backend config objects (torch's), the same batches and
seeds. What a stage gives is kept as text (`canonical`), so nothing of one flow can leak into the other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import Any

import torch
import torch.ao.quantization.quantize_fx as torch_fx
from torch import Tensor, nn
from torch.fx import GraphModule

from fx_quant_conformance import refimpl
from fx_quant_conformance.backends.torch_engines.engine import engine
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.canonical import Line, canonical, difference, text_of
from tests.refimpl.support.ratios import decibels

Batches = Sequence[tuple[Any, ...]]
STAGES = (
    "prepare",
    "prepare names",
    "calibrated",
    "reference",
    "reference names",
    "reference output",
    "decomposed",
    "decomposed names",
    "decomposed output",
    "lowered",
    "lowered names",
    "lowered output",
)
CONVERTS = ("reference", "decomposed", "lowered")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a model is quantized: everything that the front door takes, as makers of torch's objects."""

    mapping: Callable[[], Any]
    config: str = "qnnpack"  # of torch's backend configs
    engine: str = "qnnpack"  # the native engine that lowering packs weights for
    is_qat: bool = False
    converts: tuple[str, ...] = CONVERTS  # the forms that torch can make and run from these QConfigs


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with its batches, a recipe, and what else the front door takes."""

    name: str
    build: Callable[[], tuple[nn.Module, Batches]]
    recipe: Recipe
    prepare_custom: Callable[[], Any] = lambda: None
    convert_custom: Callable[[], Any] = lambda: None
    convert_mapping: Callable[[], Any] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One implementation's front door."""

    name: str
    config: Callable[[str], Any]
    prepare: Callable[..., GraphModule]
    prepare_qat: Callable[..., GraphModule]
    converts: Mapping[str, Callable[..., GraphModule]]


TORCH = Side(
    name="torch",
    config=flows.torch_config,
    prepare=torch_fx.prepare_fx,
    prepare_qat=torch_fx.prepare_qat_fx,
    converts={
        "reference": torch_fx.convert_to_reference_fx,
        "decomposed": torch_fx._convert_to_reference_decomposed_fx,
        "lowered": torch_fx.convert_fx,
    },
)
_ours: Any = refimpl
REFIMPL = Side(
    name="refimpl",
    config=flows.our_config,  # as refimpl reads torch's: to read that in each pass takes a fifth of the time
    prepare=refimpl.prepare_fx,
    prepare_qat=lambda *args, **kwargs: _ours.prepare_qat_fx(*args, **kwargs),
    converts={
        "reference": refimpl.convert_to_reference_fx,
        "decomposed": refimpl.convert_to_reference_decomposed_fx,
        "lowered": refimpl.convert_fx,
    },
)


@dataclass(slots=True, kw_only=True)
class Run:
    """What one side made of a case: per stage a canonical form or a text; an error ends what depends on it."""

    results: dict[str, list[Line] | str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    converted: dict[str, GraphModule] = field(default_factory=dict)
    torn: tuple[str, ...] = ()  # ops that should share one observer and do not (OBS-02)


def run(side: Side, case: Case) -> Run:
    """Take a case through every stage of one side."""
    found = Run()
    model, batches = case.build()
    with engine(case.recipe.engine), attempt(found, "prepare"):
        prepared = _prepare(side, case, model, batches)
        found.results["prepare"] = canonical(prepared)
        found.results["prepare names"] = names(prepared)
        found.torn = torn(prepared, case.recipe.config)
        with attempt(found, "calibrated"):
            feed(prepared, batches, is_qat=case.recipe.is_qat)
            found.results["calibrated"] = canonical(prepared)
            *others, last = case.recipe.converts
            copies = {stage: copy.deepcopy(prepared) for stage in others} | {
                last: prepared
            }  # torch's convert uses it up
            for stage, model in copies.items():
                with attempt(found, stage):
                    found.converted[stage] = _convert(side, case, stage, model, batches, found)
    return found


def _prepare(side: Side, case: Case, model: nn.Module, batches: Batches) -> GraphModule:
    recipe = case.recipe
    torch.default_generator.manual_seed(1)  # QAT modules draw initial weights before they take the float ones
    prepare = side.prepare_qat if recipe.is_qat else side.prepare
    return prepare(
        copy.deepcopy(model).train(recipe.is_qat),
        recipe.mapping(),
        batches[0],
        prepare_custom_config=case.prepare_custom(),
        backend_config=side.config(recipe.config),
    )


def torn(prepared: GraphModule, config: str) -> tuple[str, ...]:
    """Name the ops that the config lets share one observer between inputs and output, and that call several."""
    found = []
    for node in prepared.graph.nodes:
        is_module = node.op == "call_module"
        called = type(prepared.get_submodule(str(node.target))) if is_module else node.target
        if called in _sharing(config):
            places = [*node.all_input_nodes, *node.users]
            names = {str(place.target) for place in places if str(place.target).startswith("activation_post_process_")}
            observers = {id(prepared.get_submodule(name)) for name in names}
            if len(observers) > 1:
                found.append(node.name)
    return tuple(found)


@cache
def _sharing(config: str) -> frozenset[Any]:
    entries = flows.torch_config(config).configs
    return frozenset(
        entry.pattern for entry in entries if entry.observation_type.name == "OUTPUT_SHARE_OBSERVER_WITH_INPUT"
    )


def _convert(side: Side, case: Case, stage: str, prepared: GraphModule, batches: Batches, found: Run) -> GraphModule:
    if side.name == TORCH.name and stage == "decomposed":
        observe_trained_weights(prepared)
    converted = side.converts[stage](
        prepared,
        convert_custom_config=case.convert_custom(),
        qconfig_mapping=case.convert_mapping(),
        backend_config=side.config(case.recipe.config),
    )
    if side is TORCH:
        flows.settle(converted)
    found.results[stage] = canonical(converted)
    found.results[f"{stage} names"] = names(converted)
    with torch.no_grad():
        found.results[f"{stage} output"] = "\n".join(text_of(converted(*copy.deepcopy(batch))) for batch in batches)
    return converted


def observe_trained_weights(prepared: GraphModule) -> None:
    """Let the fake quantizes of weights see the weights as convert takes them. (QAT-03, CVT-07)

    Torch does so for the quantized-tensor form only; here for the decomposed one, else the two would differ in numbers.
    """
    for module in prepared.modules():
        observe: Any = getattr(module, "weight_fake_quant", None)
        if observe is not None:
            plain: Any = module.to_float()  # type: ignore[operator]
            observe((plain[0] if isinstance(plain, nn.Sequential) else plain).weight)


@contextmanager
def attempt(found: Run, stage: str) -> Iterator[None]:
    """Keep an error as the result of a stage: the comparison reports it."""
    try:
        yield
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        found.errors[stage] = f"{type(error).__name__}: {first[:200]}"


def feed(prepared: GraphModule, batches: Batches, *, is_qat: bool) -> None:
    """Calibrate, or train for a few steps of plain gradient descent and go to eval mode."""
    torch.default_generator.manual_seed(2)
    if not is_qat:
        flows.calibrate(prepared, copy.deepcopy(batches))
        return
    for batch in copy.deepcopy(batches):
        loss = torch.stack([value.float().square().mean() for value in tensors(prepared(*batch))]).sum()
        parameters = [parameter for parameter in prepared.parameters() if parameter.requires_grad]
        if parameters and loss.requires_grad:
            _descend(parameters, torch.autograd.grad(loss, parameters, allow_unused=True))
    prepared.eval()


def _descend(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter.sub_(0.01 * gradient)


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a model's result."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def names(model: GraphModule) -> str:
    """Return what users read by name: the keys of the state dict and the modules that the graph calls."""
    called = {str(node.target) for node in model.graph.nodes if node.op == "call_module"}
    return "\n".join(
        [*(f"state {key}" for key in sorted(model.state_dict())), *(f"module {key}" for key in sorted(called))]
    )


def compare(torchs: Run, ours: Run) -> dict[str, str]:
    """Return what differs, by stage; equal errors on both sides are a difference too: nothing was compared."""
    found = {}
    for stage in STAGES:
        errors = {
            side: run.errors[stage] for side, run in (("torch", torchs), ("refimpl", ours)) if stage in run.errors
        }
        if errors:
            found[stage] = "; ".join(f"{side} raises {error}" for side, error in errors.items())
        elif stage in torchs.results and stage in ours.results:
            found[stage] = _differs(torchs.results[stage], ours.results[stage])
    return {stage: text for stage, text in found.items() if text}


def _differs(torchs: list[Line] | str, ours: list[Line] | str) -> str:
    if isinstance(torchs, str) or isinstance(ours, str):
        as_lines = [[Line(text, "", text) for text in str(side).splitlines()] for side in (torchs, ours)]
        return difference(*as_lines)
    return difference(torchs, ours)


FACTORS = (1.0, 1.5)  # inputs as in calibration, and half again as large
WORSE = 0.5  # dB that refimpl may lie below torch
SATURATE = () if torch.cpu._is_vnni_supported() else ("x86", "fbgemm", "onednn")
"""The engines whose kernels lose what they may of a model's accuracy on this CPU (findings 14, 15)."""
DRAWN = 24  # batches, so that a few integers that fall to the other side of a tie do not count


def less_accurate(case: Case, torchs: Run, ours: Run) -> list[str]:
    """List the forms whose SQNR against the float model, on new inputs, lies more than WORSE below torch's.

    Not of trained models, nor of those that draw random numbers: there is no one float model. Nor of lowered models
    whose kernels saturate.
    """
    model, batches = case.build()
    found = []
    for factor in () if case.recipe.is_qat else FACTORS:
        inputs = _drawn(batches[0], factor)
        exact, again = (_run_all(model, inputs) for _ in range(2))
        is_fixed = decibels(exact, again) == inf
        for stage in (stage for stage in ours.converted if stage in torchs.converted and is_fixed):
            if stage == "lowered" and case.recipe.engine in SATURATE:
                continue
            with engine(case.recipe.engine):
                theirs, own = (decibels(exact, _run_all(side.converted[stage], inputs)) for side in (torchs, ours))
            if own < theirs - WORSE:
                found.append(f"{stage}, inputs x {factor}: torch {theirs:.1f} dB, refimpl {own:.1f} dB")
    return found


def _drawn(batch: tuple[Any, ...], factor: float) -> list[tuple[Any, ...]]:
    """Draw batches like one: normal floats of its deviation, and all else as it is."""
    torch.default_generator.manual_seed(3)

    def like(part: Any) -> Any:
        is_float = isinstance(part, Tensor) and part.is_floating_point()
        return torch.randn_like(part) * (part.std() * factor) if is_float else part

    return [tuple(map(like, batch)) for _ in range(DRAWN)]


def _run_all(model: nn.Module, inputs: Sequence[tuple[Any, ...]]) -> list[Any]:
    with torch.no_grad():
        return [model(*copy.deepcopy(one)) for one in inputs]


def parity(case: Case) -> dict[str, str]:
    """Return the differences between torch and refimpl on a case, by stage; "accuracy", where a form loses some."""
    torchs, ours = run(TORCH, case), run(REFIMPL, case)
    found = compare(torchs, ours)
    worse = less_accurate(case, torchs, ours) if found else []  # what is the same is as accurate
    return found | ({"accuracy": "; ".join(worse)} if worse else {})
