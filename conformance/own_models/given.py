"""A model that a user hands in, and where it is found: ``--model=my_package.my_module:make``, or a name.

Names are those of the entry-point group `fx_quant_conformance.models`, and those of the model sets (`sets.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import remove_parametrizations

from fx_quant_conformance.backends.discovery import find_attribute, find_entry_point
from fx_quant_conformance.backends.names import BackendNotFound, format_error
from fx_quant_conformance.conformance.own_models import sets
from fx_quant_conformance.conformance.own_models.calling import Calling, CallingError, Structure
from fx_quant_conformance.refimpl import QConfigMapping
from fx_quant_conformance.refimpl.config.fusers import find_computed

GROUP = "fx_quant_conformance.models"
"""The entry-point group of models."""
FORM = "give my_package.my_module:make, a name of the entry-point group fx_quant_conformance.models, or SET:NAME"
Evaluate: TypeAlias = Callable[[nn.Module], Mapping[str, float]]
"""Runs a model on data of its own and returns metrics by their names, such as ``{"top-1": 0.71}``."""


class ModelSpecError(Exception):
    """``--model`` names no usable model; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenModel:
    """What the function of ``--model`` returns: a float model, and what there is to try it on.

    A function may also return a tuple of these in their order: ``model, example_inputs, …``.
    """

    model: nn.Module
    example_inputs: tuple[Any, ...]
    """The model's positional arguments: tensors, and dicts, lists or dataclasses of them; all else is constant."""
    calibration: Sequence[Any] = ()
    """Tuples such as ``example_inputs``; of a model with keywords, pairs of such a tuple and a dict such as ``kwargs``.
    None: the example inputs."""
    evaluate: Evaluate | None = None
    """Run on the float model, on the reference model and on the backend's, each a module; None: no metrics."""
    qconfig_mapping: QConfigMapping | None = None
    """None: each op gets the QConfig of the claim that fits it best."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The model's keywords, with what ``example_inputs`` may hold."""


def check_spec(spec: str) -> None:
    """Raise ModelSpecError for what can name no model; nothing is imported."""
    if any(each.isspace() or not each.isprintable() for each in spec) or "" in spec.split(":"):
        raise ModelSpecError(f"--model={spec!r}: names no model; {FORM}")
    if ":" not in spec and not entry_points(group=GROUP, name=spec):
        names = ", ".join(sorted(entry_points(group=GROUP).names)) or "none is installed"
        raise ModelSpecError(f"--model={spec}: no model of this name ({names}); {FORM}")


def load_given(spec: str, seed: int) -> GivenModel:
    """Import and call what a spec names; return the model. Raises ModelSpecError, for code that raises too.

    ``seed``: of the random weights of a model set's model.
    """
    made = _make(spec, seed)
    try:
        given = made if isinstance(made, GivenModel) else GivenModel(**dict(zip(_FIELDS, made, strict=False)))
    except TypeError:
        raise ModelSpecError(
            f"--model={spec}: the function returned {type(made).__name__}; "
            "return fx_quant_conformance.GivenModel(model=…, example_inputs=…), or the tuple (model, example_inputs)"
        ) from None
    try:
        given = replace(given, calibration=tuple(given.calibration))  # a generator is read once
    except TypeError:
        kind = type(given.calibration).__name__
        raise ModelSpecError(f"--model={spec}: calibration is {kind}, not a list of tuples of tensors") from None
    _check(spec, given)
    return given


_FIELDS = tuple(GivenModel.__dataclass_fields__)


def _make(spec: str, seed: int) -> Any:
    """Return what the function of a spec returns."""
    check_spec(spec)
    if sets.is_of_set(spec):
        try:
            return GivenModel(**sets.make(spec, seed))
        except sets.ModelSetError as error:
            raise ModelSpecError(f"--model={spec}: {error}") from error
    what = f"--model={spec}"
    try:
        make = find_attribute(find_entry_point(GROUP, spec, what) or spec, what)
    except BackendNotFound as error:
        raise ModelSpecError(str(error)) from error
    if not callable(make):
        raise ModelSpecError(f"--model={spec}: it is {type(make).__name__}, not a function that makes a model")
    try:
        return make()
    except (Exception, SystemExit) as error:
        raise ModelSpecError(f"--model={spec}: the function raised {format_error(error)}") from error


