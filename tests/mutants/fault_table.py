"""The table of faulty integer kernels, and the patterns that their faults show on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fx_quant_conformance.reports.verdicts import Verdict
from tests.mutants.integer_kernels import Kernels, Make, varied

LINEAR = ("nn.Linear",)
RELU_AFTER = ("nn.Linear+nn.ReLU", "nn.Conv2d+nn.ReLU", "nni.ConvReLU2d", "operator.add+nn.ReLU")
CONV = ("torch.conv2d",)
WEIGHTED = (*LINEAR, *CONV)
RESCALED = (*WEIGHTED, "operator.add", "operator.mul", "nn.AvgPool2d", "nn.AdaptiveAvgPool2d")
RATIO = (*WEIGHTED, "operator.add", "operator.mul")
MOVING = ("torch.cat", "nn.ReLU", "nn.MaxPool2d", "torch.flatten", "torch.transpose")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One way to be wrong: the kernels, where it must show, and the mildest verdict that is still right.

    ``per_channel``: the fault is one of per-channel weights, and cannot be seen with per-tensor ones.
    """

    group: str
    name: str
    kernels: Make
    patterns: tuple[str, ...]
    verdict: Verdict = Verdict.REFUTED
    rule: str = "NUM-03"
    also: tuple[str, ...] = ()
    per_channel: bool = False
    dtypes: tuple[str, ...] = ("in=qint8", "in=quint8")
    capabilities: dict[str, Any] = field(default_factory=dict)
    size: float | None = None


FAULTS: list[Fault] = []


def fault(group: str, name: str, *patterns: str, **more: Any) -> Callable[[type[Kernels]], type[Kernels]]:
    """Enter kernels into the table of faults."""

    def enter(kernels: type[Kernels]) -> type[Kernels]:
        FAULTS.append(Fault(group=group, name=name, kernels=kernels, patterns=patterns, **more))
        return kernels

    return enter


def seed(group: str, name: str, method: str, body: Callable[..., Any], patterns: tuple[str, ...], **more: Any) -> None:
    """Enter kernels with one step replaced into the table of faults."""
    FAULTS.append(Fault(group=group, name=name, kernels=varied(method, body), patterns=patterns, **more))
