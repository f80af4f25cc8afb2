"""Both flows, one answer: each claim of a config through FX graph mode, and through PT2E with BackendConfigQuantizer.

A claim's model is prepared, calibrated and converted twice, on the same inputs: by refimpl's FX flow to the decomposed
reference model; and exported, annotated by BackendConfigQuantizer, and prepared and converted by torchao. Compared are
the quantized ops with their qparams, the integers of the weights, and the outputs, bit for bit. A pair (pattern × dtype
config) carries over if all of its claims do. What does not must fit one of REASONS; docs/pt2e.md has the table.

    python -m benchmarks.pt2e_flows qnnpack x86     # the named configs
    python -m benchmarks.pt2e_flows --write-doc     # all seven, and the table of docs/pt2e.md
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.fx import GraphModule, Node
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves
from torchao.quantization.pt2e import move_exported_model_to_eval
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e

import refimpl
from backends.discovery import describe_error, find_backend
from conformance.annotations.remembered import remember_patterns
from conformance.claims.build import build_model
from conformance.claims.claim import FLOAT_QPARAMS, Claim, enumerate_claims
from conformance.claims.inputs import Batch, draw_calibration_inputs
from conformance.claims.plan import plan_cases
from conformance.stages.calibration import leaves_of, mapping_for
from refimpl.exported import Unnamed, fold_weights
from refimpl.patterns import leaves
from refimpl.pt2e import BackendConfigQuantizer
from refimpl.tracing import attribute_of

CONFIGS = ("native", "fbgemm", "x86", "qnnpack", "onednn", "tensorrt", "executorch")
DOCUMENT = Path(__file__).parent.parent / "docs" / "pt2e.md"
BEGIN, END = "<!-- table of pairs: python -m benchmarks.pt2e_flows --write-doc -->\n", "<!-- end of the table -->"


# -- why a claim may differ --------------------------------------------------------------------------------------------


class Reason(NamedTuple):
    """Why claims cannot come out the same.

    ``has_form``: the pattern exists in an exported program. ``is_slow``: torchao takes half a minute for one claim;
    only ``--slow`` tries these.
    """

    key: str
    text: str
    holds: Callable[[Claim], bool]
    has_form: bool = True
    is_slow: bool = False


def _names(claim: Claim) -> list[str]:
    return [getattr(leaf, "__name__", str(leaf)) for leaf in leaves(claim.entry.normal_pattern)]


def _is_qat_module(claim: Claim) -> bool:
    return any(".qat." in str(getattr(leaf, "__module__", "")) for leaf in leaves(claim.entry.normal_pattern))


def _is_fused_norm(claim: Claim) -> bool:
    return any("Bn" in name for name in _names(claim))


def _has_layer_and_norm(claim: Claim) -> bool:
    names = _names(claim)
    has_layer = any(name.startswith(("Conv", "Linear")) for name in names)
    return _is_fused_norm(claim) or (has_layer and any("BatchNorm" in name for name in names))


def _has_no_such_method(claim: Claim) -> bool:
    pattern = claim.entry.pattern
    return isinstance(pattern, str) and not hasattr(Tensor, pattern)


REASONS = (
    Reason(
        "qat module",
        "A QAT module is no float model: its fake quantizes are part of it, and torch.export does not take them "
        "(data-dependent guards).",
        _is_qat_module,
        has_form=False,
    ),
    Reason(
        "no such method",
        "The entry names a method that tensors do not have, so no model holds it.",
        _has_no_such_method,
        has_form=False,
    ),
    Reason(
        "no op",
        "Export writes no op: nn.Identity does nothing, nor does contiguous() on a contiguous tensor.",
        lambda claim: _names(claim) in (["Identity"], ["contiguous"]),
        has_form=False,
    ),
    Reason(
        "export fails",
        "torch.export fails on the suite's model of unsqueeze_ in place (IndexError: list index out of range).",
        lambda claim: _names(claim) == ["unsqueeze_"],
        has_form=False,
    ),
    Reason(
        "real zero points",
        "quantized_decomposed.quantize_per_channel drops the fraction of a zero point (finding 83), and "
        "those of "
        "per_channel_affine_float_qparams are real numbers. The Quantizer leaves the pattern in float, and says so; so "
        "it does with 4-bit rows, which have no plain integer dtype.",
        lambda claim: claim.scheme == FLOAT_QPARAMS,
    ),
    Reason(
        "batch norm kept",
        "FX keeps the batch norm of a fused module (nni.ConvBn2d) that the float model has already. prepare_pt2e folds "
        "every batch norm after a convolution or linear layer, before it asks the Quantizer.",
        lambda claim: claim.flow == "ptq" and _is_fused_norm(claim),
    ),
    Reason(
        "batch norm in QAT",
        "torchao trains a convolution and its batch norm as ops of its own, whose eps is always 1e-05 (finding 78), "
        "and folds them in another order of float32 operations; it does not train those of a linear layer.",
        lambda claim: claim.flow == "qat" and _has_layer_and_norm(claim),
        is_slow=True,
    ),
)


def find_reason(claim: Claim) -> Reason | None:
    """Return the first reason why a claim may differ."""
    return next((reason for reason in REASONS if reason.holds(claim)), None)


# -- the two flows -----------------------------------------------------------------------------------------------------


class Both(NamedTuple):
    """The reference model of the FX flow, the converted program's module, and the quantizer that annotated it."""

    reference: GraphModule
    converted: GraphModule
    quantizer: BackendConfigQuantizer


