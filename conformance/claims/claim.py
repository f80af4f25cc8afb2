"""Claims: what a BackendConfig says that its backend can do, one by one, under stable and readable IDs.

A claim is pattern × dtype config × flow × weight scheme. Enumeration reads only the config, so that claims which the
suite cannot exercise are listed too.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from fx_quant_conformance.backends.base import Capabilities, Flow
from fx_quant_conformance.conformance.bounds.error_bounds import MOVES
from fx_quant_conformance.conformance.claims.kinds import Kind, kind_of
from fx_quant_conformance.conformance.claims.preparation import OWN_OF_THE_SUITE, Preparation
from fx_quant_conformance.conformance.machine.release import PACKAGE
from fx_quant_conformance.conformance.ops.fused_modules import MEMBERS, QAT_OF, root_of, weight_axis_of
from fx_quant_conformance.conformance.ops.table import WEIGHTED
from fx_quant_conformance.conformance.oracle.table import rule_of
from fx_quant_conformance.refimpl import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    ObservationType,
)
from fx_quant_conformance.refimpl.config.patterns import leaves, pattern_name

NO_WEIGHT = "no_weight"
FLOAT16 = "float16"
FLOAT_QPARAMS = "per_channel_affine_float_qparams"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One thing that a backend says it can do."""

    id: str
    pattern: str
    """``pattern`` and ``dtype_config`` name the config's pair."""
    dtype_config: str
    flow: Flow
    scheme: str
    """The weight's qscheme, ``float16`` or ``no_weight``."""
    index: int
    """The entry's place in the config."""
    entry: BackendPatternConfig
    """``entry`` and ``dtypes`` are the config's own objects."""
    dtypes: DTypeConfig
    plain_dtypes: str = ""
    """``dtype_config`` without constraints."""
    settings: str = ""
    """Spells out what else the entry sets."""
    preparation: Preparation = field(default=OWN_OF_THE_SUITE, compare=False, repr=False)
    """The vendor's, from the bench."""

    def __str__(self) -> str:
        return self.id

    @cached_property
    def kind(self) -> Kind:
        """How the dtype config quantizes."""
        return kind_of(self.dtypes)

    @cached_property
    def ops(self) -> tuple[Any, ...]:
        """The pattern's ops, in forward order."""
        return tuple(leaves(self.entry.normal_pattern))

    @cached_property
    def members(self) -> tuple[Any, ...]:
        """The float modules inside of the pattern's fused and QAT modules."""
        return tuple(member for op in self.ops for member in MEMBERS.get(QAT_OF.get(op, op), ()))

    @cached_property
    def root(self) -> Any:
        """The first op; of a fused or QAT module, the float op at its root."""
        return root_of(self.ops[0])

    @cached_property
    def weight_axis(self) -> int:
        """The axis of a weight's output channels."""
        return weight_axis_of(self.ops)

    @cached_property
    def moves_only(self) -> bool:
        """Whether the pattern shares its observer and only moves or selects values. (NUM-05)"""
        shares = self.entry.observation_type is ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
        return shares and all(map(op_moves, self.ops))

    @cached_property
    def vendor_modules(self) -> tuple[type, ...]:
        """The classes of the pattern's modules that are not torch's own: tracing would go into them."""
        kinds = [op for op in self.ops if isinstance(op, type)]
        return tuple(kind for kind in kinds if not kind.__module__.startswith("torch."))

    @property
    def has_weighted_module(self) -> bool:
        """Whether the root is a module that holds a weight, or a fused one with such a module inside.

        A vendor's own module is one if the entry names it as ``root_module``.
        """
        is_own_root = self.root is self.entry.root_module and self.root in self.vendor_modules
        return isinstance(self.root, type) and (self.root in WEIGHTED or is_own_root)


def op_moves(op: Any) -> bool:
    """Tell whether an op only moves or selects values. (NUM-05)"""
    rule = rule_of(op)
    return rule is not None and rule.arithmetic == MOVES


def _dtype_text(constraints: DTypeWithConstraints) -> str:
    return "*" if constraints.dtype is None else str(constraints.dtype).removeprefix("torch.")


def constraint_text(constraints: DTypeWithConstraints) -> str:
    """Name a dtype with its bounds: ``qint8[-127..127,s>=2^-12]``; ``*`` where any dtype will do."""
    low, high = constraints.quant_min_lower_bound, constraints.quant_max_upper_bound
    bounds = [f"{'' if low is None else low}..{'' if high is None else high}"] if (low, high) != (None, None) else []
    for label, value in (
        ("s>=", constraints.scale_min_lower_bound),
        ("s<=", constraints.scale_max_upper_bound),
        ("s=", constraints.scale_exact_match),
        ("z=", constraints.zero_point_exact_match),
    ):
        if value is not None:
            bounds.append(f"{label}{_format_bound(value)}")
    return _dtype_text(constraints) + (f"[{','.join(bounds)}]" if bounds else "")


def _format_bound(value: float) -> str:
    """Write a bound exactly: a power of two below 1/2 as such, anything else as Python does."""
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 and exponent < 0 else repr(value)


