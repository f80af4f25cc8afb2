"""The rows of a results file (schema 1): one frozen class per kind of row.

The annotations *are* the schema: `reports.codec` walks them to check every value, so a field is declared once. Fields
with a default may be absent. Contract: docs/architecture.md, "Results and reports".
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Literal, TypedDict

SCHEMA = 1

Scalar = str | int | float | bool | None
"""What a fact's value, or a decision's, may be."""

NonFinite = Literal["inf", "-inf", "nan"]
"""JSON has no infinity: its spelling stands for it."""

Number = float | NonFinite
"""A float64, or what it is called where it is not finite."""


class Verdict(StrEnum):
    """What the suite makes of a claim, worst first; compared by ``rank``, not as text."""

    CRASHED = "CRASHED"
    """The process died in the backend's code."""
    TIMEOUT = "TIMEOUT"
    """The backend's code did not end in time."""
    REFUTED = "REFUTED"
    """A rule is broken: wrong structure, wrong number, an error where the config claims support."""
    FALLBACK = "FALLBACK"
    """Right numbers, not executed quantized."""
    UNEXERCISED = "UNEXERCISED"
    """The suite could not build or run a case."""
    QUALITY = "QUALITY"
    """Within one step, and not correctly rounded within the derived slack."""
    VERIFIED = "VERIFIED"
    """Every stage holds, and every output is correctly rounded."""

    @property
    def rank(self) -> int:
        """0 for the worst verdict; sorting by it puts the worst first."""
        return VERDICTS.index(self)

    def may_be(self, found: Verdict) -> bool:
        """Whether this may be `found` the next time: what leaves its memory dies, or is only wrong, by chance."""
        return found is self or (self is Verdict.CRASHED and found is Verdict.REFUTED)

    @classmethod
    def worst(cls, verdicts: Iterable[Verdict | str]) -> Verdict:
        """The worst of `verdicts`; of none at all, UNEXERCISED: nothing was shown."""
        return min((cls(v) for v in verdicts), key=lambda v: v.rank, default=cls.UNEXERCISED)


VERDICTS: tuple[Verdict, ...] = tuple(Verdict)
"""All verdicts, worst first."""

GREEN = frozenset({Verdict.QUALITY, Verdict.VERIFIED})
"""The verdicts that let a run pass."""


class Outcome(StrEnum):
    """How a whole run ended."""

    PASS = "PASS"
    """It came to its end, and everything is green."""
    FAIL = "FAIL"
    """It came to its end, and something is not green, or a problem is noted."""
    INCOMPLETE = "INCOMPLETE"
    """It did not come to its end: nothing is shown."""


class Evidence(TypedDict, total=False):
    """What a check saw; further keys are allowed and are shown as they are."""

    case: str
    """The case, or comparison, that shows it."""
    expected: list[Number]
    """The exact results at ``index``, in output steps, before they are rounded."""
    found: list[Number]
    """The integers that the backend gave there."""
    index: list[list[int]]
    """Places in the output tensor."""
    qparams: dict[str, dict[str, object]]
    """By tensor, its scale, zero point and the like."""
    attribution: str
    """What kind of difference each one is, counted."""
    traceback: str
    """Of an error in the backend's code."""
    float_ops: list[str]
    """What ran in float."""
    kernels: list[str]
    """Names of the kernels that ran there, if the backend tells."""
    graph: str
    """A graph, as code or as text."""
    printed: str
    """The end of what the process printed before it died or hung."""
    script: str
    """A program that shows by itself what is wrong."""
    nondeterministic: bool
    """The kernel gave this once and that another time."""


class Waiver(TypedDict):
    """The vendor's words for what is waived."""

    reason: str
    """Why it is."""
    url: str | None
    """Where it is followed up."""
    expires: str | None
    """The last day on which it holds, an ISO date."""
    max_lsb: Number | None
    """The largest error that is covered, in output steps."""