def convert_both(
    model: nn.Module, mapping: refimpl.QConfigMapping, config: refimpl.BackendConfig, batches: Sequence[Batch],
    *, is_qat: bool = False, custom: refimpl.PrepareCustomConfig | None = None,
) -> Both:  # fmt: skip
    """Take a float model through both flows on the same batches. Raises what they raise."""
    quantizer = BackendConfigQuantizer(config, mapping, is_qat=is_qat)
    if not is_qat:
        program = export_float(model.eval(), batches[0])
        prepared = refimpl.prepare_fx(copy.deepcopy(model), mapping, None, custom, backend_config=config)
        other = prepare_pt2e(program.module(), quantizer)
        for each in (prepared, other):
            _run(each, batches)
    else:
        training = [tuple(torch.cat(parts) for parts in zip(*batches, strict=True))] if _trains(model) else batches
        program = export_float(model.train(), training[0], is_open=_trains(model))
        trained = copy.deepcopy(model).train()
        prepared = refimpl.prepare_qat_fx(trained, mapping, None, custom, backend_config=config)
        other = prepare_qat_pt2e(program.module(), quantizer)
        for each in (prepared, other):
            _run(each, training)
            prepared.eval() if each is prepared else move_exported_model_to_eval(each)
            _forget_ranges(each)
            _run(each, batches)
    reference = refimpl.convert_to_reference_decomposed_fx(prepared)
    return Both(reference, convert_pt2e(other), quantizer)


def export_float(model: nn.Module, inputs: Batch, *, is_open: bool = False) -> ExportedProgram:
    """Export a float model; ``is_open``: for batches of other sizes as well."""
    copied = Unnamed(copy.deepcopy(model)).train(model.training)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of recurrent weights that are no attributes
        return export(copied, inputs, dynamic_shapes=(tuple({0: Dim.AUTO} for _ in inputs),) if is_open else None)


def _trains(model: nn.Module) -> bool:
    """Tell whether training changes statistics, which need more than one value per channel."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def _run(model: nn.Module, batches: Iterable[Batch]) -> None:
    with torch.no_grad():
        for inputs in batches:
            model(*(each.clone() for each in inputs))


def _forget_ranges(model: nn.Module) -> None:
    """Forget the ranges that were seen in training, while batch norms moved the weights."""
    for module in model.modules():
        forget: Any = getattr(module, "reset_min_max_vals", None)
        if forget is not None:
            forget()


# -- comparing ---------------------------------------------------------------------------------------------------------


def find_difference(both: Both, batches: Sequence[Batch]) -> str:
    """Say how the two differ; "" if the outputs, and the quantized ops with their qparams, are the same."""
    with torch.no_grad():
        for inputs in batches:
            pairs = [
                [each for each in tree_leaves(model(*(value.clone() for value in inputs))) if isinstance(each, Tensor)]
                for model in both[:2]
            ]
            if not all(_same(left, right) for left, right in zip(*pairs, strict=True)):
                return "the outputs differ"
    mine, theirs = list_quantized(fold_weights(both.reference)), list_quantized(both.converted)
    return "" if mine == theirs else f"only in FX: {mine - theirs}; only in PT2E: {theirs - mine}"


def _same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and bool(((left == right) | (left.isnan() & right.isnan())).all())


def list_quantized(model: GraphModule) -> Counter[Any]:
    """Count a model's quantize ops by their qparams, and its integer weights by their integers and qparams."""
    found: Counter[Any] = Counter()
    for module in model.modules():
        found.update(_list_weights(module))
    for node in model.graph.nodes:
        name = str(node.target).partition("quantized_decomposed.")[2].partition(".")[0]
        operands = [_constant_of(model, argument) for argument in node.args]
        if name.startswith("quantize") and operands[0] is None:
            found[(name, *map(_spell, operands[1:]))] += 1
        elif name.startswith("dequantize") and operands[0] is not None:
            scale, zero_point = (torch.as_tensor(each).reshape(-1) for each in operands[1:3])
            axis = operands[3] if scale.numel() > 1 else None
            found[("weight", axis, *map(_spell, (operands[0], scale, zero_point)))] += 1
    return found


