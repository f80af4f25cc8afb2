"""Faults in a vendor's fused kernels: registered patterns, and what follows a convolution, a linear layer or a sum.

Two honest variants compute what follows in other ways that are right: on integers, and in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.mutants.pattern_kernels import Around, Clip, Gain, Patterned
from tests.mutation.mutant import Mutant

MUTANTS: list[Mutant] = []
STATIC = ("*/static:*",)
CLIPPED = ("*Clip/*",)
ADDED = ("*ConvAddClip/*", "*torch.add*Clip/*")
RELU6 = ("*relu6/*", "*ReLU6/*")
HARDTANH, HARDSWISH, HARDSIGMOID = ("*nn.Hardtanh/*",), ("*nn.Hardswish/*",), ("*nn.Hardsigmoid/*",)
CLAMP, SIGMOID, SILU = ("*torch.clamp/*",), ("*nn.Sigmoid/*",), ("*nn.SiLU/*",)
LEAKY, PRELU, GAIN = ("*nn.LeakyReLU/*",), ("*nn.PReLU/*",), ("*Gain/*",)

Op = Callable[[Tensor], Tensor]


def fault(
    group: str, name: str, *claims: str, step: str = "follow"
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a step's body as a mutant; each gets the honest step, then what the step is given."""

    def enter(body: Callable[..., Any]) -> Callable[..., Any]:
        rules = ("NUM-03", "NUM-05")
        MUTANTS.append(Mutant(group=group, name=name, make=lambda: Patterned(step, body), rules=rules, claims=claims))
        return body

    return enter


def steps_of(value: float, scale: float) -> float:
    """A bound in whole steps of a grid, as a kernel's integer holds it."""
    return round(value / scale)


# -- clamps -----------------------------------------------------------------------------------------------------------


@fault("registered", "registered clip, bounds in steps of the input", *CLIPPED)
def _clip_by_input(honest: Any, op: Op, x: Tensor, around: Around) -> Tensor:
    low, high = (steps_of(end, around.x.scale) * around.y.scale for end in (Clip.low, Clip.high))
    return x.clamp(low, high)


@fault("registered", "registered clip left out", *CLIPPED)
def _no_clip(honest: Any, op: Op, x: Tensor, around: Around) -> Tensor:
    result: Tensor = honest(op, x, around)
    return x if isinstance(op, Clip) else result


@fault("registered", "registered clip, bounds without the zero point", *CLIPPED)
def _clip_without_zero(honest: Any, op: Op, x: Tensor, around: Around) -> Tensor:
    scale, zero = around.y
    low, high = (steps_of(end, scale) for end in (Clip.low, Clip.high))
    return ((x / scale).round() + zero).clamp(low, high).sub(zero) * scale


@fault("registered", "registered clip, same bound at both ends", *CLIPPED)
def _clip_symmetric(honest: Any, op: Op, x: Tensor, around: Around) -> Tensor:
    return x.clamp(-Clip.high, Clip.high)


@fault("registered", "registered clip, lower bound of a relu", *CLIPPED)
def _clip_at_zero(honest: Any, op: Op, x: Tensor, around: Around) -> Tensor:
    return x.clamp(0.0, Clip.high)


@fault("epilogues", "relu6 in steps of the input", *RELU6)
def _relu6_by_input(honest: Any, op: Op, x: Tensor, around: Around) -> Tensor:
    return x.clamp(0.0, steps_of(6.0, around.x.scale) * around.y.scale)


@fault("epilogues", "relu6 as a relu", *RELU6)
def _relu6_as_relu(honest: Any, op: Op, x: Tensor, around: Around) -> Tensor:
    return x.relu()


@fault("epilogues", "hardtanh, largest bound at both ends", *HARDTANH)
def _hardtanh_symmetric(honest: Any, op: Any, x: Tensor, around: Around) -> Tensor:
    return x.clamp(-op.max_val, op.max_val)


@fault("epilogues", "hardtanh by its defaults", *HARDTANH)
def _hardtanh_default(honest: Any, op: Op, x: Tensor, around: Around) -> Tensor:
    return x.clamp(-1.0, 1.0)


@fault("epilogues", "clamp, only at the upper end", *CLAMP)
def _clamp_above(honest: Any, op: Op, x: Tensor, around: Around) -> Tensor:
    return torch.minimum(x, honest(op, torch.full_like(x, 1e9), around))


@fault("epilogues", "clamp before the rescale, in steps of the input", *CLAMP)
def _clamp_by_input(honest: Any, op: Op, x: Tensor, around: Around) -> Tensor:
    low, high = (float(honest(op, torch.full((), end), around)) for end in (-1e9, 1e9))
    return x.clamp(*(steps_of(end, around.x.scale) * around.y.scale for end in (low, high)))


# -- curves -----------------------------------------------------------------------------------------------------------


@fault("epilogues", "hardswish, three in steps of the input", *HARDSWISH)
def _hardswish_by_input(honest: Any, op: Op, x: Tensor, around: Around) -> Tensor:
    three = steps_of(3.0, around.x.scale) * around.y.scale
    return x * (x + three).clamp(0.0, 2 * three) / (2 * three)


