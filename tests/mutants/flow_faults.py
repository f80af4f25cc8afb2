"""Faults of the flow itself: refimpl with one of its functions replaced, under the honest reference backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from fx_quant_conformance.refimpl import BackendConfig, DTypeConfig, DTypeWithConstraints, ObservationType
from fx_quant_conformance.refimpl.graph.modules import float_module_of
from tests.mutants.reference_kernels import SmallReference, config_with
from tests.mutation.mutant import Mutant, owner_of

MUTANTS: list[Mutant] = []
CLAIMS = (
    "nn.Linear/*=quint8*/ptq/*",
    "nn.Conv1d/static:in=qint8*",
    "nn.Conv2d+nn.BatchNorm2d/*",
    "nn.Softmax/*/ptq/*",
    "operator.add/*/ptq/*",
    "torch.cat/*/ptq/*",
    "nn.GRUCell/dynamic:in=quint8*",
    "nn.Embedding/*quint8*",
    ".size/*/ptq/*",
    "torch.flatten/*/ptq/*",
    "model/residual/ptq/*",
)
"""What the gate runs of them: some of each kind."""
MEASURED = tuple(claim for claim in CLAIMS if not claim.startswith("nn.Softmax"))
"""Those of which nothing is fixed."""


def patched(
    group: str,
    name: str,
    target: str,
    body: Callable[..., Any],
    *rules: str,
    make: Callable[[], Any] = SmallReference,
    claims: tuple[str, ...] = CLAIMS,
    into: list[Mutant] = MUTANTS,
    **more: Any,
) -> None:
    """Enter a fault: the body gets the honest function, then its arguments. ``more``: of the mutant."""
    owner, attribute = owner_of(target)
    honest = getattr(owner, attribute)

    def value(*arguments: Any, **keywords: Any) -> Any:
        return body(honest, *arguments, **keywords)

    patches = ((target, value),)
    into.append(Mutant(group=group, name=name, make=make, rules=rules, claims=claims, patches=patches, **more))


# -- which QConfigs are taken -----------------------------------------------------------------------------------------


def _lenient(*rules: str) -> Callable[..., Iterator[Any]]:
    """Constraints of these rules are not asked for."""

    def body(honest: Any, *arguments: Any) -> Iterator[Any]:
        return (misfit for misfit in honest(*arguments) if misfit[0] not in rules)

    return body


def _on_the_bound(honest: Any, found: Any, wanted: Any) -> Iterator[Any]:
    """What is exactly on a bound is refused as well."""
    yield from honest(found, wanted)
    if wanted.dtype == found.dtype and found.eps is not None and found.eps == wanted.scale_min_lower_bound:
        yield "DTY-04", "eps (smallest scale)", found.eps, "above its bound"


patched(
    "claims",
    "integers beyond the bounds are taken",
    "fx_quant_conformance.refimpl.prepare.dtype_choice.find_violations",
    _lenient("DTY-03"),
    "DTY-03",
)
patched(
    "claims",
    "scales below the bound are taken",
    "fx_quant_conformance.refimpl.prepare.dtype_choice.find_violations",
    _lenient("DTY-04"),
    "DTY-04",
)
patched(
    "claims",
    "other than the fixed qparams are taken",
    "fx_quant_conformance.refimpl.prepare.dtype_choice.find_violations",
    _lenient("DTY-05"),
    "DTY-05",
)
patched(
    "claims",
    "another dtype is taken",
    "fx_quant_conformance.refimpl.prepare.dtype_choice.find_violations",
    _lenient("DTY-01"),
    "DTY-01",
)
patched(
    "claims",
    "dynamic is taken for static",
    "fx_quant_conformance.refimpl.prepare.dtype_choice._find_misfits",
    _lenient("DTY-07"),
    "DTY-07",
)
patched(
    "claims",
    "what is exactly on a bound is refused",
    "fx_quant_conformance.refimpl.prepare.dtype_choice.find_violations",
    _on_the_bound,
    "DTY-02",
)


def _fine_scales() -> SmallReference:
    """Claims of an op whose scales may be far smaller than float32's epsilon."""
    bound = DTypeWithConstraints(torch.quint8, scale_min_lower_bound=2.0**-30)
    return SmallReference(config_with("nn.Identity", lambda e: e.set_dtype_configs([DTypeConfig(bound, bound)])))


def _no_fine_scales(honest: Any, found: Any, wanted: Any) -> Iterator[Any]:
    yield from honest(found, wanted)
    if found.eps is not None and found.eps < 2.0**-24:
        yield "DTY-04", "eps (smallest scale)", found.eps, "at least 2^-24"


patched(
    "claims",
    "small scales within the bound are refused",
    "fx_quant_conformance.refimpl.prepare.dtype_choice.find_violations",
    _no_fine_scales,
    "DTY-02",
    make=_fine_scales,
    claims=("nn.Identity/*", "torch.flatten/*"),
)

# -- where observers go -----------------------------------------------------------------------------------------------


def _never_shared(honest: Any, self: Any, slot: Any) -> int:
    del honest, self
    group: int = slot.group
    return group


def _all_share(honest: Any, match: Any, floats: Any) -> ObservationType:
    found: ObservationType = honest(match, floats)
    is_different = found is ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT
    return ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT if is_different else found


def _first_input(honest: Any, self: Any, node: Node, match: Any, decision: Any) -> list[Any]:
    """Only the first tensor input is observed."""
    before = {slot.group for slot in self._slots}
    given = list(honest(self, node, match, decision))
    extra = [slot for slot in given[1:] if slot is not None and slot.group not in before]
    for slot in extra:
        self._slots.remove(slot)
        self._on[slot.value].remove(slot)
    return given[:1]


