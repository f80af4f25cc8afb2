"""What a pattern puts around an op with a weight: fused modules' members, QAT modules' float classes, followers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.ao.nn.intrinsic as nni
import torch.ao.nn.intrinsic.qat as nniqat
import torch.ao.nn.qat as nnqat
import torch.nn.functional as F
from torch import nn

from conformance.ops.op_model import Step

MEMBERS: dict[Any, tuple[Any, ...]] = {
    nni.LinearReLU: (nn.Linear, nn.ReLU),
    nni.LinearBn1d: (nn.Linear, nn.BatchNorm1d),
    nni.LinearLeakyReLU: (nn.Linear, nn.LeakyReLU),
    nni.LinearTanh: (nn.Linear, nn.Tanh),
    nni.ConvReLU1d: (nn.Conv1d, nn.ReLU),
    nni.ConvReLU2d: (nn.Conv2d, nn.ReLU),
    nni.ConvReLU3d: (nn.Conv3d, nn.ReLU),
    nni.ConvBn1d: (nn.Conv1d, nn.BatchNorm1d),
    nni.ConvBn2d: (nn.Conv2d, nn.BatchNorm2d),
    nni.ConvBn3d: (nn.Conv3d, nn.BatchNorm3d),
    nni.ConvBnReLU1d: (nn.Conv1d, nn.BatchNorm1d, nn.ReLU),
    nni.ConvBnReLU2d: (nn.Conv2d, nn.BatchNorm2d, nn.ReLU),
    nni.ConvBnReLU3d: (nn.Conv3d, nn.BatchNorm3d, nn.ReLU),
    nni.ConvAdd2d: (nn.Conv2d, torch.add),
    nni.ConvAddReLU2d: (nn.Conv2d, torch.add, nn.ReLU),
    nni.BNReLU2d: (nn.BatchNorm2d, nn.ReLU),
    nni.BNReLU3d: (nn.BatchNorm3d, nn.ReLU),
}
"""The members of each fused module, in the order in which its constructor takes them."""

_SAME_NAME = {
    nnqat: (nn, "Linear Conv1d Conv2d Conv3d Embedding EmbeddingBag"),
    nniqat: (nni, "ConvBn1d ConvBn2d ConvBn3d ConvBnReLU1d ConvBnReLU2d ConvBnReLU3d ConvReLU1d ConvReLU2d ConvReLU3d "
                  "LinearReLU LinearBn1d"),
}  # fmt: skip
QAT_OF: dict[Any, Any] = {
    getattr(qat_module, name): getattr(float_module, name)
    for qat_module, (float_module, names) in _SAME_NAME.items() for name in names.split()
}  # fmt: skip
"""The class that each QAT class is made of by ``from_float``: a float one, or a fused one."""


def root_of(leaf: Any) -> Any:
    """Return the float op at the root of a fused or QAT module; of any other leaf, the leaf itself."""
    leaf = QAT_OF.get(leaf, leaf)
    return MEMBERS.get(leaf, (leaf,))[0]


def _build_batch_norm(kind: Any, channels: int) -> Step:
    """A batch norm with drawn statistics, weights of both signs, and an eps that is not too small to be seen."""
    norm = kind(channels, eps=0.0625)
    signs = torch.tensor([1.0 if channel % 2 == 0 else -1.0 for channel in range(channels)])
    with torch.no_grad():
        norm.weight.copy_(torch.empty(channels).uniform_(0.5, 1.5) * signs)
        norm.bias.uniform_(-1, 1)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    return Step(op=norm)


_SLOPE = 0.3125  # not the default, 0.01
FOLLOWERS: dict[Any, Callable[[int], Step]] = {
    **{kind: partial(_build_batch_norm, kind) for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)},
    nn.ReLU: lambda channels: Step(op=nn.ReLU()),
    nn.Tanh: lambda channels: Step(op=nn.Tanh()),
    nn.LeakyReLU: lambda channels: Step(op=nn.LeakyReLU(_SLOPE)),
    F.leaky_relu: lambda channels: Step(op=F.leaky_relu, keywords=(("negative_slope", _SLOPE),)),
    F.relu: lambda channels: Step(op=F.relu),
    torch.relu: lambda channels: Step(op=torch.relu),
    torch.tanh: lambda channels: Step(op=torch.tanh),
}
"""Ops that may follow, by the number of channels that come to them."""
