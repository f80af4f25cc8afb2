"""What a pattern puts around an op with a weight: fused modules' members, QAT modules' float classes, epilogues."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.conv import _ConvTransposeNd

from fx_quant_conformance.conformance.ops.activations import EPILOGUE_SLOPE
from fx_quant_conformance.conformance.ops.op_model import Step
from fx_quant_conformance.conformance.ops.table import RECORDS
from fx_quant_conformance.conformance.ops.variants import Arguments
from fx_quant_conformance.refimpl.legacy import nni, nniqat, nnqat

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

_SAME_NAME = (
    (nnqat, nn, "Linear Conv1d Conv2d Conv3d Embedding EmbeddingBag"),
    (
        nniqat,
        nni,
        "ConvBn1d ConvBn2d ConvBn3d ConvBnReLU1d ConvBnReLU2d ConvBnReLU3d ConvReLU1d ConvReLU2d ConvReLU3d "
        "LinearReLU LinearBn1d",
    ),
)
QAT_OF: dict[Any, Any] = {
    getattr(qat_module, name): getattr(float_module, name)
    for qat_module, float_module, names in _SAME_NAME
    for name in names.split()
}
"""The class that each QAT class is made of by ``from_float``: a float one, or a fused one."""


def root_of(leaf: Any) -> Any:
    """Return the float op at the root of a fused or QAT module; of any other leaf, the leaf itself."""
    leaf = QAT_OF.get(leaf, leaf)
    return MEMBERS.get(leaf, (leaf,))[0]


def weight_axis_of(ops: Iterable[Any]) -> int:
    """Return the axis of the output channels in the weight of a pattern's ops: 1 in transposed convolutions, else 0."""
    functions = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
    roots = map(root_of, ops)
    return int(any(issubclass(op, _ConvTransposeNd) if isinstance(op, type) else op in functions for op in roots))


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


# What is given by position counts as an argument pattern, and a chain has one for each op (PAT-04): the rest has names.
BENDING = frozenset(op for op, record in RECORDS.items() if record.epilogue is not None)
"""Epilogues whose function clamps or bends away from zero, or has a slope for each channel."""
BY_CHANNEL = frozenset((nn.PReLU, F.prelu))
"""Epilogues with a parameter for each channel of what comes to them."""


def make_epilogue(op: Any, channels: int, is_taken: Callable[[Arguments], bool] = lambda arguments: True) -> Step:
    """Make the step of a epilogue: of its arguments those of its record, else the first that the backend takes."""
    if op not in BENDING:
        return EPILOGUES[op](channels)
    record = RECORDS[op]
    by_channel: Arguments = {"num_parameters": max(1, channels)} if op in BY_CHANNEL else {}
    usual = {**record.base(), **(record.epilogue or {}), **by_channel}
    others = ({**arguments, **by_channel} for _, arguments in record.variants())
    return record.step(op, next((each for each in (usual, *others) if is_taken(each)), usual))


EPILOGUES: dict[Any, Callable[[int], Step]] = {
    **{kind: partial(_build_batch_norm, kind) for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)},
    nn.ReLU: lambda channels: Step(op=nn.ReLU()),
    nn.Tanh: lambda channels: Step(op=nn.Tanh()),
    nn.LeakyReLU: lambda channels: Step(op=nn.LeakyReLU(EPILOGUE_SLOPE)),
    F.leaky_relu: lambda channels: Step(op=F.leaky_relu, keywords=(("negative_slope", EPILOGUE_SLOPE),)),
    F.relu: lambda channels: Step(op=F.relu),
    torch.relu: lambda channels: Step(op=torch.relu),
    torch.tanh: lambda channels: Step(op=torch.tanh),
    "relu": lambda channels: Step(op="relu"),
    "tanh": lambda channels: Step(op="tanh"),
    **{op: partial(make_epilogue, op) for op in RECORDS if op in BENDING},
}
"""Ops that may follow, by the number of channels that come to them."""
