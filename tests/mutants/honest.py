"""Honest variants: backends that differ within the rules. None of their claims may be anything but VERIFIED, or UNSHOWN
where nothing shows what ran."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fx_quant_conformance.backends.base import Backend, Representation
from tests.mutants import fixed_grids
from tests.mutants.custom_modules import CustomModules
from tests.mutants.fixed_grids import FIXING, MEASURED, PLAIN, SEVEN, FixedGridBackend, FixedGridIntegers, Fixing
from tests.mutants.integer_kernels import CLAIMS, IntegerBackend, Integers, Kernels, Make, Sum, varied
from tests.mutants.integer_kernels import SAMPLE as INTEGER_SAMPLE
from tests.mutants.own_modules import LAYERS, OwnModules
from tests.mutants.power_of_two import PowerOfTwoBackend
from tests.mutants.reference_faults import to_integers
from tests.mutants.reference_kernels import SAMPLE, Edited, SmallReference, Stepped, Wrapped, in_rows, weighted
from tests.mutants.table_kernels import FlooredBackend, TableBackend
from tests.mutation.mutant import Mutant

MUTANTS: list[Mutant] = []


def half_away(honest: Any, value: Tensor) -> Tensor:
    return value.sign() * (value.abs() + 0.5).floor()


def half_up(honest: Any, value: Tensor) -> Tensor:
    return (value + 0.5).floor()


def float32(honest: Any, total: Tensor, ratio: Tensor) -> Tensor:
    return (total.float() * ratio.float()).double()


def fixed_point(honest: Any, total: Tensor, ratio: Tensor) -> Tensor:
    """A 31-bit mantissa and a shift, as gemmlowp's kernels have them."""
    mantissa, exponent = torch.frexp(ratio)
    result: Tensor = honest(total, (mantissa * 2.0**31).round() * 2.0**-31 * 2.0 ** exponent.double())
    return result


def add_float32(honest: Any, x: Integers, y: Integers) -> Sum:
    """Dequantizes both in float32 and adds: the sum may cancel, the operands' rounding does not."""
    first, second = ((value.centred() * value.scale).float() for value in (x, y))
    return Sum(total=(first + second).double(), scale=torch.ones(()).double())


def add_ratios(honest: Any, x: Integers, y: Integers) -> Sum:
    """Rescales each operand by a ratio that was rounded to float32 and a product that was."""
    ratios = [(value.scale * 77).float() for value in (x, y)]
    products = [value.centred().float() * ratio for value, ratio in zip((x, y), ratios, strict=True)]
    return Sum(total=(products[0] + products[1]).double(), scale=torch.ones(()).double() / 77)


def bias_int32(honest: Any, total: Sum, bias: Tensor) -> Any:
    return honest(total, (bias / total.scale).round() * total.scale)


def relu_first(honest: Any, value: Tensor, grid: Integers, *, rectified: bool) -> Tensor:
    """Clamps at the zero point first and to the range then."""
    floor = grid.zero_point if rectified else torch.tensor(float(grid.low))
    result: Tensor = honest(torch.maximum(value, floor), grid, rectified=False)
    return result


def integer(name: str, kernels: Make, **capabilities: Any) -> None:
    MUTANTS.append(
        Mutant(
            group="honest",
            name=name,
            make=lambda: IntegerBackend(kernels, **capabilities),
            claims=CLAIMS,
            in_full=INTEGER_SAMPLE,
        )
    )


integer("integers, half to even", Kernels)
integer("integers that report nothing", Kernels, reports=False)
integer("ties away from zero", varied("rounded", half_away))
integer("ties up", varied("rounded", half_up))
integer("rescale in float32", varied("rescale", float32))
integer("rescale by a 31-bit multiplier", varied("rescale", fixed_point))
integer("bias as int32, declared", varied("with_bias", bias_int32), int32_bias=True)
integer("sum of rescaled operands", varied("add", add_ratios))

# -- on the reference backend -----------------------------------------------------------------------------------------


def reference(name: str, make: Callable[[], SmallReference]) -> None:
    MUTANTS.append(Mutant(group="honest", name=name, make=make, in_full=SAMPLE))


