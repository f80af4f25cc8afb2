"""Unclaimed support: dtype configs that a backend runs correctly for a pattern, though its config does not say so.

Where dtypes that other entries of the config claim also work for a pattern without such a claim, the vendor may add it.
Measured, not judged: ``jobs`` gives one job for each pattern, for the full and the stress profile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.fx import GraphModule

from backends.base import Backend, Capabilities, Execution
from conformance.claims.claim import dtype_config_text, enumerate_claims, has_weight
from conformance.claims.effort import Effort
from conformance.claims.qconfigs import Kind, kind_of
from conformance.ops.fused_modules import root_of
from conformance.pipeline.claim_run import run_claim
from conformance.pipeline.job import Job, measuring_job
from conformance.stages.bench import Bench
from conformance.stages.refusal import restrict, restrict_functions, restrict_modules
from refimpl import BackendConfig, BackendPatternConfig, DTypeConfig
from refimpl.patterns import leaves, pattern_name
from reports.schema import Check, Measurement
from reports.verdicts import Verdict

_HOW = {
    Verdict.VERIFIED: "runs correctly",
    Verdict.QUALITY: "runs, not correctly rounded",
    Verdict.FALLBACK: "runs in float",
    Verdict.UNEXERCISED: "not tried",
}
_MOST = 200
"""The number of characters of a message that are shown."""


def jobs(config: BackendConfig, capabilities: Capabilities, profile: str) -> tuple[Job, ...]:
    """Return a job for each pattern that other entries' dtype configs could be tried on."""
    del capabilities  # they hold for what is not claimed as well
    if profile == "quick":
        return ()
    claimed: dict[object, dict[object, DTypeConfig]] = defaultdict(dict)
    for entry in config.configs:
        for dtypes in entry.dtype_configs:
            if kind_of(dtypes) not in (Kind.FIXED, Kind.OTHER):  # fixed qparams belong to their op
                claimed[_family_of(entry)].setdefault(_choice_of(entry, dtypes), dtypes)
    candidates = [(entry, _find_candidates(entry, claimed[_family_of(entry)])) for entry in config.configs]
    return tuple(
        measuring_job("unclaimed", pattern_name(entry.normal_pattern), partial(_measure, entry, dtypes))
        for entry, dtypes in candidates
        if dtypes
    )


def _find_candidates(entry: BackendPatternConfig, claimed: Mapping[object, DTypeConfig]) -> tuple[DTypeConfig, ...]:
    """The dtype configs, one of each choice of dtypes, that an entry does not have, whatever their bounds."""
    known = {_choice_of(entry, dtypes) for dtypes in entry.dtype_configs}
    return tuple(dtypes for choice, dtypes in claimed.items() if choice not in known)


def _family_of(entry: BackendPatternConfig) -> tuple[bool, ...]:
    """The kind of an entry's inputs and results: ops of one family can share dtype configs."""
    root = root_of(next(leaves(entry.normal_pattern)))
    kinds: tuple[tuple[type, ...], ...] = ((nn.Embedding, nn.EmbeddingBag), (nn.RNNBase, nn.RNNCellBase))
    return (has_weight(entry), *(isinstance(root, type) and issubclass(root, each) for each in kinds))


def _choice_of(entry: BackendPatternConfig, dtypes: DTypeConfig) -> object:
    """The dtypes that matter for an entry: a weight's for those that have one."""
    return dtypes.input_dtype, has_weight(entry) and dtypes.weight_dtype, dtypes.output_dtype, bool(dtypes.is_dynamic)


def _measure(entry: BackendPatternConfig, dtypes: tuple[DTypeConfig, ...], bench: Bench) -> Iterator[Measurement]:
    """Try each dtype config on the pattern, with one case; yield one measurement."""
    values: dict[str, Any] = {dtype_config_text(each): _try(entry, each, bench) for each in dtypes}
    yield Measurement(topic="unclaimed", subject=pattern_name(entry.normal_pattern), values=values)


def _try(entry: BackendPatternConfig, dtypes: DTypeConfig, bench: Bench) -> str:
    """Take the claim that is not made through the stages, up to its numbers; describe the outcome."""
    config = bench.config
    entries = [*restrict_functions(config, dtypes), *restrict_modules(config, dtypes), restrict(entry, dtypes)]
    config = BackendConfig("unclaimed").set_backend_pattern_configs(entries)
    own = Bench(_Claiming(bench.backend, config), seed=bench.seed, profile="quick")
    own.effort = Effort(cases=1, directed=3, further=3, random=0)
    claims = enumerate_claims(config, own.capabilities)
    claim = next(each for each in claims if each.entry.normal_pattern == entry.normal_pattern)
    checks = (message for message in run_claim(own, claim) if isinstance(message, Check))
    shown = (check for check in checks if check.verdict is not Verdict.UNSHOWN)
    return _describe(next(check for check in shown if check.outcome != "pass" or check.stage == "numerics"))


def _describe(check: Check) -> str:
    """Describe the outcome by the check that ended it: the first that did not pass, or that of its numbers."""
    text = " ".join(check.message.split())[:_MOST]
    if check.verdict is Verdict.REFUTED:
        return f"wrong: {text}" if check.stage == "numerics" and check.rule != "LOW-01" else f"refused: {text}"
    if check.evidence.get("float_ops"):  # the message says itself that these run in float
        return text
    return f"{_HOW[check.verdict]}: {text}" if text else _HOW[check.verdict]


class _Claiming(Backend):
    """A backend under another config than its own."""

    def __init__(self, backend: Backend, config: BackendConfig) -> None:
        self._backend, self._config = backend, config
        self.name, self.representation, self.engine = backend.name, backend.representation, backend.engine

    def backend_config(self) -> BackendConfig:
        return self._config

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        return self._backend.lower(reference_model, example_inputs)

    def execution(self, lowered: Callable[..., Any]) -> Execution | None:
        return self._backend.execution(lowered)

    def capabilities(self) -> Capabilities:
        return self._backend.capabilities()