class Measured(TypedDict, total=False):
    """What all comparisons of a check gave, for the plots; nothing of it is judged."""

    distances: list[int]
    """How many output elements are at a distance ``|q − v|`` within each of BINS and beyond the last of them."""
    sqnr_db: Number
    """The ratio of the exact result's power, from its zero point, to that of the distances, in dB."""
    span_lsb: Number
    """In how many steps lies the exact result of the comparison with the largest distance."""


BINS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.501, 0.51, 0.6, 1.0, 2.0, 8.0, 64.0)
"""Upper ends, in LSB, of the bins in which distances are counted; up to 0.5 a result is correctly rounded. (NUM-03)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """First row: what was run, on what, with which settings."""

    kind: ClassVar[str] = "header"
    schema: int
    """1: what reads another version is another version of the suite."""
    suite_version: str
    """Of the package."""
    suite_commit: str
    """Of the checkout, with ``-dirty`` where files differ from it; ``unknown`` outside of one."""
    backend: str
    """Its ``name``."""
    versions: dict[str, str]
    """Of what the backend depends on, as it says."""
    torch: str
    """Its version."""
    python: str
    platform: str
    cpu: str
    cpu_flags: list[str]
    """The instruction sets that matter to quantized kernels."""
    engine: str
    """The ``torch.backends.quantized.engine``, or ""."""
    representation: Literal["QUANTIZED", "DECOMPOSED"]
    """The form of the reference models that it took."""
    seed: int
    """Of weights and inputs: same seed, same results."""
    profile: str
    """``quick``, ``full`` or ``stress``."""
    options: dict[str, object]
    """Those of the command line that decide what was run, and how."""
    config_name: str
    """The BackendConfig's."""
    config_sha256: str
    """Of what it claims."""
    claims: int
    """How many claims are selected."""
    claims_in_config: int
    """How many there are."""
    pairs: int
    """How many (pattern, dtype config) there are in the config."""
    started: str
    """When, in UTC, ISO 8601."""
    isa: str = ""
    """The level of instruction sets that the kernels ran at."""
    isolation: str = ""
    """What a claim has to itself: ``fork`` (a process) or ``none``."""
    waivers: dict[str, str] = field(default_factory=dict)
    """The file of them and its sha256, if there is one."""
    limits: dict[str, dict[str, str]] = field(default_factory=dict)
    """Op → argument → which values the backend declares to take; others were not tried."""
    shard: str = ""
    """Which part this is, such as ``2/8``; "" for a whole run."""
    claims_sha256: str = ""
    """Of the IDs of all claims of the config, sorted, each with a line's end."""
    detection: dict[str, dict[str, Scalar]] = field(default_factory=dict)
    """Class of seeded faults → how many there are, and how many the suite finds in each profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One rule checked at one stage of one claim."""

    kind: ClassVar[str] = "check"
    claim: str
    """The claim's ID."""
    stage: str
    """Such as ``convert`` or ``numerics``."""
    rule: str
    """The ID of the rule that is broken, or that was checked; "" where the stage was not concluded."""
    outcome: Literal["pass", "fail", "error", "skip"]
    verdict: Verdict
    """What it alone would make of the claim."""
    message: str
    """What is wrong, in words."""
    max_lsb: Number | None
    """The largest distance from the exact result, in output steps."""
    slack_lsb: Number | None
    """By how much more than half a step it may be off, by the derived bounds."""
    cases: int | None
    """How many cases or comparisons it is of."""
    seconds: float
    failing: int = 0
    """How many of them do not pass."""
    evidence: Evidence = field(default_factory=Evidence)
    """What it saw."""
    measured: Measured = field(default_factory=Measured)
    """What all comparisons gave, of numerics."""

    @property
    def failed(self) -> bool:
        """Whether the outcome is ``fail`` or ``error``; a stage that is skipped carries the verdict of its cause."""
        return self.outcome in ("fail", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One claim of the backend config, with the verdict over all its checks."""

    kind: ClassVar[str] = "claim"
    claim: str
    """Its ID, stable over runs: pattern, dtype config, flow and scheme."""
    pattern: str
    """The pattern's readable name, such as ``nn.Conv2d+nn.ReLU``."""
    dtype_config: str
    """The dtype config as text, with its constraints."""
    flow: Literal["ptq", "qat"]
    """Post-training, or quantization-aware."""
    scheme: str
    """How the weight is quantized, such as ``per_channel_symmetric``; ``no_weight`` without one."""
    verdict: Verdict
    """The worst of its checks'."""
    waived: bool
    """Whether a waiver covers it."""
    reason: str
    """The message of the check that decides."""
    max_lsb: Number | None
    """The largest of its checks'."""
    repro: str
    """The command that runs this claim alone."""
    seconds: float
    failing: int | None = 0
    """The sum over its checks; None: some of them saw chance, so that the next run may count others."""
    decisions: list[dict[str, Scalar]] = field(default_factory=list)
    """What prepare decided: rows of its decision log."""
    waiver: Waiver | None = None
    """What covers it."""
    graphs: dict[str, str] = field(default_factory=dict)
    """Of one that is not VERIFIED, by name: the pattern's graph as it was and as it became."""
    script: str = ""
    """A program that shows by itself what is wrong, or ""."""

    @property
    def script_path(self) -> str:
        """The file in the report folder that has the claim's script; "" without one."""
        return _script_path(self.claim) if self.script else ""

    @property
    def pair(self) -> tuple[str, str]:
        """The pattern and dtype config, which claims of several flows and schemes share."""
        return self.pattern, self.dtype_config

    @property
    def green(self) -> bool:
        """Whether this claim lets a run pass."""
        return self.waived or self.verdict in GREEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of several patterns, judged end to end as a claim is; it is no claim of the config."""

    kind: ClassVar[str] = "model"
    model: str
    """Its ID, such as ``model/resnet/ptq/…``."""
    verdict: Verdict
    waived: bool
    message: str
    """What is wrong, in words."""
    max_lsb: Number | None
    """The largest distance from the exact result, in output steps."""
    cases: int | None
    """How many inputs it was run on."""
    seconds: float
    evidence: Evidence = field(default_factory=Evidence)
    """What was seen; a ``script`` in it shows by itself what is wrong."""
    waiver: Waiver | None = None
    """What covers it."""

    @property
    def green(self) -> bool:
        """Whether this model lets a run pass."""
        return self.waived or self.verdict in GREEN

    @property
    def script_path(self) -> str:
        """The file in the report folder that has the model's script; "" without one."""
        return _script_path(self.model) if "script" in self.evidence else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something measured, shown and never judged."""

    kind: ClassVar[str] = "fact"
    topic: str
    """``fingerprint``, ``unclaimed``, ``accuracy`` or ``nonfinite``."""
    subject: str
    """Of what: a claim, an op, a model."""
    values: dict[str, Scalar]
    """What was measured, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """Last row: the totals that every reader checks, and the digest of all bytes before it."""

    kind: ClassVar[str] = "footer"
    counts: dict[Verdict, int]
    """How many claims have each verdict that occurs, waived ones included."""
    claims: int
    """How many rows there are of claims."""
    checks: int
    """How many of checks."""
    pairs: int
    """How many (pattern, dtype config) among the claims."""
    outcome: Outcome
    """How the run ended."""
    exit_status: int
    """Of the process."""
    seconds: float
    """From the start to the end; of merged shards, of all together."""
    sha256: str
    """Of all bytes before this row."""
    models: dict[Verdict, int] = field(default_factory=dict)
    """How many models have each verdict that occurs."""
    facts: int = 0
    """How many rows there are of facts."""
    problems: list[str] = field(default_factory=list)
    """What fails the run beside the verdicts: waivers that do not fit, verdicts that are not the expected ones."""
    notes: list[str] = field(default_factory=list)
    """What a reader should know."""
    peak_mib: float | None = None
    """The resident size of the largest process."""


Row = Header | Check | Claim | Model | Fact | Footer


def _script_path(name: str) -> str:
    """A name that every file system takes, and no other claim's script has."""
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"scripts/{re.sub(r'[^A-Za-z0-9_-]+', '_', name)[:80]}-{digest}.py"