@fault("epilogues", "hardswish as a swish", *HARDSWISH)
def _hardswish_as_silu(honest: Any, op: Op, x: Tensor, around: Around) -> Tensor:
    return F.silu(x)


@fault("epilogues", "hardsigmoid of slope 1/5", *HARDSIGMOID)
def _steeper_hardsigmoid(honest: Any, op: Op, x: Tensor, around: Around) -> Tensor:
    """As ONNX and Keras have it by default."""
    return (0.2 * x + 0.5).clamp(0.0, 1.0)


@fault("epilogues", "sigmoid by a table on the input's grid", *SIGMOID)
def _sigmoid_by_table(honest: Any, op: Op, x: Tensor, around: Around) -> Tensor:
    scale, zero = around.x
    result: Tensor = honest(op, ((x / scale).round() + zero).clamp(0, 255).sub(zero) * scale, around)
    return result


@fault("epilogues", "silu as a hardswish", *SILU)
def _silu_as_hardswish(honest: Any, op: Op, x: Tensor, around: Around) -> Tensor:
    return F.hardswish(x)


@fault("epilogues", "silu of the rescaled integers", *SILU)
def _silu_of_integers(honest: Any, op: Op, x: Tensor, around: Around) -> Tensor:
    return x * (x / around.y.scale * around.x.scale).sigmoid()


# -- slopes -----------------------------------------------------------------------------------------------------------


@fault("epilogues", "leaky relu by the default slope", *LEAKY)
def _default_slope(honest: Any, op: Op, x: Tensor, around: Around) -> Tensor:
    return F.leaky_relu(x, 0.01)


@fault("epilogues", "leaky relu, slope as a power of two", *LEAKY)
def _slope_by_shift(honest: Any, op: Any, x: Tensor, around: Around) -> Tensor:
    return F.leaky_relu(x, 2.0 ** round(torch.tensor(op.negative_slope).log2().item()))


@fault("epilogues", "prelu, first channel's slope for all", *PRELU)
def _first_slope(honest: Any, op: nn.PReLU, x: Tensor, around: Around) -> Tensor:
    return F.prelu(x, op.weight[:1])


@fault("epilogues", "prelu, slopes in 4 bits", *PRELU)
def _coarse_slopes(honest: Any, op: nn.PReLU, x: Tensor, around: Around) -> Tensor:
    return F.prelu(x, (op.weight * 16).round() / 16)


# -- roots, operands, own ops -----------------------------------------------------------------------------------------


@fault("registered", "registered root takes the first group alone", *CLIPPED, step="root")
def _first_group(honest: Any, module: Any, *arguments: Any, **keywords: Any) -> Any:
    """Shows where there are groups: only with the root's own variants."""
    result = honest(module, *arguments, **keywords)
    groups = getattr(module, "groups", 1)
    parts = result.chunk(groups, dim=-len(getattr(module, "kernel_size", ())) - 1)
    return torch.cat([parts[0]] * groups, dim=-len(getattr(module, "kernel_size", ())) - 1)


@fault("registered", "registered sum, second operand in steps of the first", *ADDED, step="join")
def _join_by_first(honest: Any, x: Tensor, y: Tensor, around: Around) -> Tensor:
    return x + (y / around.y.scale).round() * around.x.scale


@fault("registered", "registered sum, second operand left out", *ADDED, step="join")
def _join_nothing(honest: Any, x: Tensor, y: Tensor, around: Around) -> Tensor:
    return x


@fault("registered", "registered gain of the lane, in blocks of eight", *GAIN, step="gain")
def _gain_of_lane(honest: Any, module: Gain, x: Tensor) -> Tensor:
    """Shows where there are more channels than lanes: only in the second of two registered variants."""
    gains = module.get_buffer("gains")
    return x * gains[torch.arange(len(gains)) % 8]


# -- honest variants --------------------------------------------------------------------------------------------------


def _clamp_on_integers(honest: Any, op: Any, x: Tensor, around: Around) -> Tensor:
    """Rounds to the output's grid first, and clamps at the rounded bounds: the same, as rounding is monotone."""
    result: Tensor = honest(op, x, around)
    if not isinstance(op, (nn.ReLU6, nn.Hardtanh, Clip)):
        return result
    scale, zero = around.y
    ends = honest(op, torch.tensor([-1e9, 1e9]), around)
    low, high = ((ends.double() / scale).round() + zero).tolist()
    integers = ((x.double() / scale).round() + zero).clamp(low, high)
    return ((integers - zero) * scale).float()


def _in_float64(honest: Any, op: Any, x: Tensor, around: Around) -> Tensor:
    function = op.double() if isinstance(op, nn.Module) else op
    result: Tensor = honest(function, x.double(), around).float()
    if isinstance(op, nn.Module):
        op.float()
    return result


for _name, _body in (("epilogues clamp integers", _clamp_on_integers), ("epilogues in float64", _in_float64)):
    MUTANTS.append(
        Mutant(group="honest", name=_name, make=lambda body=_body: Patterned("follow", body), claims=STATIC)  # type: ignore[misc]
    )
