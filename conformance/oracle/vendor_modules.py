"""A vendor's own modules in the oracle: reference modules and fused ones with a forward of their own. (CVT-02, NUM-03)

Exact is what the module's own forward gives in float64, with its weight as folded to integers. A module of torch's
classes has a rule of its own; so has one that only derives from them and leaves forward and weight as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fx_quant_conformance.conformance.bounds.error_bounds import Errors, NoOracleError, OpCall, Value, add_error
from fx_quant_conformance.conformance.oracle.grids import Grid
from fx_quant_conformance.conformance.oracle.reference_modules import FLOAT_MODULES, REFERENCE_MODULES, Operands
from fx_quant_conformance.refimpl.convert.reference_convs import PLAIN
from fx_quant_conformance.refimpl.graph.tracing import notes_of
from fx_quant_conformance.refimpl.observers.qparams import dtype_range
from fx_quant_conformance.refimpl.prepare.prepare import PREPARED

_COMPUTES = ("forward", "get_weight", "get_quantized_weight")
"""The methods that say what a reference module computes."""

HELD = ("weight", "weight_dtype", "weight_scale", "weight_zero_point")
"""The attributes of a reference module: its float weight, and the qparams; per channel ``weight_axis`` too. (CVT-02)"""


def require_weight(module: nn.Module) -> None:
    """Raise NoOracleError if a reference module does not hold its float weight and its qparams as torch's do."""
    missing = [name for name in HELD if not hasattr(module, name)]
    if missing and getattr(module, "weight_dtype", None) is not torch.float16:  # which has no qparams
        names = f"{type(module).__name__} has no {' and no '.join(missing)}"
        raise NoOracleError(f"{names}: a reference module holds its float weight and its qparams as torch's do")


def ends_of_weight(module: Any) -> tuple[int, int]:
    """Return the lowest and the highest integer that a reference module's weight may have."""
    low, high = dtype_range(module.weight_dtype)
    return getattr(module, "weight_quant_min", low), getattr(module, "weight_quant_max", high)


def allow_for_clipping(value: Value, weight: Tensor, integers: Tensor, ends: tuple[int, int]) -> Value:
    """Return a weight with the error of what an observer leaves to saturation: the elements at an end of its range."""
    is_clipped = (integers <= ends[0]) | (integers >= ends[1])
    beyond = (value.real - weight.detach().double()).abs().where(is_clipped, 0.0)
    return replace(value, errors={"weights": torch.maximum(value.errors["weights"], beyond)})


def find_reference_kind(module: nn.Module) -> type | None:
    """Return the class of torch's that says what a reference module computes; None: it is another, or says it itself.

    Classes of ``refimpl.convert.reference_convs`` mend torch's: they compute what the float module does, as their rule
    says.
    """
    own = PLAIN.get(type(module), type(module))
    kind = next((each for each in own.__mro__ if each in REFERENCE_MODULES), None)
    is_unchanged = kind is not None and all(getattr(own, name) is getattr(kind, name) for name in _COMPUTES)
    return kind if is_unchanged else None


def references_in(model: GraphModule) -> Mapping[type[nn.Module], type[nn.Module]]:
    """Return the reference classes by root class that a reference model was made with; none for any other model."""
    prepared = notes_of(model).get(PREPARED)
    return {} if prepared is None else prepared.references


def is_custom(module: nn.Module) -> bool:
    """Tell whether a module is the quantized class of a custom module that says what it computes. (CUS-01)"""
    return hasattr(module, "float_function")


def custom_grid_of(module: Any) -> Grid:
    """Return the grid of what a quantized custom module returns, by its ``scale``, ``zero_point`` and ``dtype``."""
    low, high = dtype_range(module.dtype)
    name = str(module.dtype).removeprefix("torch.")
    return Grid(scale=float(module.scale), zero_point=int(module.zero_point), low=low, high=high, dtype=name)


def custom_qparams_of(module: Any) -> tuple[Tensor, Tensor, None]:
    """Return scale and zero point (float64) of what a quantized custom module returns; it has no axis."""
    scale, zero_point = (torch.tensor(number, dtype=torch.float64) for number in (module.scale, module.zero_point))
    return scale, zero_point, None


def open_dot_product(
    module: Any,
    roots: Sequence[type],
    read_weight: Callable[[], Value],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Operands | None:
    """Return the dot product in an own reference module, and its operands; None: there is none that is known.

    It is that of the class of torch's that the module derives from, or of the layer (`roots`) whose place it takes.
    """
    opens = [REFERENCE_MODULES[each] for each in type(module).__mro__ if each in REFERENCE_MODULES]
    opens += [FLOAT_MODULES[each] for root in roots for each in root.__mro__ if each in FLOAT_MODULES]
    if not opens:
        return None
    try:
        return opens[0](module, read_weight(), *args, **kwargs)
    except (AttributeError, TypeError):  # it holds its bias or geometry under other names, or takes other arguments
        return None


def copy_to_double(module: nn.Module, read_weight: Callable[[Any], Tensor]) -> nn.Module:
    """Return a copy in float64, in eval mode; ``get_weight`` of its parts gives the weight as `read_weight` has it.

    Torch's own ``get_weight`` quantizes, which only float32 tensors can be.
    """
    doubled: Any = copy.deepcopy(module).double().eval()
    for part, copied in zip(module.modules(), doubled.modules(), strict=True):
        if hasattr(part, "get_quantized_weight"):
            require_weight(part)
            copied.get_weight = _WeightReader(read_weight(part))
    return doubled  # type: ignore[no-any-return]


class _WeightReader:
    """Stands for ``get_weight``. ``is_used``: whether it was called."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.is_used = weight, False

    def __call__(self) -> Tensor:
        self.is_used = True
        return self.weight


def run_in_double(call: OpCall) -> Tensor:
    """Run an own module in float64. Raises NoOracleError where it computes in another dtype, or with other weights."""
    owner: Any = getattr(call.function, "__self__", call.function)  # of a method
    name = type(owner).__name__
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)  # of tensors that the module makes
        result = call.evaluate(lambda value: value.real.clone(), lambda tensor: tensor.double())
    except Exception as error:  # a vendor's code may raise anything
        advice = "let it compute in the dtype of its input, with the weight of get_weight()"
        raise NoOracleError(f"forward of {name} raised {type(error).__name__} in float64: {error}; {advice}") from error
    finally:
        torch.set_default_dtype(default)
    if not isinstance(result, Tensor) or result.dtype is not torch.float64:
        found = result.dtype if isinstance(result, Tensor) else type(result).__name__
        raise NoOracleError(f"forward of {name} gives {found} for float64; let it compute in the dtype of its input")
    readers = [part.__dict__["get_weight"] for part in owner.modules() if "get_weight" in part.__dict__]
    if not all(reader.is_used for reader in readers):
        text = "so nothing shows that it computes with the quantized weight"
        raise NoOracleError(f"forward of {name} does not call get_weight(), {text}")
    return result


def add_errors(errors: Mapping[str, Tensor], added: Mapping[str, Tensor]) -> Errors:
    """Return both bounds together, by cause."""
    together = dict(errors)
    for cause, bound in added.items():
        add_error(together, cause, bound)
    return together
