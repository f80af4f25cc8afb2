"""Fingerprints: how a backend's kernels compute, measured op by op, shown and not judged (NUM-06).

Per op, dtype and weight scheme that the config claims, probes with chosen operands measure the rounding at exact ties,
the arithmetic of the rescale, the accumulator, the integer that padding holds, how the bias is held, where the range
ends and where a relu cuts. Where a probe cannot tell, the value says so and why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.claims.claim import NO_WEIGHT, enumerate_claims
from fx_quant_conformance.conformance.facts.fingerprint import sums_and_products, unweighted, weighted
from fx_quant_conformance.conformance.facts.kernel_models import Rescale, propose
from fx_quant_conformance.conformance.facts.probe_models import Op, Site, Unmeasured
from fx_quant_conformance.conformance.ops.fused_modules import root_of
from fx_quant_conformance.conformance.pipeline.job import Job, measuring_job
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.refimpl import BackendConfig, DTypeConfig
from fx_quant_conformance.refimpl.config.patterns import leaves, pattern_name
from fx_quant_conformance.refimpl.legacy import qint8, quint8
from fx_quant_conformance.reports.numbers import Scalar
from fx_quant_conformance.reports.schema import Measurement

OPS: Mapping[str, Op] = {**weighted.OPS, **sums_and_products.OPS, **unweighted.OPS}
DTYPES = frozenset({quint8, qint8, torch.uint8, torch.int8})
"""Dtypes of activations that the probes have integers for."""


def jobs(config: BackendConfig, capabilities: Capabilities, profile: str) -> tuple[Job, ...]:
    """List one job for each op that the config claims, ``fact/fingerprint/<op>``; none under the profile quick."""
    if profile == "quick":
        return ()
    claimed = [name for name, op in OPS.items() if _find_claimed(op, config)]
    return tuple(measuring_job("fingerprint", name, partial(measure, name)) for name in claimed)


def measure(name: str, bench: Bench) -> Iterator[Measurement]:
    """Measure an op; yield a measurement for each dtype config, and each weight scheme where there is a weight."""
    op = OPS[name]
    for site in list_sites(op, bench):
        dtype = str(site.dtypes.input_dtype).removeprefix("torch.")
        subject = ", ".join([name, dtype, *([site.scheme] if op.has_weight else [])])
        values = dict[str, Scalar](fingerprint(op, site))
        yield Measurement(topic="fingerprint", subject=subject, values=values, claims=list_claims(op, site))


def list_sites(op: Op, bench: Bench) -> list[Site]:
    """List the places to measure an op at: the dtype configs of the first of its patterns that is claimed."""
    schemes = bench.capabilities.weight_schemes if op.has_weight else (NO_WEIGHT,)
    patterns = {entry.normal_pattern for entry in bench.config.configs}
    return [
        Site(bench=bench, pattern=pattern, dtypes=dtypes, scheme=scheme, has_relu=(nn.ReLU, pattern) in patterns)
        for pattern, dtypes in _find_claimed(op, bench.config)
        for scheme in schemes
    ]


def list_claims(op: Op, site: Site) -> list[str]:
    """List the IDs of the static claims on the op, alone or with others after it, of a place's dtype and scheme."""
    roots = {root_of(next(leaves(pattern))) for pattern in op.patterns}
    return [
        claim.id
        for claim in enumerate_claims(site.bench.config, site.bench.capabilities)
        if claim.scheme == site.scheme
        and not claim.dtypes.is_dynamic
        and claim.dtypes.input_dtype == site.dtypes.input_dtype
        and claim.root in roots
    ]


def _find_claimed(op: Op, config: BackendConfig) -> list[tuple[Any, DTypeConfig]]:
    """Find the static dtype configs of integers for the first of an op's patterns that has any; one per dtype."""
    for pattern in op.patterns:
        entries = [entry for entry in config.configs if entry.normal_pattern == pattern]
        by_dtype = {
            dtypes.input_dtype: dtypes
            for entry in entries
            for dtypes in reversed(entry.dtype_configs)
            if not dtypes.is_dynamic and dtypes.input_dtype == dtypes.output_dtype and dtypes.input_dtype in DTYPES
        }
        if by_dtype:
            return [(pattern, dtypes) for dtypes in by_dtype.values()]
    return []


def fingerprint(op: Op, site: Site) -> dict[str, str]:
    """Measure the properties of an op, each a short text; ``not determined: reason`` where a probe cannot tell."""
    try:
        values = {"runs": site.format_execution(op.example(site))}
        rounding = op.rounding(site)
    except Unmeasured as error:
        return {"not determined": str(error)}
    values["rounding"] = rounding.text
    for name, measure_property in op.properties:
        try:
            found = measure_property(site, rounding.rule or torch.round)
        except Unmeasured as error:
            values[name] = f"not determined: {error}"
            continue
        values[name] = str(found)
        if isinstance(found, Rescale) and op.requantizes:
            op_name = pattern_name(site.pattern)
            declared = site.bench.capabilities.requantize_for(op_name)
            values["to declare"] = propose(op_name, rounding, found, declared)
    return values
