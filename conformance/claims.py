"""Claims: what a BackendConfig says that its backend can do, one by one, under stable and readable IDs (design: claims).

A claim is pattern × dtype config × flow × weight scheme. Enumeration reads the config alone, so that what the suite
cannot exercise is still listed.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from backends.base import Capabilities
from refimpl import BackendConfig, BackendPatternConfig, DTypeConfig, DTypeWithConstraints
from refimpl.patterns import pattern_name

NO_WEIGHT = "no_weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One thing that a backend says it can do.

    ``pattern`` and ``dtype_config`` are names that identify the config's pair; ``entry`` and ``dtypes`` are the
    config's own objects behind them. ``scheme`` is the weight's qscheme, or ``no_weight``.
    """

    id: str
    pattern: str
    dtype_config: str
    flow: str
    scheme: str
    entry: BackendPatternConfig
    dtypes: DTypeConfig

    def __str__(self) -> str:
        return self.id


def constraint_text(constraints: DTypeWithConstraints) -> str:
    """Name a dtype with its bounds: ``qint8[-127..127,s>=2^-12]``; ``*`` where any dtype will do."""
    if constraints.dtype is None:
        return "*"
    low, high = constraints.quant_min_lower_bound, constraints.quant_max_upper_bound
    bounds = [f"{'' if low is None else low}..{'' if high is None else high}"] if (low, high) != (None, None) else []
    for label, value in (
        ("s>=", constraints.scale_min_lower_bound),
        ("s<=", constraints.scale_max_upper_bound),
        ("s=", constraints.scale_exact_match),
        ("z=", constraints.zero_point_exact_match),
    ):
        if value is not None:
            bounds.append(f"{label}{_number(value)}")
    name = str(constraints.dtype).removeprefix("torch.")
    return f"{name}[{','.join(bounds)}]" if bounds else name


def _number(value: float) -> str:
    """Write a bound exactly: a power of two as such, anything else as Python does."""
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 and exponent < 0 else repr(value)


def dtype_config_text(dtypes: DTypeConfig) -> str:
    """Name a dtype config; equal names mean equal configs."""
    mode = "static" if not dtypes.is_dynamic else "dynamic"
    parts = [
        f"in={constraint_text(dtypes.input_dtype_with_constraints)}",
        f"w={constraint_text(dtypes.weight_dtype_with_constraints)}",
        f"b={str(dtypes.bias_dtype).removeprefix('torch.') if dtypes.bias_dtype else '*'}",
        f"out={constraint_text(dtypes.output_dtype_with_constraints)}",
    ]
    return f"{mode}:{','.join(parts)}"


def enumerate_claims(config: BackendConfig, capabilities: Capabilities) -> tuple[Claim, ...]:
    """List every claim of the config, in the config's order.

    Two entries (or dtype configs of one entry) with one name are told apart by ``#2``, ``#3``: no claim is lost.
    """
    seen: Counter[str] = Counter()
    found: list[Claim] = []
    for entry in config.configs:
        pattern = _numbered(pattern_name(entry.normal_pattern), seen)
        dtype_names: Counter[str] = Counter()
        for dtypes in entry.dtype_configs:
            name = _numbered(dtype_config_text(dtypes), dtype_names)
            for scheme in _schemes(entry, dtypes, capabilities):
                claim_id = f"{pattern}/{name}/ptq/{scheme}"
                found.append(
                    Claim(
                        id=claim_id, pattern=pattern, dtype_config=name, flow="ptq", scheme=scheme,
                        entry=entry, dtypes=dtypes,
                    )
                )  # fmt: skip
    return tuple(found)


def config_digest(claims: Iterable[Claim]) -> str:
    """Return the sha256 of everything that the claims say: equal digests mean equal sets of claims."""
    text = "\n".join(sorted(claim.id for claim in claims))
    return hashlib.sha256(text.encode()).hexdigest()


def _numbered(name: str, seen: Counter[str]) -> str:
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}#{seen[name]}"


def _schemes(entry: BackendPatternConfig, dtypes: DTypeConfig, capabilities: Capabilities) -> tuple[str, ...]:
    """The weight schemes under which a pair is claimed: those of the backend, or one for a pattern without weight."""
    from conformance.models import has_weight

    return capabilities.weight_schemes if has_weight(entry) else (NO_WEIGHT,)
