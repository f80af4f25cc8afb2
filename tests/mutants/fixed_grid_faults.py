"""Faults of machines and of the flow where claims fix the grid of a result: another grid, or other ends of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from tests.mutants.fixed_grids import CLAIMS, MEASURED, MODELS, SEVEN, FixedGridBackend, Fixing, OwnFixedObserver
from tests.mutants.flow_faults import patched
from tests.mutants.reference_kernels import Stepped
from tests.mutation.mutant import Mutant

MUTANTS: list[Mutant] = []
FIXED = Fixing()
GROUP = "fixed qparams"


def _is_of_result(quantize: Node) -> bool:
    return quantize.all_input_nodes[0].op != "placeholder"


def _results(integers: Callable[..., Tensor]) -> Callable[..., Any]:
    """Quantize results to integers of one's own: of positions on the grid, and of its ends."""

    def body(honest: Any, node: Node, value: Any, scale: float, zero: int, low: int, high: int, dtype: Any) -> Any:
        if not _is_of_result(node):
            return honest(node, value, scale, zero, low, high, dtype)
        return integers((value / scale).round() + zero, low, high).to(dtype)

    return body


def _kernel(name: str, step: str, body: Callable[..., Any], fixing: Fixing = FIXED) -> None:
    MUTANTS.append(
        Mutant(
            group=GROUP, name=name, make=lambda: Stepped(step, body, fixing.config()), rules=("NUM-03",), claims=CLAIMS
        )
    )


# -- kernels ----------------------------------------------------------------------------------------------------------


def _at_the_other_end(q: Tensor, low: int, high: int) -> Tensor:
    return torch.where(q > high, low, torch.where(q < low, high, q))


def _measured(honest: Any, node: Node, value: Any, scale: float, zero: int, low: int, high: int, dtype: Any) -> Any:
    """Integers of a grid that holds just these results."""
    if _is_of_result(node):
        least, most = float(value.min().clamp(max=0)), float(value.max().clamp(min=0))
        scale = max((most - least) / (high - low), 2.0**-20)
        zero = low - round(least / scale)
    return honest(node, value, scale, zero, low, high, dtype)


def _other_scale(honest: Any, node: Node, value: Any, scale: float, *rest: Any) -> Any:
    return honest(node, value, scale / 4 if _is_of_result(node) else scale, *rest)


def _as_if_fixed(honest: Any, node: Node, value: Any, scale: float, zero: int, *rest: Any) -> Any:
    """The integers of an input are taken for some on the fixed grid."""
    (quantize,) = node.all_input_nodes
    is_input = not _is_of_result(quantize)
    return honest(node, value, *((FIXED.scale, FIXED.zero_point) if is_input else (scale, zero)), *rest)


def _clipped_before(honest: Any, node: Node, value: Any, *numbers: Any) -> Any:
    """An input is clipped to what the fixed grid holds."""
    real: Tensor = honest(node, value, *numbers)
    return real if _is_of_result(node.all_input_nodes[0]) else real.clamp(-128 * FIXED.scale, 127 * FIXED.scale)


def _not_clipped(honest: Any, node: Node, value: Any, scale: float, zero: int, low: int, high: int, dtype: Any) -> Any:
    """An input beyond the ends of its grid starts again at the other one."""
    if _is_of_result(node):
        return honest(node, value, scale, zero, low, high, dtype)
    return (((value.double() / scale).round() + zero - low).remainder(high - low + 1) + low).to(dtype)


_kernel("fixed grid: clips at the other end", "quantize", _results(_at_the_other_end))
_kernel("fixed grid: wraps", "quantize", _results(lambda q, low, high: q.remainder(256)))
_kernel(
    "fixed grid: does not clip below",
    "quantize",
    _results(lambda q, low, high: torch.where(q < low, q.remainder(256), q.clamp(max=high))),
)
_kernel("fixed grid: ends a step early", "quantize", _results(lambda q, low, high: q.clamp(low, high - 1)))
_kernel("fixed grid: begins a step late", "quantize", _results(lambda q, low, high: q.clamp(low + 1, high)))
_kernel("fixed grid: zero point off by one", "quantize", _results(lambda q, low, high: (q + 1).clamp(low, high)))
_kernel("fixed grid: measured instead", "quantize", _measured)
_kernel("fixed grid: another op's scale", "quantize", _other_scale)
_kernel("fixed grid: of 7 bits, filled up to 8", "quantize", _results(lambda q, low, high: q.clamp(0, 255)), SEVEN)
_kernel("fixed grid: inputs taken for results", "dequantize", _as_if_fixed)
_kernel("fixed grid: inputs clipped like results", "dequantize", _clipped_before)
_kernel("fixed grid: inputs beyond the ends wrap", "quantize", _not_clipped)

