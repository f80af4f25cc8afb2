"""From a reading to an entry: the dtype config and the observation type that it amounts to, or why none does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fx_quant_conformance.conformance.claims.claim import has_weight
from fx_quant_conformance.conformance.ops.fused_modules import weight_axis_of
from fx_quant_conformance.conformance.pt2e.reading import Observed, PatternReading
from fx_quant_conformance.refimpl import BackendPatternConfig, DTypeConfig, DTypeWithConstraints, ObservationType
from fx_quant_conformance.refimpl.config.patterns import leaves
from fx_quant_conformance.refimpl.legacy import qint8, qint32, quint8
from fx_quant_conformance.refimpl.observers.qparams import dtype_range, is_quantized_dtype

NOT_ANNOTATED = "not annotated"
NO_INPUT = "no input is quantized"
OUTPUT_LEFT = "inputs are quantized and the output is not: a static dtype config has no words for it"
_EPS = torch.finfo(torch.float32).eps
"""The smallest scale of an observer that names none; it is no claim."""
_OF_PLAIN = {torch.uint8: quint8, torch.int8: qint8, torch.int32: qint32}
_PER_TENSOR = (None, torch.per_tensor_affine, torch.per_tensor_symmetric)
_SCHEMES = {
    torch.per_tensor_symmetric: "per_tensor_symmetric",
    torch.per_tensor_affine: "per_tensor_affine",
    torch.per_channel_symmetric: "per_channel_symmetric",
    torch.per_channel_affine: "per_channel_affine",
    torch.per_channel_affine_float_qparams: "per_channel_affine_float_qparams",
}


class NoWordsError(Exception):
    """A reading that no entry of a BackendConfig describes; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """What an entry claims."""

    dtypes: DTypeConfig
    observation_type: ObservationType
    scheme: str = ""
    """The weight's scheme, or ""."""
    notes: tuple[str, ...] = ()
    """What a BackendConfig has no words for."""


def derive_claim(
    entry: BackendPatternConfig, reading: PatternReading, *, is_qat: bool = False, names_weight: bool = False
) -> Derived:
    """Return the claim of an entry that a reading amounts to. Raises NoWordsError.

    INPUT_OUTPUT_NOT_OBSERVED is never derived: an op without observers is an op that the Quantizer leaves in float.
    ``is_qat``: the reading is of a model that is trained. ``names_weight``: dtype configs of the entry say that a
    weight stays in float32.
    """
    _check_is_one(reading)
    _check_flow(reading, is_qat)
    inputs = [each for each in reading.inputs if each is not None]
    notes = _note_bias(reading)
    if not inputs and "weight" in reading.parameters:
        return _derive_weight_only(entry, reading, notes)
    if len(inputs) < len(reading.inputs):
        count = f"only {len(inputs)} of {len(reading.inputs)} inputs are quantized" if inputs else NO_INPUT
        raise NoWordsError(f"{count}: a dtype config is about all inputs")
    if not inputs:
        raise NoWordsError("it takes no float tensor")
    ends = _agree(inputs, "inputs")
    scheme, weight = _read_weight(entry, reading)
    bias = torch.float32 if weight.dtype is not None or names_weight else None
    if weight.dtype is None and names_weight:
        weight = DTypeWithConstraints(torch.float32)
    if ends.facts.is_dynamic:
        if reading.owns_output:
            raise NoWordsError("inputs are quantized dynamically, and the output is not float")
        if len(inputs) > 1:  # rule: OBS-05
            raise NoWordsError(f"{len(inputs)} inputs are quantized dynamically: a config says so of the first alone")
        dtypes = DTypeConfig(_constrain(ends), torch.float32, weight, bias, is_dynamic=True)
        return Derived(dtypes=dtypes, observation_type=_DIFFERENT, scheme=scheme, notes=notes)
    output = _read_output(reading)
    notes += _note_symmetric(inputs, output) + _note_owner(reading)
    first, last = _constrain(ends), _constrain(output)
    if output.facts.fixed is not None:
        if first.dtype is not last.dtype:
            raise NoWordsError(
                f"fixed qparams of {last.dtype} behind an input of {first.dtype}: a QConfig has one dtype"
            )
        first = last  # a QConfig of fixed qparams has no smallest scale, and has to fit both ends
    dtypes = DTypeConfig(first, last, weight, bias)
    return Derived(dtypes=dtypes, observation_type=_read_sharing(inputs, output), scheme=scheme, notes=notes)


_DIFFERENT = ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT
_SHARE = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT


def _check_is_one(reading: PatternReading) -> None:
    """Raise NoWordsError unless the Quantizer has annotated the ops of the pattern, as one."""
    if not reading.is_annotated and not reading.inside:
        raise NoWordsError(NOT_ANNOTATED)
    if reading.inside:
        places = ", ".join(dict.fromkeys(reading.inside))
        raise NoWordsError(f"not annotated as one: observed inside, {places}")
    left_out = dict.fromkeys((*reading.silent_takers, *reading.silent_givers))
    if left_out:
        raise NoWordsError(f"not annotated as one: {', '.join(left_out)} left out")


def _check_flow(reading: PatternReading, is_qat: bool) -> None:
    """Raise NoWordsError if a Quantizer for one flow was probed by the other."""
    several = (*reading.inputs, *reading.parameters.values())
    if any(each is not None and not each.is_derived and each.is_fake != is_qat for each in several):
        by, advice = ("observers", "leave --qat out") if is_qat else ("fake quantizes, as for training", "give --qat")
        raise NoWordsError(f"observed by {by}: {advice}")


