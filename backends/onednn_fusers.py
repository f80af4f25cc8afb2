"""Fuser methods and getters of onednn's complex patterns, a convolution and an addition (FUS-02 to FUS-04).

A fuser method is called as ``fuser(is_qat, *nested)``, nested as the pattern is: ``(is_qat, relu, (add, (bn, conv),
extra))``, where functions stand for themselves. Fusers and getters can be deep-copied and pickled; config digests hold
the qualified names of the functions in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, reduce
from operator import getitem
from typing import Any

from torch import nn

from fx_quant_conformance.refimpl.config.fusers import FuserMethod, assemble, fuse_bn, names_of
from fx_quant_conformance.refimpl.config.patterns import Pattern, is_match_all
from fx_quant_conformance.refimpl.errors import ConfigError
from fx_quant_conformance.refimpl.legacy import nni


def _fuse_add(side: int, is_qat: bool, add: Any, *branches: Any) -> nn.Module:
    return assemble(nni.ConvAdd2d, is_qat, _fold_branch(is_qat, branches[side]), add)


def _fuse_add_relu(side: int, is_qat: bool, relu: nn.Module, add_pattern: tuple[Any, ...]) -> nn.Module:
    add, *branches = add_pattern
    return assemble(nni.ConvAddReLU2d, is_qat, _fold_branch(is_qat, branches[side]), add, relu)


def _fold_branch(is_qat: bool, branch: Any) -> nn.Module:
    """Return the convolution of a branch ``conv`` or ``(bn, conv)``, with the batch norm folded."""
    if isinstance(branch, nn.Module):
        return branch
    if not isinstance(branch, tuple):
        raise ConfigError(f"cannot fuse with an addition: expected a convolution, found {branch!r}")
    bn, conv = branch
    if is_qat:
        raise ConfigError(f"cannot fuse {names_of(conv, bn)} with an addition for QAT: there is no fused class for it")
    return fuse_bn(is_qat, conv, bn)


def conv_add(*, conv_side: int, relu: bool) -> FuserMethod:
    """Return the fuser of ``(add, left, right)``, or of ``(relu, (add, left, right))``. (FUS-02, FUS-04)

    `conv_side`, 0 or 1: the operand that is ``conv`` or ``(bn, conv)``; the other becomes an extra input.
    The fuser raises ConfigError for a batch norm in QAT, and otherwise as `fuse_bn` does.
    """
    return partial(_fuse_add_relu if relu else _fuse_add, conv_side)


def root_node_getter(pattern: Pattern) -> Callable[[Any], Any]:
    """Return the getter of a complex pattern's root: its first leaf in forward order. (FUS-03)"""
    # A wildcard is never the root: it stands for another node's result.
    return partial(_at, next(path for path, leaf in _paths(pattern) if not is_match_all(leaf)))


def extra_inputs_getter(pattern: Pattern) -> Callable[[Any], list[Any]]:
    """Return the getter of the nodes that a complex pattern's wildcards matched, in forward order. (FUS-04)"""
    return partial(_all_at, tuple(path for path, leaf in _paths(pattern) if is_match_all(leaf)))


def _paths(pattern: Pattern, here: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], object]]:
    """Yield the leaves of a normal form with their index paths, arguments before the op that takes them."""
    if not isinstance(pattern, tuple):
        yield here, pattern
        return
    for index in (*range(1, len(pattern)), 0):
        yield from _paths(pattern[index], (*here, index))


def _at(path: tuple[int, ...], matched: Any) -> Any:
    return reduce(getitem, path, matched)


def _all_at(paths: tuple[tuple[int, ...], ...], matched: Any) -> list[Any]:
    return [_at(path, matched) for path in paths]