def _list_weights(module: Any) -> Iterator[Any]:
    """Yield what `list_quantized` counts of a reference module, whose weights are folded."""
    for name in [key.removesuffix("_qscheme") for key in vars(module) if key.endswith("_qscheme")]:
        if hasattr(module, f"{name}_integers"):
            numbers = [getattr(module, f"{name}_{part}") for part in ("integers", "scale", "zero_point")]
            axis = int(getattr(module, f"{name}_axis_int")) if numbers[1].numel() > 1 else None
            yield ("weight", axis, *map(_spell, numbers))


def _constant_of(model: GraphModule, argument: Any) -> Any:
    """Return an argument's value if it is known without running the model; None: it is computed."""
    if not isinstance(argument, Node):
        return argument
    if argument.op == "get_attr":
        return attribute_of(model, str(argument.target))
    if not str(argument.target).startswith("quantized_decomposed.quantize"):
        return None
    operands = [_constant_of(model, each) for each in argument.args]
    target: Any = argument.target
    return None if any(each is None for each in operands) else target(*operands)


def _spell(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return str(value)
    return tuple(value.detach().double().reshape(-1).tolist())


# -- claims and pairs --------------------------------------------------------------------------------------------------


def name_backend(config: str) -> str:
    """Return the name of the reference backend with a config's claims."""
    return "reference" if config == "qnnpack" else f"reference-{config}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a claim came out: "" the same; else what differs, and the reason, if there is one."""

    claim: Claim
    difference: str
    reason: Reason | None


def compare_claims(name: str, *, slow: bool = False) -> Iterator[Outcome]:
    """Take the first case of each claim of a config through both flows; ``slow``: also what takes long."""
    backend = find_backend(name_backend(name))
    config, capabilities = backend.backend_config(), backend.capabilities()
    for claim in enumerate_claims(config, capabilities):
        reason = find_reason(claim)
        if reason is not None and (not reason.has_form or (reason.is_slow and not slow)):
            yield Outcome(claim=claim, difference=reason.text, reason=reason)
            continue
        cases = plan_cases(claim, capabilities, limit=4)
        if isinstance(cases, str):
            yield Outcome(claim=claim, difference=cases, reason=reason)
            continue
        torch.manual_seed(0)
        model, batches = build_model(cases[0]), draw_calibration_inputs(cases[0])
        mapping = mapping_for(claim, cases[0], config)
        try:
            is_qat = claim.flow == "qat"
            both = convert_both(model, mapping, config, batches, is_qat=is_qat, custom=leaves_of(claim))
            difference = find_difference(both, batches)
        except Exception as error:  # the row says it, and the claim does not carry over
            difference = describe_error(error)
        yield Outcome(claim=claim, difference=difference, reason=reason if difference else None)


def make_row(name: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Count the pairs of a config: by what became of all claims on each."""
    pairs: defaultdict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        pairs[outcome.claim.pattern, outcome.claim.dtype_config].append(outcome)
    groups = list(pairs.values())
    formless = sum(all(o.reason is not None and not o.reason.has_form for o in group) for group in groups)
    same = sum(all(not o.difference for o in group) for group in groups)
    unexplained = sum(any(o.difference and o.reason is None for o in group) for group in groups)
    having = len(groups) - formless
    return {
        "config": name, "pairs": len(groups), "without an aten form": formless, "carry over bit for bit": same,
        "of those with a form": f"{100 * same / max(having, 1):.0f} %", "with a reason": having - same - unexplained,
        "unexplained": unexplained, "claims": len(outcomes), "the same": sum(not o.difference for o in outcomes),
    }  # fmt: skip


def _compare_config(name: str, slow: bool) -> tuple[dict[str, Any], Counter[str], list[str]]:
    """Return a config's row, how many claims have which reason, and a line for each difference without one."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    with remember_patterns():
        outcomes = list(compare_claims(name, slow=slow))
    found = Counter(outcome.reason.key for outcome in outcomes if outcome.reason is not None)
    differing = (outcome for outcome in outcomes if outcome.difference and outcome.reason is None)
    return make_row(name, outcomes), found, [f"{name}: {each.claim}: {each.difference[:300]}" for each in differing]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the configs; print a line for each difference, and the table. Status 1: one is unexplained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", metavar="CONFIG", help="default: all seven")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--slow", action="store_true", help="try the claims that torchao takes half a minute for")
    parser.add_argument("--write-doc", action="store_true", help=f"write the table into {DOCUMENT.name}")
    options = parser.parse_args(arguments)
    names = options.configs or CONFIGS
    rows, reasons = [], Counter[str]()
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for row, found, texts in pool.map(partial(_compare_config, slow=options.slow), names):
            print(*texts, tabulate([row], headers="keys"), sep="\n", flush=True)
            rows.append(row)
            reasons += found
    counted = [{"reason": reason.text, "claims": reasons[reason.key]} for reason in REASONS]
    text = "\n\n".join(tabulate(table, headers="keys", tablefmt="github") for table in (rows, counted))
    print(text)
    if options.write_doc:
        before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        DOCUMENT.write_text(f"{before}{BEGIN}\n{text}\n\n{END}{after}", encoding="utf-8")
    return int(any(row["unexplained"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
