"""A model that a user hands in, and where it is found: ``--model=my_package.my_module:make``, or a name.

Names are those of the entry-point group `fx_quant_conformance.models`, and those of the model sets (`sets.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from inspect import signature
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fx_quant_conformance.backends.discovery import find_attribute, find_entry_point
from fx_quant_conformance.backends.names import BackendNotFound, format_error
from fx_quant_conformance.conformance.claims.inputs import Batch
from fx_quant_conformance.conformance.own_models import sets
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
    example_inputs: Batch
    """A tuple of tensors, the model's positional arguments."""
    calibration: Sequence[Batch] = ()
    """Tuples such as ``example_inputs``; none: the example inputs."""
    evaluate: Evaluate | None = None
    """Run on the float model, on the reference model and on the backend's, each a module; None: no metrics."""
    qconfig_mapping: QConfigMapping | None = None
    """None: each op gets the QConfig of the claim that fits it best."""


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
            return sets.make(spec, seed)
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
    batches = [("example_inputs", given.example_inputs), *(("calibration", each) for each in given.calibration)]
    strange = next(((name, each) for name, each in batches if not _is_batch(each)), None)
    problems = (
        (not isinstance(given.model, nn.Module), f"model is {type(given.model).__name__}, not a torch.nn.Module"),
        (strange is not None, "{} has {!r:.60}, not a tuple of tensors".format(*(strange or ("", "")))),
        (given.evaluate is not None and not callable(given.evaluate), "evaluate is not callable"),
    )
    for is_wrong, text in problems:
        if is_wrong:
            raise ModelSpecError(f"--model={spec}: {text}")


def _is_batch(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(each, Tensor) for each in value)


# -- making it fit the flow -------------------------------------------------------------------------------------------


def check_runs(given: GivenModel) -> None:
    """Raise ModelSpecError if the float model does not run on its own inputs, or computes what is not float32.

    Weights that hooks have computed lose their gradients, with which torch copies none.
    """
    for module in given.model.modules():
        for name in find_computed(module):
            setattr(module, name, getattr(module, name).detach())
    try:
        model = copy.deepcopy(given.model).eval()
    except Exception as error:
        raise ModelSpecError(f"the model cannot be copied: {format_error(error)}") from error
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        _check_floats(f"the model's {name}", value)
    for batch in (given.example_inputs, *given.calibration):
        for value in batch:
            _check_floats("an input", value)
        try:
            with torch.no_grad():
                outputs = model(*(value.clone() for value in batch))
        except Exception as error:
            text = f"the float model does not run on the inputs that come with it: {type(error).__name__}: {error}"
            raise ModelSpecError(text) from error
        for value in tree_leaves(outputs):
            if isinstance(value, Tensor):
                _check_floats("an output", value)


def _check_floats(name: str, value: Tensor) -> None:
    if value.is_quantized or value.layout is not torch.strided:
        raise ModelSpecError(f"{name} is a tensor of layout {value.layout} and dtype {value.dtype}, not a plain one")
    if value.is_floating_point() and value.dtype is not torch.float32:
        raise ModelSpecError(f"{name} is {value.dtype}; the flow quantizes float32")
    if not value.isfinite().all():
        raise ModelSpecError(f"{name} is not finite")


def fix_arguments(model: nn.Module, count: int) -> nn.Module:
    """Return the model with a forward that takes `count` arguments: those left out have their defaults as it is traced.

    Without, the flow would trace an optional argument as an input, and find that it is not None.
    """
    forward = type(model).forward
    parameters = list(signature(forward).parameters.values())[1:]
    named = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if len(parameters) != count or len(named) != count:
        names = ", ".join([*named[:count], *(f"input_{number}" for number in range(len(named), count))])
        made: dict[str, Any] = {}
        # fx reads the number of arguments off the function's code: it must have as many
        exec(f"def forward(self, {names}):\n    return whole(self, {names})", {"whole": forward}, made)
        model.__class__ = type(type(model).__name__, (type(model),), made)
    return model
