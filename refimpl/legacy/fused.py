"""Fused float modules: the parts of a pattern that a backend takes as one, run one after the other."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

__all__ = [  # noqa: RUF022  # as torch orders them
    "_FusedModule",
    "ConvBn1d",
    "ConvBn2d",
    "ConvBn3d",
    "ConvBnReLU1d",
    "ConvBnReLU2d",
    "ConvBnReLU3d",
    "ConvReLU1d",
    "ConvReLU2d",
    "ConvReLU3d",
    "LinearReLU",
    "BNReLU2d",
    "BNReLU3d",
    "LinearBn1d",
    "LinearLeakyReLU",
    "LinearTanh",
    "ConvAdd2d",
    "ConvAddReLU2d",
]


class _FusedModule(nn.Sequential):
    """Parts that run one after the other; the first is the root."""

    kinds: tuple[type[nn.Module], ...] = ()
    """The classes of its parts."""

    def __init__(self, *parts: Any) -> None:
        if self.kinds:
            check_parts(self, parts, self.kinds)
        super().__init__(*parts)


def check_parts(fused: nn.Module, parts: tuple[Any, ...], kinds: tuple[type[nn.Module], ...]) -> None:
    """Raise TypeError for parts that are not of these classes, one of each."""
    if len(parts) != len(kinds) or not all(map(isinstance, parts, kinds)):
        wanted, found = (", ".join(kind.__name__ for kind in each) for each in (kinds, map(type, parts)))
        raise TypeError(f"{type(fused).__name__} is made of {wanted}; found {found}")


def _make(name: str, *kinds: type[nn.Module]) -> Any:
    """Return the class of fused modules with parts of these classes."""
    parts = ", ".join(kind.__name__ for kind in kinds)
    text = f"{parts}, one after the other."
    return type(name, (_FusedModule,), {"__module__": __name__, "__doc__": text, "kinds": kinds})


ConvBn1d = _make("ConvBn1d", nn.Conv1d, nn.BatchNorm1d)
ConvBn2d = _make("ConvBn2d", nn.Conv2d, nn.BatchNorm2d)
ConvBn3d = _make("ConvBn3d", nn.Conv3d, nn.BatchNorm3d)
ConvBnReLU1d = _make("ConvBnReLU1d", nn.Conv1d, nn.BatchNorm1d, nn.ReLU)
ConvBnReLU2d = _make("ConvBnReLU2d", nn.Conv2d, nn.BatchNorm2d, nn.ReLU)
ConvBnReLU3d = _make("ConvBnReLU3d", nn.Conv3d, nn.BatchNorm3d, nn.ReLU)
ConvReLU1d = _make("ConvReLU1d", nn.Conv1d, nn.ReLU)
ConvReLU2d = _make("ConvReLU2d", nn.Conv2d, nn.ReLU)
ConvReLU3d = _make("ConvReLU3d", nn.Conv3d, nn.ReLU)
LinearReLU = _make("LinearReLU", nn.Linear, nn.ReLU)
BNReLU2d = _make("BNReLU2d", nn.BatchNorm2d, nn.ReLU)
BNReLU3d = _make("BNReLU3d", nn.BatchNorm3d, nn.ReLU)
LinearBn1d = _make("LinearBn1d", nn.Linear, nn.BatchNorm1d)
LinearLeakyReLU = _make("LinearLeakyReLU", nn.Linear, nn.LeakyReLU)
LinearTanh = _make("LinearTanh", nn.Linear, nn.Tanh)


class ConvAdd2d(_FusedModule):
    """A convolution, to whose output ``add`` adds a second input."""

    def __init__(self, conv: nn.Module, add: Any) -> None:
        super().__init__(conv)
        self.add = add

    def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        """Return add(conv(x), other), of the convolution's output's shape."""
        return self.add(self[0](x), other)  # type: ignore[no-any-return]


class ConvAddReLU2d(ConvAdd2d):
    """The same, with a ReLU at the end."""

    def __init__(self, conv: nn.Module, add: Any, relu: nn.Module) -> None:
        super().__init__(conv, add)
        self.relu = relu

    def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        """Return relu(add(conv(x), other))."""
        return self.relu(super().forward(x, other))  # type: ignore[no-any-return]