def _dynamic_output(honest: Any, self: Any, match: Any, decision: Any, inputs: Any) -> None:
    make = decision.qconfig.activation
    if self._reader.read(make).is_dynamic:
        self._add(match.last, make, "output", "OBS-05", None)
    else:
        honest(self, match, decision, inputs)


patched(
    "sharing",
    "observers not shared",
    "fx_quant_conformance.refimpl.prepare.placing.Placer._root_of",
    _never_shared,
    "OBS-02",
)
patched(
    "sharing",
    "every output shares its input's observer",
    "fx_quant_conformance.refimpl.prepare.decide._choose_observation_type",
    _all_share,
    "OBS-01",
    "OBS-07",
)
patched(
    "structure",
    "only the first input is observed",
    "fx_quant_conformance.refimpl.prepare.placing.Placer._place_inputs",
    _first_input,
    "OBS-01",
    "OBS-02",
)
patched(
    "dynamic",
    "a dynamic output is observed",
    "fx_quant_conformance.refimpl.prepare.placing.Placer._finish",
    _dynamic_output,
    "OBS-05",
)

# -- fuse and convert -------------------------------------------------------------------------------------------------


def _unfused(honest: Any, model: nn.Module, _config: BackendConfig, **keywords: Any) -> GraphModule:
    found: GraphModule = honest(model, BackendConfig("fuses nothing"), **keywords)
    return found


def _eps_forgotten(honest: Any, model: nn.Module, config: BackendConfig, **keywords: Any) -> GraphModule:
    """The batch norm is folded as if its eps were tiny."""
    norms = [each for each in model.modules() if isinstance(each, nn.BatchNorm2d)]
    kept = [norm.eps for norm in norms]
    for norm in norms:
        norm.eps = 1e-12
    found: GraphModule = honest(model, config, **keywords)
    for norm, eps in zip(norms, kept, strict=True):
        norm.eps = eps
    return found


def _float_root(*, is_dynamic: bool) -> Callable[..., nn.Module]:
    def body(honest: Any, self: Any, name: str, decision: Any) -> nn.Module:
        if bool(decision.dtype_config.is_dynamic) is is_dynamic:
            return float_module_of(self.modules[name], where=name)
        made: nn.Module = honest(self, name, decision)
        return made

    return body


def _not_quantized(honest: Any, self: Any, node: Node, name: str) -> None:
    """The observer of an output is dropped, and nothing is put in its place."""
    if self.slots[name].role == "output":
        self.env[node] = self.env[node.args[0]]
    else:
        honest(self, node, name)


def _half_range(honest: Any, self: Any, value: Node, observer: Any) -> Any:
    if observer.dtype is torch.quint8:
        observer.quant_max = 127
    return honest(self, value, observer)


def _other_zero(honest: Any, self: Any, value: Node, qparams: Any, *rest: Any) -> Any:
    """The output dtype is the other one of 8 bits, its zero point moved."""
    if qparams.dtype is not torch.quint8 or qparams.axis is not None:
        return honest(self, value, qparams, *rest)
    moved = replace(qparams, dtype=torch.qint8, quant_min=-128, quant_max=127, zero_point=qparams.zero_point - 128)
    return honest(self, value, moved, *rest)


def _other_step(factor: float) -> Callable[..., Any]:
    """Convert writes another step than was measured; model and kernels agree on it."""

    def body(honest: Any, self: Any, value: Node, qparams: Any, *rest: Any) -> Any:
        return honest(self, value, replace(qparams, scale=qparams.scale * factor), *rest)

    return body


patched(
    "structure",
    "fuse_fx fuses nothing",
    "fx_quant_conformance.conformance.stages.fuse.trace_and_fuse",
    _unfused,
    "FUS-03",
)
patched(
    "structure",
    "fuse_fx forgets a batch norm's eps",
    "fx_quant_conformance.conformance.stages.fuse.trace_and_fuse",
    _eps_forgotten,
    "FUS-06",
)
_WALK = "fx_quant_conformance.refimpl.convert.walk.ConvertWalk"
patched(
    "structure",
    "convert leaves roots in float",
    f"{_WALK}._make_root",
    _float_root(is_dynamic=False),
    "CVT-02",
    claims=("nn.Conv1d/*", "nn.Linear/static:*", "torch.flatten/*"),
)
patched(
    "dynamic", "convert leaves dynamic roots in float", f"{_WALK}._make_root", _float_root(is_dynamic=True), "CVT-02"
)
patched("structure", "convert quantizes no output", f"{_WALK}._write_observer", _not_quantized, "CVT-06")
patched(
    "structure",
    "convert writes another dtype",
    "fx_quant_conformance.refimpl.convert.emit.Decomposed.write_static",
    _other_zero,
    "CVT-01",
)
patched(
    "structure",
    "convert writes half of each range",
    "fx_quant_conformance.refimpl.convert.emit.Decomposed.write_static",
    _other_step(0.5),
    "CVT-01",
)
patched(
    "structure",
    "convert writes twice each step",
    "fx_quant_conformance.refimpl.convert.emit.Decomposed.write_static",
    _other_step(2.0),
    "CVT-01",
    claims=MEASURED,
)
patched(
    "dynamic",
    "convert writes dynamic inputs in 7 bits",
    "fx_quant_conformance.refimpl.convert.emit.Decomposed.write_dynamic",
    _half_range,
    "CVT-03",
)
