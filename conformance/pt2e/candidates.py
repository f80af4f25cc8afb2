"""Candidates: the entries that a Quantizer is probed with, without their dtype configs.

They are those of torch's seven configs, then each op of the op table that none of these has, then compositions that
none of these has. A candidate has the parts of an entry that do not depend on dtypes, such as its root module.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from copy import copy
from functools import cache, partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fx_quant_conformance.backends.torch_engines.tables import NativeName, native_config
from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.claim import NO_WEIGHT, Claim
from fx_quant_conformance.conformance.claims.pattern_plan import PatternPlan, is_norm, plan_pattern
from fx_quant_conformance.conformance.claims.plan import VALUE_RANGES
from fx_quant_conformance.conformance.ops.fused_modules import EPILOGUES, QAT_OF
from fx_quant_conformance.conformance.ops.op_model import Input
from fx_quant_conformance.conformance.ops.table import RECORDS, WEIGHTED
from fx_quant_conformance.conformance.ops.variants import Arguments
from fx_quant_conformance.refimpl import BackendPatternConfig, DTypeConfig
from fx_quant_conformance.refimpl.config.backend_config import DIFFERENT, SHARE
from fx_quant_conformance.refimpl.config.native import Row, make_entries
from fx_quant_conformance.refimpl.config.patterns import Pattern, leaf_name, pattern_name

_CONFIGS: tuple[NativeName, ...] = ("native", "onednn")
"""Of torch's configs fbgemm, x86 and qnnpack have no pattern that these do not have."""
_FURTHER = (
    Row(patterns=(torch.addmm,), index={"bias": 0, "input": 1, "weight": 2}),
    Row(
        patterns=tuple(
            p for op in (operator.sub, torch.sub) for p in ((op, nn.ReLU), (op, F.relu), (op, torch.relu), op)
        ),
        observe_by_tensor_args={0: DIFFERENT, 1: SHARE, 2: DIFFERENT},
    ),
    Row(
        patterns=(nn.Flatten, F.pad, F.leaky_relu_, nn.ConstantPad2d, torch.permute, torch.permute_copy), observe=SHARE
    ),
    Row(patterns=("leaky_relu", torch.concat, torch.concatenate), observe=SHARE),
    Row(patterns=(F.embedding,), index={"weight": 1}),
)
"""What torch's configs tensorrt and executorch have beside these."""
_GIVES_NO_TENSOR = ("shape", "size")
_BINARY = (operator.add, torch.add, operator.sub, torch.sub, operator.mul, torch.mul)


@cache
def list_entries() -> tuple[BackendPatternConfig, ...]:
    """Return the entries of the seven configs, each pattern once, then those of the ops that are in none.

    An entry is the one of the first config that has its pattern. It is shared: it is copied before it is changed.
    """
    entries: dict[Pattern, BackendPatternConfig] = {}
    for entry in chain(
        *(native_config(name).configs for name in _CONFIGS), *(make_entries(row, ()) for row in _FURTHER)
    ):
        entries.setdefault(entry.normal_pattern, entry)
    for op in RECORDS:
        entries.setdefault(op, BackendPatternConfig(op))
    return tuple(entries.values())


def list_compositions(roots: Collection[Any]) -> Iterator[BackendPatternConfig]:
    """Yield an entry for each of these ops with each op that may follow it, if none of the configs has it.

    Roots are weighted ops, and ops of two tensors. An entry has the root module of the root's own entry.
    """
    known = {entry.normal_pattern: entry for entry in list_entries()}
    for root in (*RECORDS, *_BINARY):
        if root not in roots or (root not in WEIGHTED and root not in _BINARY):
            continue
        for epilogue in EPILOGUES:
            entry = BackendPatternConfig((root, epilogue))
            if not is_norm(epilogue) and entry.normal_pattern not in known:
                known[entry.normal_pattern] = entry
                yield _take_root(entry, known[root])


def _take_root(entry: BackendPatternConfig, own: BackendPatternConfig) -> BackendPatternConfig:
    entry.root_module, entry.reference_quantized_module = own.root_module, own.reference_quantized_module
    entry._num_tensor_args_to_observation_type = own._num_tensor_args_to_observation_type
    return entry


def copy_entry(entry: BackendPatternConfig, *, is_qat: bool) -> BackendPatternConfig:
    """Return a copy without dtype configs; unless ``is_qat``, without the QAT module, which would claim both flows."""
    copied = copy(entry)
    copied.dtype_configs = []
    if not is_qat:
        copied.qat_module = None
    return copied


def is_of_qat(entry: BackendPatternConfig) -> bool:
    """Tell whether an entry's pattern is a QAT module, which no user's float model holds."""
    return entry.normal_pattern in QAT_OF


def probed_pattern(entry: BackendPatternConfig) -> Pattern:
    """Return the normal pattern that stands for an entry's in a float model: for a QAT module, what it is made of."""
    stand_in: Pattern = QAT_OF.get(entry.normal_pattern, entry.normal_pattern)
    return stand_in


WITH_NUMBER: Arguments = {"other": 0.3}
"""The arguments of an op of two operands, one of which is a number."""


def plan_candidate(pattern: Pattern, changes: Arguments = MappingProxyType({})) -> Case | str:
    """Return the base case of a normal pattern, or the reason why no float model of it can be built.

    ``changes``: arguments of its root that are not those of the base.
    """
    entry = BackendPatternConfig()._set_pattern_complex_format(pattern)
    name = pattern_name(pattern)
    claim = Claim(
        id=name, pattern=name, dtype_config="", flow="ptq", scheme=NO_WEIGHT, index=0, entry=entry, dtypes=DTypeConfig()
    )
    plan = plan_pattern(claim)
    if isinstance(plan, str):
        return plan
    if pattern in _GIVES_NO_TENSOR:
        return "its result is no tensor: an exported program has a constant in its place"
    for _, variant in plan.samples.variants(whole=False, known=False):
        arguments = {**variant, **changes}
        if plan.fits(arguments):
            build = partial(plan.build, arguments)
            return Case(name=name, build=build, inputs=_list_inputs(plan, arguments), value_range=VALUE_RANGES[0])
    return f"no arguments of {leaf_name(plan.root)} fit the ops after it"


def _list_inputs(plan: PatternPlan, arguments: Any) -> tuple[Input, ...]:
    inputs = plan.inputs_for(arguments)
    return (*inputs, Input(shape=plan.output_shape_for(arguments))) if plan.has_second_input else inputs
