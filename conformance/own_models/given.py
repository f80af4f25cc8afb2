"""A model that a user hands in, and where it is found: ``--model=my_package.my_module:make``, or a name.

Names are those of the entry-point group `fx_quant_conformance.models`, and those of the model sets (`sets.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, TypeAlias

from torch import Tensor, nn

from backends.discovery import BackendNotFound, describe_error, find_attribute
from conformance.claims.inputs import Batch
from conformance.own_models import sets
from refimpl import QConfigMapping

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

    ``example_inputs``: a tuple of tensors, the model's positional arguments. ``calibration``: such tuples; none: the
    example inputs. ``evaluate``: run on the float model, on the reference model and on the backend's, each a module;
    None: no metrics. ``qconfig_mapping``: None: each op gets the QConfig of the claim that fits it best.

    A function may also return a tuple of these in their order: ``model, example_inputs, …``.
    """

    model: nn.Module
    example_inputs: Batch
    calibration: Sequence[Batch] = ()
    evaluate: Evaluate | None = None
    qconfig_mapping: QConfigMapping | None = None


def check_spec(spec: str) -> None:
    """Raise ModelSpecError for what can name no model; nothing is imported."""
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
            "return conformance.vendor.GivenModel(model=…, example_inputs=…), or the tuple (model, example_inputs)"
        ) from None
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
    targets = sorted({point.value for point in entry_points(group=GROUP, name=spec)})
    if len(targets) > 1:
        raise ModelSpecError(f"--model={spec}: several packages give it: {', '.join(targets)}; name one of these")
    try:
        make = find_attribute(targets[0] if targets else spec, f"--model={spec}")
    except BackendNotFound as error:
        raise ModelSpecError(str(error)) from error
    if not callable(make):
        raise ModelSpecError(f"--model={spec}: it is {type(make).__name__}, not a function that makes a model")
    try:
        return make()
    except (Exception, SystemExit) as error:
        raise ModelSpecError(f"--model={spec}: the function raised {describe_error(error)}") from error


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