def _in_last(y: Tensor) -> Tensor:
    return y.contiguous(memory_format=torch.channels_last) if y.dim() == 4 else y


def in_double(model: GraphModule) -> None:
    """Sums of another order and width: the weighted modules run in float64."""
    for module in weighted(model):
        forward = module.forward
        module.forward = _cast(module, forward)


def _cast(module: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Tensor, *rest: Any, **keywords: Any) -> Any:
        weight, bias = module.get_weight, module.bias
        try:
            module.get_weight = lambda: weight().double()
            module.bias = None if bias is None else torch.nn.Parameter(bias.double())
            return forward(x.double(), *rest, **keywords).float()
        finally:
            module.get_weight, module.bias = weight, bias

    return run


reference("the reference model itself", SmallReference)
reference("ties away from zero, any op", lambda: Stepped("quantize", to_integers(lambda v: half_away(None, v))))
reference("results in channels_last", lambda: Wrapped(lambda f, *_: lambda *x: in_rows(f(*x), _in_last)))
reference("sums in float64", lambda: Edited(in_double))

# -- results on a grid that the claims fix ----------------------------------------------------------------------------

OWN = Fixing().observer()
FIXED_GRIDS: dict[str, Callable[[], Backend]] = {
    "of both ends": lambda: FixedGridBackend(Fixing()),
    "of the input alone": lambda: FixedGridBackend(Fixing(ends=("input",))),
    "of the output alone": lambda: FixedGridBackend(Fixing(ends=("output",))),
    "narrower than the data": lambda: FixedGridBackend(Fixing(scale=2.0**-9)),
    "wider than the data": lambda: FixedGridBackend(Fixing(scale=0.7)),
    "from zero on": lambda: FixedGridBackend(Fixing(scale=0.01, zero_point=0)),
    "of 7 bits": lambda: FixedGridBackend(SEVEN, representation=Representation.QUANTIZED),
    "by own observers": lambda: FixedGridBackend(Fixing(), observers=[OWN]),
    "by own observers beside others": lambda: FixedGridBackend(Fixing(), observers=[MEASURED, OWN]),
    "beside own observers that measure": lambda: FixedGridBackend(Fixing(), observers=[MEASURED]),
    "by own observers, not claimed": lambda: FixedGridBackend(Fixing(ends=()), observers=[OWN]),
}

# -- machines of other kinds ------------------------------------------------------------------------------------------


def machine(name: str, make: Callable[[], Backend], *claims: str, in_full: tuple[str, ...] = ()) -> None:
    MUTANTS.append(Mutant(group="honest", name=name, make=make, claims=claims, in_full=in_full))


MUTANTS.append(
    Mutant(
        group="honest",
        name="models that are handed in",
        make=SmallReference,
        claims=("model/own/*/quint8/*",),
        models=tuple(f"tests.mutants.flow_models:{name}" for name in ("branches", "reader", "scaled", "statement")),
    )
)
machine("tables for functions of fixed qparams", TableBackend)
machine("smallest scale, claimed", FlooredBackend, *CLAIMS)
machine("scales of powers of two, with observers for them", PowerOfTwoBackend, *CLAIMS, in_full=INTEGER_SAMPLE)
machine("custom module", CustomModules)
for kind, made in FIXED_GRIDS.items():
    machine(f"fixed grid, {kind}", made, *fixed_grids.CLAIMS, *fixed_grids.MODELS)
sharing = ("torch.cat/*", "nn.MaxPool2d/*", "nn.ReLU/*", "torch.flatten/*", "nn.Conv2d/*")
one_grid = Fixing(patterns=(*FIXING, *PLAIN))
machine(
    "fixed grid, in integers",
    lambda: FixedGridIntegers(Fixing()),
    *fixed_grids.CLAIMS,
    in_full=("nn.Linear/*", "operator.*/ptq/*"),
)
machine("fixed grid, of all ops", lambda: FixedGridBackend(one_grid), *fixed_grids.CLAIMS, *sharing)
for layer in LAYERS:
    machine(f"reference module of its own, {layer}", partial(OwnModules, layer))
