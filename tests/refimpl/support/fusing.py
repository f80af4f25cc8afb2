"""A small net whose forward a test gives, and readers of what became of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig
from tests.refimpl.support.zoo_basic import settle

X = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
CUBE = torch.randn(6, 4, 4, generator=torch.Generator().manual_seed(3))


class Net(nn.Module):
    """Layers for the forward function that a test gives."""

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.conv, self.conv2, self.bn, self.bn2 = (
            *(nn.Conv2d(4, 4, 1) for _ in "12"),
            nn.BatchNorm2d(4),
            nn.BatchNorm2d(4),
        )
        self.relu, self.fc, self.bn1d, self.leaky = nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LeakyReLU(0.2)
        for norm in (self.bn, self.bn2, self.bn1d):
            settle(norm)
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def called(model: Any) -> list[str]:
    """The classes of the modules that a graph calls, and the names of the functions."""
    return [
        type(model.get_submodule(node.target)).__name__ if node.op == "call_module" else node.target.__name__
        for node in model.graph.nodes
        if node.op in ("call_module", "call_function")
    ]


def config_of(entry: BackendPatternConfig) -> BackendConfig:
    """A config of that entry alone."""
    return BackendConfig("test").set_backend_pattern_config(entry)