def dtype_config_text(dtypes: DTypeConfig, *, constraints: bool = True) -> str:
    """Name a dtype config; equal names mean equal configs, unless the constraints are left out."""
    mode, spell = "dynamic" if dtypes.is_dynamic else "static", constraint_text if constraints else _dtype_text
    parts = [
        f"in={spell(dtypes.input_dtype_with_constraints)}",
        f"w={spell(dtypes.weight_dtype_with_constraints)}",
        f"b={str(dtypes.bias_dtype).removeprefix('torch.') if dtypes.bias_dtype else '*'}",
        f"out={spell(dtypes.output_dtype_with_constraints)}",
    ]
    return f"{mode}:{','.join(parts)}"


def enumerate_claims(config: BackendConfig, capabilities: Capabilities) -> tuple[Claim, ...]:
    """List every claim of the config, in the config's order, in the flows that the backend has.

    Entries (or dtype configs of one entry) with one name are numbered ``#2``, ``#3``, so that no claim is lost.
    """
    seen: Counter[str] = Counter()
    claims: list[Claim] = []
    qat_modules = {entry.qat_module for entry in config.configs}
    for index, entry in enumerate(config.configs):
        pattern = pattern_name(entry.normal_pattern)
        pattern += _number_repeat(pattern, seen)
        dtype_names: Counter[str] = Counter()
        for dtypes in entry.dtype_configs:
            name = dtype_config_text(dtypes)
            repeat = _number_repeat(name, dtype_names)
            name += repeat
            schemes = _schemes_of(entry, dtypes, capabilities)
            flows = [flow for flow in _flows_of(entry, dtypes, qat_modules) if flow in capabilities.flows]
            for flow, scheme in itertools.product(flows, schemes):
                claim_id = f"{pattern}/{name}/{flow}/{scheme}"
                claims.append(
                    Claim(
                        id=claim_id,
                        pattern=pattern,
                        dtype_config=name,
                        flow=flow,
                        scheme=scheme,
                        index=index,
                        entry=entry,
                        dtypes=dtypes,
                        settings=_format_settings(entry),
                        plain_dtypes=dtype_config_text(dtypes, constraints=False) + repeat,
                    )
                )
    return tuple(claims)


def config_digest(claims: Iterable[Claim]) -> str:
    """Return the sha256 of all IDs and settings of the claims.

    The order of the claims counts: it is the order of preference (PAT-07, DTY-02).
    """
    text = "\n".join(f"{claim.id} {claim.settings}" for claim in claims)
    return hashlib.sha256(text.encode()).hexdigest()


def _format_settings(entry: BackendPatternConfig) -> str:
    """Spell an entry's settings out, the same in every process: callables by their qualified names."""
    by_count = {count: kind.name for count, kind in entry._num_tensor_args_to_observation_type.items()}
    modules = (entry.root_module, entry.qat_module, entry.reference_quantized_module, entry.fused_module)
    getters = (entry.fuser_method, entry._root_node_getter, entry._extra_inputs_getter)
    names = [_qualify(value) for value in (*leaves(entry.normal_pattern), *modules, *getters)]
    settings = (by_count, entry._input_type_to_index)
    return " ".join([entry.observation_type.name, *names, *(str(sorted(setting.items())) for setting in settings)])


def _qualify(value: Any) -> str:
    if isinstance(value, partial):
        bound = [*value.args, *sorted(value.keywords.items())]
        return f"{_qualify(value.func)}({', '.join(map(_qualify, bound))})"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_qualify, value))})"
    name = getattr(value, "__qualname__", None)
    if name is not None:
        package, *rooms = value.__module__.split(".")
        is_own = package == PACKAGE and len(rooms) > 1  # where a function of the suite lies is no setting
        return f"{rooms[0]}.{rooms[-1]}.{name}" if is_own else f"{value.__module__}.{name}"
    return repr(value) if isinstance(value, (str, int, float, bool, type(None))) else type(value).__qualname__


def _number_repeat(name: str, seen: Counter[str]) -> str:
    """Return ``#2`` for the second occurrence of a name, and so on; "" for the first."""
    seen[name] += 1
    return "" if seen[name] == 1 else f"#{seen[name]}"


def _flows_of(entry: BackendPatternConfig, dtypes: DTypeConfig, qat_modules: Collection[Any]) -> tuple[Flow, ...]:
    """Return the flows in which an entry is claimed.

    Entries for QAT modules are QAT-only; one that names a QAT module, or has no weight, has both flows; any other is
    PTQ-only. Half precision is PTQ-only: no fake quantize of it exists.
    """
    if entry.normal_pattern in qat_modules:
        return ("qat",)
    if dtypes.input_dtype is torch.float16:
        return ("ptq",)
    return ("ptq",) if entry.qat_module is None and has_weight(entry) else ("ptq", "qat")


def _schemes_of(entry: BackendPatternConfig, dtypes: DTypeConfig, capabilities: Capabilities) -> tuple[str, ...]:
    """Return how the weight may be quantized: by the dtypes' only scheme, else by those that the backend takes."""
    if not has_weight(entry):
        return (NO_WEIGHT,)
    if dtypes.weight_dtype is torch.float16:
        return (FLOAT16,)
    if dtypes.input_dtype is torch.float32 and dtypes.weight_dtype is not None:
        return (FLOAT_QPARAMS,)  # rule: CVT-11
    return capabilities.weight_schemes


def has_weight(entry: BackendPatternConfig) -> bool:
    """Tell whether an entry's pattern has a weight to quantize, so that the claim depends on the weight scheme."""
    if entry.root_module is not None or entry.qat_module is not None:
        return True
    return any(root_of(leaf) in WEIGHTED for leaf in leaves(entry.normal_pattern))