def _check(spec: str, given: GivenModel) -> None:
    """Raise ModelSpecError if a part of it is not what it should be."""
    problems = (
        (not isinstance(given.model, nn.Module), f"model is {type(given.model).__name__}, not a torch.nn.Module"),
        (not isinstance(given.example_inputs, tuple), f"example_inputs has {given.example_inputs!r:.60}, not a tuple"),
        (not isinstance(given.kwargs, Mapping), f"kwargs is {type(given.kwargs).__name__}, not a dict"),
        (given.evaluate is not None and not callable(given.evaluate), "evaluate is not callable"),
    )
    for is_wrong, text in problems:
        if is_wrong:
            raise ModelSpecError(f"--model={spec}: {text}")
    if not Structure.of((given.example_inputs, given.kwargs)).holds_tensors:
        raise ModelSpecError(f"--model={spec}: example_inputs has {given.example_inputs!r:.60}, without a tensor")


# -- making it fit the flow -------------------------------------------------------------------------------------------


def settle(given: GivenModel) -> GivenModel:
    """Return the model as one that takes and returns tensors, with batches of tensors, and an evaluation that fits.

    Raises ModelSpecError if the float model does not run on its own inputs, or computes what is not float32. Weights
    that hooks have computed lose their gradients, with which torch copies none.
    """
    for module in list(given.model.modules()):
        for name in list(getattr(module, "parametrizations", {})):  # a weight is what its parametrization makes of it
            remove_parametrizations(module, name, leave_parametrized=True)
        for name in find_computed(module):
            setattr(module, name, getattr(module, name).detach())
    try:
        model = copy.deepcopy(given.model).eval()
    except Exception as error:
        raise ModelSpecError(f"the model cannot be copied: {format_error(error)}") from error
    for name, parameter in model.named_parameters():
        _check_floats(f"the model's {name}", parameter)
    for name, buffer in model.named_buffers():
        _check_floats(f"the model's {name}", buffer, is_held=True)
    example = (tuple(given.example_inputs), dict(given.kwargs))
    arguments = Structure.of(example)
    batches = [arguments.take(example)]
    for each in given.calibration:
        pair = (tuple(each[0]), dict(each[1])) if given.kwargs and _is_pair(each) else (each, {})
        try:
            batches.append(arguments.read(pair))
        except CallingError as error:
            raise ModelSpecError(f"calibration has {each!r:.60}, which {error}") from error
    results = None
    for batch in batches:
        for value in batch:
            _check_floats("an input", value)
        args, kwargs = arguments.fill([value.clone() for value in batch])
        try:
            with torch.no_grad():
                returned = model(*args, **kwargs)
        except Exception as error:
            text = f"the float model does not run on the inputs that come with it: {type(error).__name__}: {error}"
            raise ModelSpecError(text) from error
        results = Structure.of(returned) if results is None else results
        for value in results.take(returned):
            _check_floats("an output", value)
    assert results is not None
    calling, evaluate = Calling(arguments=arguments, results=results), given.evaluate
    if not results.holds_tensors:
        raise ModelSpecError(f"the model returns {returned!r:.60}, without a tensor")
    return replace(
        given,
        model=calling.fit(given.model),
        example_inputs=batches[0],
        calibration=batches[1:],
        kwargs={},
        evaluate=None if evaluate is None else lambda module: evaluate(calling.restore(module)),
    )


def _is_pair(each: Any) -> bool:
    return isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], tuple) and isinstance(each[1], Mapping)


def _check_floats(name: str, value: Tensor, *, is_held: bool = False) -> None:
    """Raise ModelSpecError for what is no plain finite float32; what is held may be infinite, as a mask, or cast."""
    if value.is_quantized or value.layout is not torch.strided:
        raise ModelSpecError(f"{name} is a tensor of layout {value.layout} and dtype {value.dtype}, not a plain one")
    if value.is_floating_point() and value.dtype is not torch.float32 and not is_held:
        raise ModelSpecError(f"{name} is {value.dtype}; the flow quantizes float32")
    if not (value.isfinite() | (value.isinf() & is_held)).all():
        raise ModelSpecError(f"{name} is not finite")
