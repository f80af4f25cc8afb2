"""How whole models are quantized: the setups that a config claims, and a mapping that asks for each op's claim.

Rules QCM-02, DTY-02.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import nn

from fx_quant_conformance.backends.base import Capabilities, Flow
from fx_quant_conformance.conformance.claims.claim import NO_WEIGHT, Claim
from fx_quant_conformance.conformance.claims.kinds import Kind
from fx_quant_conformance.conformance.claims.qconfigs import format_misfit, qconfig_for
from fx_quant_conformance.refimpl import QConfig, QConfigMapping
from fx_quant_conformance.refimpl.config.patterns import Leaf, is_match_all
from fx_quant_conformance.refimpl.observers.observers import is_quantized_dtype

_KINDS = {Kind.STATIC: 0, Kind.FIXED: 0, Kind.DYNAMIC: 1, Kind.WEIGHT_ONLY: 2}
_Rank: TypeAlias = tuple[int, bool, bool, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSetup:
    """How a whole model is quantized: the flow ("ptq", "qat"), the dtype of activations, the weight scheme."""

    flow: Flow
    activation: torch.dtype
    scheme: str
    is_exported: bool = False
    """Whether it is quantized in PT2E, as torch.export captures the model."""

    def __str__(self) -> str:
        flow = "pt2e" if self.is_exported else self.flow
        return f"{flow}/{str(self.activation).removeprefix('torch.')}/{self.scheme}"


def activation_dtypes_of(claims: Iterable[Claim]) -> tuple[torch.dtype, ...]:
    """List the dtypes of activations with which weights are claimed to be quantized statically, in their order."""
    static = (claim.dtypes for claim in claims if claim.kind is Kind.STATIC)
    weighted = (dtypes.input_dtype for dtypes in static if is_quantized_dtype(dtypes.weight_dtype))
    return tuple(dict.fromkeys(dtype for dtype in weighted if dtype is not None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """What a profile runs: models of any size or small ones, flows, how many of the weight schemes."""

    takes_all: bool
    flows: tuple[Flow, ...]
    schemes: int


EXTENTS = {
    "quick": Extent(takes_all=False, flows=("ptq",), schemes=1),
    "full": Extent(takes_all=True, flows=("ptq", "qat"), schemes=1),
    "stress": Extent(takes_all=True, flows=("ptq", "qat"), schemes=4),
}


def setups_of(claims: Iterable[Claim], capabilities: Capabilities, extent: Extent) -> list[ModelSetup]:
    """List the ways to quantize a whole model, up to an extent."""
    flows = [flow for flow in extent.flows if flow in capabilities.flows]
    ways = itertools.product(flows, activation_dtypes_of(claims), capabilities.weight_schemes[-extent.schemes :])
    return [ModelSetup(flow=flow, activation=activation, scheme=scheme) for flow, activation, scheme in ways]


def make_mapping(claims: Iterable[Claim], setup: ModelSetup, model: nn.Module) -> QConfigMapping:
    """Return a mapping with a key for the first op of each claimed pattern: the QConfig of the claim that fits best.

    Module classes that the model does not have are left out.

    Static with the setup's dtype of activations, else dynamic, else weight-only; with its weight scheme where that is
    claimed (transposed convolutions per tensor, as is usual). Everything else is left in float. An op without a weight
    also gets a weight constructor: it decides for a pattern that it ends (QCM-06).
    """
    present = {type(module) for module in model.modules()}
    chosen: dict[Leaf, tuple[_Rank, Claim]] = {}
    for claim in claims:
        rank = _rank(claim, setup)
        root = next(leaf for leaf in claim.ops if not is_match_all(leaf))
        is_absent = isinstance(root, type) and root not in present
        is_better = rank is not None and not is_absent and (root not in chosen or rank < chosen[root][0])
        if rank is not None and is_better and format_misfit(claim) is None:
            chosen[root] = rank, claim
    best = sorted(chosen.values(), key=lambda ranked: ranked[0])
    weight = next((_qconfig_of(claim, setup).weight for _, claim in best if claim.scheme == setup.scheme), None)
    mapping = QConfigMapping()
    for root, (_, claim) in chosen.items():
        qconfig = _qconfig_of(claim, setup)
        if weight is not None and claim.scheme == NO_WEIGHT:
            qconfig = qconfig._replace(weight=weight)
        mapping.set_object_type(root, qconfig)
        given = claim.preparation
        if given.qconfigs is not None and claim.kind is Kind.FIXED:  # what stands before it: OBS-14
            mapping.set_global(given.choose_input_qconfig(claim.dtypes, is_qat=setup.flow == "qat"))
    for name, module in model.named_modules():
        if getattr(module, "proj_size", 0):  # no reference module has a projection (CVT-02)
            mapping.set_module_name(name, None)
    return mapping


def _qconfig_of(claim: Claim, setup: ModelSetup) -> QConfig:
    """Return the QConfig of a claim; a static one is trained in QAT even where no class for training is named."""
    is_static = _KINDS[claim.kind] == 0
    return qconfig_for(replace(claim, flow=setup.flow) if is_static else claim)


def _rank(claim: Claim, setup: ModelSetup) -> _Rank | None:
    """Rank how well a claim fits a setup, best first; None: not at all."""
    kind = _KINDS.get(claim.kind)
    if kind is None or (kind == 0 and claim.dtypes.input_dtype != setup.activation):
        return None
    scheme = setup.scheme.replace("channel", "tensor") if claim.weight_axis else setup.scheme
    is_longer = isinstance(claim.entry.normal_pattern, tuple)
    return kind, is_longer, claim.scheme != scheme, claim.flow != setup.flow
