"""Unclaimed support: dtype configs that a backend runs correctly for a pattern, though its config does not say so.

Where dtypes that other entries of the config claim also work for a pattern without such a claim, the vendor may add it.
Measured, not judged: ``jobs`` gives one job for each pattern, for the full and the stress profile. Only what is worth
claiming is reported (docs/reports.md, "Unclaimed support"): a choice of dtypes that is not claimed for the pattern,
under whatever bounds; that the op at the root has, if the pattern is more than this op; and with which every case that
is tried is VERIFIED and executes quantized, by the backend's own report.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.fx import GraphModule

from backends.base import Backend, Capabilities, Execution
from conformance.claims.claim import dtype_config_text, enumerate_claims, has_weight
from conformance.claims.effort import Effort
from conformance.claims.qconfigs import Kind, kind_of
from conformance.claims.quick import Share
from conformance.ops.fused_modules import root_of
from conformance.pipeline.claim_run import run_claim
from conformance.pipeline.job import Job, measuring_job
from conformance.stages.bench import Bench
from conformance.stages.lower import lower_by
from conformance.stages.refusal import restrict, restrict_functions, restrict_modules
from refimpl import BackendConfig, BackendPatternConfig, DTypeConfig
from refimpl.patterns import leaves, pattern_name
from reports.schema import Check, Measurement
from reports.verdicts import Verdict

_FIRST = Effort(cases=1, directed=3, further=3, random=0)
_FURTHER = Effort(cases=8, directed=3, further=3, random=0)
"""The case that decides whether more are tried, and these."""


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
    of_ops = {entry.normal_pattern: _choices_of(entry) for entry in config.configs}
    candidates = [(entry, _find_candidates(entry, claimed[_family_of(entry)], of_ops)) for entry in config.configs]
    return tuple(
        measuring_job("unclaimed", pattern_name(entry.normal_pattern), partial(_measure, entry, dtypes))
        for entry, dtypes in candidates
        if dtypes
    )


def _find_candidates(
    entry: BackendPatternConfig, claimed: Mapping[object, DTypeConfig], of_ops: Mapping[Any, frozenset[object]]
) -> tuple[DTypeConfig, ...]:
    """The dtype configs, one of each choice of dtypes, that an entry does not have and the op at its root has.

    An op alone may get any; so may a pattern whose root has no entry of its own.
    """
    root = root_of(next(leaves(entry.normal_pattern)))
    known = _choices_of(entry)
    is_op = entry.normal_pattern == root
    allowed = claimed.keys() if is_op else of_ops.get(root, claimed.keys())
    return tuple(dtypes for choice, dtypes in claimed.items() if choice in allowed and choice not in known)


def _choices_of(entry: BackendPatternConfig) -> frozenset[object]:
    return frozenset(_choice_of(entry, dtypes) for dtypes in entry.dtype_configs)


def _family_of(entry: BackendPatternConfig) -> tuple[bool, ...]:
    """The kind of an entry's inputs and results: ops of one family can share dtype configs."""
    root = root_of(next(leaves(entry.normal_pattern)))
    kinds: tuple[tuple[type, ...], ...] = ((nn.Embedding, nn.EmbeddingBag), (nn.RNNBase, nn.RNNCellBase))
    return (has_weight(entry), *(isinstance(root, type) and issubclass(root, each) for each in kinds))


def _choice_of(entry: BackendPatternConfig, dtypes: DTypeConfig) -> object:
    """The dtypes that matter for an entry: a weight's for those that have one."""
    return dtypes.input_dtype, has_weight(entry) and dtypes.weight_dtype, dtypes.output_dtype, bool(dtypes.is_dynamic)


def _measure(entry: BackendPatternConfig, dtypes: tuple[DTypeConfig, ...], bench: Bench) -> Iterator[Measurement]:
    """Try each dtype config on the pattern; yield a measurement of those that are worth claiming, if any are."""
    tried = {dtype_config_text(each): _try(entry, each, bench) for each in dtypes}
    if worth := {name: text for name, text in tried.items() if text}:
        yield Measurement(topic="unclaimed", subject=pattern_name(entry.normal_pattern), values=dict(worth))


def _try(entry: BackendPatternConfig, dtypes: DTypeConfig, bench: Bench) -> str:
    """Take the claim that is not made through the stages, with one case and then with more; "" if one does not pass."""
    restricted = [*restrict_functions(bench.config, dtypes), *restrict_modules(bench.config, dtypes)]
    config = BackendConfig("unclaimed").set_backend_pattern_configs([*restricted, restrict(entry, dtypes)])
    cases: int | None = None
    for effort in (_FIRST, _FURTHER):
        claiming = _Claiming(bench.backend, config)
        own = Bench(claiming, seed=bench.seed, profile="quick")
        own.effort = effort
        claims = enumerate_claims(config, own.capabilities)
        claim = next(each for each in claims if each.entry.normal_pattern == entry.normal_pattern)
        own.shares = {claim.id: Share()}  # the others of this op are not tried: all cases are this claim's
        checks = [message for message in run_claim(own, claim) if isinstance(message, Check)]
        if any(check.verdict is not Verdict.VERIFIED for check in checks) or not claiming.is_shown:
            return ""
        cases = next(check.cases for check in checks if check.stage == "execution")
    return f"executes quantized and correctly in {cases} cases"


class _Claiming(Backend):
    """A backend under another config than its own. ``is_shown``: its reports so far say what every model executes."""

    def __init__(self, backend: Backend, config: BackendConfig) -> None:
        self._backend, self._config = backend, config
        self.is_shown = True
        self.name, self.representation, self.engine = backend.name, backend.representation.of_models, backend.engine

    def backend_config(self) -> BackendConfig:
        return self._config

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        return lower_by(self._backend, reference_model, example_inputs)

    def execution(self, lowered: Callable[..., Any]) -> Execution | None:
        execution = self._backend.execution(lowered)
        self.is_shown &= execution is not None
        return execution

    def capabilities(self) -> Capabilities:
        return self._backend.capabilities()

    def qconfigs(self) -> Sequence[Any] | None:
        return self._backend.qconfigs()

    def prepare_custom_config(self) -> Any:
        return self._backend.prepare_custom_config()

    def convert_custom_config(self) -> Any:
        return self._backend.convert_custom_config()