# -- the flow ---------------------------------------------------------------------------------------------------------


def _flow(name: str, target: str, body: Callable[..., Any], *rules: str, fixing: Fixing = FIXED, **more: Any) -> None:
    make = partial(FixedGridBackend, fixing)
    patched(GROUP, name, target, body, *rules, make=make, claims=more.get("claims", CLAIMS), into=MUTANTS)


def _measuring(honest: Any, self: Any, value: Node, make: Any, role: str, rule: str, consumers: Any) -> Any:
    is_fixed = role == "output" and self._reader.read(make).fixed is not None
    return honest(self, value, MEASURED if is_fixed else make, role, rule, consumers)


def _on_input(honest: Any, self: Any, decision: Any) -> Any:
    """What torch does."""
    del honest, self
    return decision.qconfig.activation


def _written(change: Callable[[Any], dict[str, Any]], is_meant: Callable[[Node], bool], fixing: Fixing) -> Any:
    """Convert writes other qparams for the fixed ones, at these values; model and kernels agree."""

    def body(honest: Any, self: Any, value: Node, qparams: Any, *rest: Any) -> Any:
        is_fixed = qparams.axis is None and float(qparams.scale) == float(torch.tensor(fixing.scale))
        changed = replace(qparams, **change(qparams)) if is_fixed and is_meant(value) else qparams
        return honest(self, value, changed, *rest)

    return body


def _is_any(value: Node) -> bool:
    return value.op != "placeholder"


def _is_sharing(value: Node) -> bool:
    return value.name.startswith(("cat", "pool", "relu", "flatten"))


def _halved_input(honest: Any, self: Any, value: Node, qparams: Any, *rest: Any) -> Any:
    """The input of an op with fixed qparams has half of its range."""
    is_input = value.op == "placeholder"
    return honest(self, value, replace(qparams, scale=qparams.scale / 2) if is_input else qparams, *rest)


_WRITE = "fx_quant_conformance.refimpl.convert.emit.Decomposed.write_static"
_flow(
    "fixed grid: an observer measures the result",
    "fx_quant_conformance.refimpl.prepare.placing.Placer._add",
    _measuring,
    "CVT-01",
    "DTY-05",
)
_flow(
    "fixed grid: stands on the input",
    "fx_quant_conformance.refimpl.prepare.placing.Placer._choose_input_constructor",
    _on_input,
    "OBS-14",
)
_flow(
    "fixed grid: convert writes the next zero point",
    _WRITE,
    _written(lambda qparams: {"zero_point": qparams.zero_point + 1}, _is_any, FIXED),
    "CVT-01",
)
_flow(
    "fixed grid: convert writes a scale larger by 2^-16",
    _WRITE,
    _written(lambda qparams: {"scale": qparams.scale * (1 + 2.0**-16)}, _is_any, FIXED),
    "CVT-01",
)
_flow(
    "fixed grid: convert writes all 8 bits for 7",
    _WRITE,
    _written(lambda qparams: {"quant_max": 255}, _is_any, SEVEN),
    "CVT-01",
    fixing=SEVEN,
)
_flow(
    "fixed grid: what shares it is given another",
    _WRITE,
    _written(lambda qparams: {"scale": qparams.scale * 2}, _is_sharing, FIXED),
    "CVT-01",
    claims=MODELS,
)
_flow(
    "fixed grid: the input before it has half its range",
    _WRITE,
    _halved_input,
    "CVT-01",
    claims=("operator.*/ptq/*", "nn.Linear/*/ptq/*"),
)


class Boasting(OwnFixedObserver):
    """Says that its qparams are fixed, and measures others."""

    def forward(self, x: Tensor) -> Tensor:
        """Keep the largest value."""
        self.largest = max(getattr(self, "largest", 0.0), float(x.detach().abs().max()))
        return x

    def calculate_qparams(self) -> tuple[Any, Any]:
        """Return a scale that reaches as far."""
        return torch.tensor([max(getattr(self, "largest", 0.0), 2.0**-10) / 127]), self.zero_point


MUTANTS.append(
    Mutant(
        group=GROUP,
        name="fixed grid: own observer measures all the same",
        rules=("CVT-01", "DTY-05"),
        claims=CLAIMS,
        make=partial(FixedGridBackend, FIXED, observers=(MEASURED, FIXED.observer(Boasting))),
    )
)
