"""Families of ops, by which the scoreboard sums up: each op is in one, and so is each pattern."""

from __future__ import annotations

from collections.abc import Mapping

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "Convolution": (
        "conv",
        "convadd",
        "convaddrelu",
        "convbn",
        "convbnrelu",
        "convrelu",
        "convtranspose",
    ),
    "Linear": (
        "addmm",
        "bilinear",
        "bmm",
        "linear",
        "linearbn",
        "linearleakyrelu",
        "linearrelu",
        "lineartanh",
        "matmul",
    ),
    "Embedding": ("embedding", "embeddingbag"),
    "Recurrent": ("gru", "grucell", "lstm", "lstmcell", "rnn", "rnncell"),
    "Normalization": ("batchnorm", "bnrelu", "groupnorm", "instancenorm", "layernorm"),
    "Pooling": ("adaptiveavgpool", "adaptivemaxpool", "avgpool", "maxpool"),
    "Arithmetic": ("add", "div", "floordiv", "mean", "mul", "sub", "truediv"),
    "Activation": (
        "clamp",
        "elu",
        "gelu",
        "hardsigmoid",
        "hardswish",
        "hardtanh",
        "leakyrelu",
        "mish",
        "prelu",
        "relu",
        "sigmoid",
        "silu",
        "softmax",
        "softplus",
        "tanh",
    ),
    "Resampling": ("interpolate", "upsample", "upsamplingbilinear", "upsamplingnearest"),
    "Shape and copy": (
        "cat",
        "circularpad",
        "concat",
        "concatenate",
        "constantpad",
        "contiguous",
        "detach",
        "dropout",
        "flatten",
        "getitem",
        "identity",
        "narrow",
        "pad",
        "permute",
        "permutecopy",
        "pixelshuffle",
        "pixelunshuffle",
        "reflectionpad",
        "repeat",
        "repeatinterleave",
        "replicationpad",
        "reshape",
        "resize",
        "shape",
        "size",
        "squeeze",
        "stack",
        "transpose",
        "unsqueeze",
        "view",
        "zeropad",
    ),
}
"""The ops of each family, without dimensions, case and underscores: `nn.Conv2d` and `torch.conv1d` are ``conv``.

A pattern of several ops belongs to the first family here that has one of them: what computes goes before what follows,
so that a convolution with a batch norm and a ReLU is a convolution, and so is one whose output is added to something.
"""
OTHER = "Other"
"""The family of the patterns that have no op of the table, such as a vendor's own modules."""

_SEPARATORS = str.maketrans(dict.fromkeys("+(),*", " "))
_DIMENSIONS = ("1d", "2d", "3d", "6")


def find_family(pattern: str) -> str:
    """Return the family of a pattern as results files spell it: ``nn.Conv2d+nn.ReLU``, ``torch.add(*,nn.Conv2d)``."""
    ops = {_shorten(name) for name in pattern.translate(_SEPARATORS).split()}
    return next((family for family, names in FAMILIES.items() if not ops.isdisjoint(names)), OTHER)


def _shorten(name: str) -> str:
    """Return an op's name as the table has it."""
    leaf = name.rpartition(".")[2].lower().replace("_", "")
    for suffix in _DIMENSIONS:
        leaf = leaf.removesuffix(suffix)
    return leaf