def _read_output(reading: PatternReading) -> Observed:
    outputs = [each for each in reading.outputs if each is not None]
    if not outputs or len(outputs) < len(reading.outputs):
        raise NoWordsError(OUTPUT_LEFT)
    output = _agree(outputs, "outputs")
    if output.facts.is_dynamic:
        raise NoWordsError(OUTPUT_LEFT)
    return output


def _read_sharing(inputs: Sequence[Observed], output: Observed) -> ObservationType:
    groups = {each.group for each in inputs}
    if len(groups) == 1:
        if output.group in groups:
            return _SHARE
        if len(inputs) > 1:
            raise NoWordsError("the inputs share an observer, which the output does not")
    elif output.group in groups:
        raise NoWordsError("the output shares the observer of one input, and the inputs share none")
    return _DIFFERENT


def _agree(several: Sequence[Observed], what: str) -> Observed:
    first = several[0]
    if any(each != first for each in several):
        texts = ", ".join(dict.fromkeys(_spell(each) for each in several))
        raise NoWordsError(f"the {what} are quantized in different ways: {texts}")
    return first


def _spell(each: Observed) -> str:
    facts = each.facts
    return f"{str(facts.dtype).removeprefix('torch.')}[{facts.quant_min}..{facts.quant_max}] {each.qscheme}"


def _constrain(observed: Observed, what: str = "activation") -> DTypeWithConstraints:
    """Return a dtype with the bounds that an observer keeps: those that are narrower than the dtype's own."""
    facts = observed.facts
    dtype = None if facts.dtype is None else _OF_PLAIN.get(facts.dtype, facts.dtype)
    if dtype is None or (not is_quantized_dtype(dtype) and dtype is not torch.float16):
        raise NoWordsError(f"{what} of {dtype}: no quantized dtype of a BackendConfig")
    if what == "activation" and observed.qscheme not in _PER_TENSOR:
        raise NoWordsError(f"{what} quantized {observed.qscheme}: in a BackendConfig it is per tensor")
    bounds: dict[str, Any] = {}
    if is_quantized_dtype(dtype) and facts.quant_min is not None and facts.quant_max is not None:
        low, high = dtype_range(dtype)
        if facts.quant_min > low or facts.quant_max < high:
            bounds |= {"quant_min_lower_bound": facts.quant_min, "quant_max_upper_bound": facts.quant_max}
    if facts.fixed is not None:
        scale, zero_point = facts.fixed
        bounds |= {"scale_exact_match": scale, "zero_point_exact_match": zero_point}
    elif facts.eps is not None and facts.eps > _EPS:
        bounds["scale_min_lower_bound"] = facts.eps
    return DTypeWithConstraints(dtype, **bounds)


def _read_weight(entry: BackendPatternConfig, reading: PatternReading) -> tuple[str, DTypeWithConstraints]:
    """Return the weight's scheme and dtype; ("", any) where the pattern has no weight to quantize."""
    weight = reading.parameters.get("weight")
    others = sorted(reading.parameters.keys() - {"weight", "bias"})
    if others:
        raise NoWordsError(f"the argument {others[0]!r} is quantized, which is neither weight nor bias")
    if weight is None:
        if has_weight(entry):
            raise NoWordsError("inputs are quantized and the weight is not")
        return "", DTypeWithConstraints()
    if not has_weight(entry):
        raise NoWordsError("its weight is quantized, and an entry for it has none")
    axis = weight_axis_of(leaves(entry.normal_pattern))
    scheme = _SCHEMES.get(weight.qscheme, "") if weight.qscheme is not None else ""
    if scheme.startswith("per_channel") and weight.axis != axis:
        raise NoWordsError(f"its weight is quantized along axis {weight.axis}: the output's channels are axis {axis}")
    if weight.facts.is_dynamic:
        raise NoWordsError("its weight is quantized dynamically")
    if not scheme and weight.facts.dtype is not torch.float16:
        raise NoWordsError(f"its weight is quantized by {weight.facts.observer_class.__name__}, {weight.qscheme}")
    return scheme, _constrain(weight, "weight")


def _derive_weight_only(entry: BackendPatternConfig, reading: PatternReading, notes: tuple[str, ...]) -> Derived:
    scheme, weight = _read_weight(entry, reading)
    if weight.dtype is torch.float16:
        raise NoWordsError(
            "the weight alone is float16: a dtype config has no words for it, as it rounds the input too"
        )
    if any(each is not None and not each.facts.is_dynamic for each in reading.outputs) and reading.owns_output:
        raise NoWordsError("weight and output are quantized and the input is not")
    dtypes = DTypeConfig(torch.float32, torch.float32, weight, torch.float32 if reading.inputs else None)
    return Derived(dtypes=dtypes, observation_type=_DIFFERENT, scheme=scheme, notes=notes)


def _note_bias(reading: PatternReading) -> tuple[str, ...]:
    bias = reading.parameters.get("bias")
    if bias is None:
        return ()
    dtype = str(bias.facts.dtype).removeprefix("torch.")
    if bias.is_derived and bias.facts.dtype is torch.int32:
        return ("bias: int32, derived: Capabilities(int32_bias=True) says so, if its scale is s_x·s_w",)
    raise NoWordsError(f"bias of {dtype} with an observer of its own: a dtype config has float32 only")


def _note_symmetric(inputs: Sequence[Observed], output: Observed) -> tuple[str, ...]:
    is_symmetric = any(each.qscheme is torch.per_tensor_symmetric for each in (*inputs, output))
    return ("activations are symmetric: a claim is about any zero point",) if is_symmetric else ()


def _note_owner(reading: PatternReading) -> tuple[str, ...]:
    return () if reading.owns_output else ("the output is quantized where its reader is",)
