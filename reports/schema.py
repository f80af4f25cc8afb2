"""The rows of a results file (schema 1): one frozen class per kind of row.

The annotations *are* the schema: `reports.codec` walks them to check every value, so a field is declared once.
Contract: docs/architecture.md, "Results and reports".
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
NonFinite = Literal["inf", "-inf", "nan"]  # JSON has no infinity: its spelling stands for it
Number = float | NonFinite


class Verdict(StrEnum):
    """What the suite makes of a claim, worst first."""

    CRASHED = "CRASHED"
    TIMEOUT = "TIMEOUT"
    REFUTED = "REFUTED"
    FALLBACK = "FALLBACK"
    UNEXERCISED = "UNEXERCISED"
    QUALITY = "QUALITY"
    VERIFIED = "VERIFIED"

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
GREEN = frozenset({Verdict.QUALITY, Verdict.VERIFIED})


class Outcome(StrEnum):
    """How a whole run ended."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCOMPLETE = "INCOMPLETE"


class Evidence(TypedDict, total=False):
    """What a check saw; further keys are allowed and are shown as they are."""

    case: str
    expected: list[Number]
    found: list[Number]
    index: list[list[int]]
    qparams: dict[str, dict[str, object]]
    attribution: str
    traceback: str
    float_ops: list[str]
    graph: str
    printed: str
    script: str
    nondeterministic: bool


class Waiver(TypedDict):
    """The vendor's words for what is waived; `max_lsb` is the largest error that is covered, `expires` an ISO date."""

    reason: str
    url: str | None
    expires: str | None
    max_lsb: Number | None


class Measured(TypedDict, total=False):
    """What all comparisons of a check gave, for the plots; nothing of it is judged.

    `distances`: how many output elements are at a distance |q - v| within each of BINS and beyond the last of them.
    `sqnr_db`: the ratio of the exact result's power, from its zero point, to that of the distances, in dB.
    `span_lsb`: in how many steps lies the exact result of the comparison with the largest distance.
    """

    distances: list[int]
    sqnr_db: Number
    span_lsb: Number


BINS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.501, 0.51, 0.6, 1.0, 2.0, 8.0, 64.0)
"""Upper ends, in LSB, of the bins in which distances are counted; up to 0.5 a result is correctly rounded. (NUM-03)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """First row: what was run, on what, with which settings.

    `isa` is the instruction-set level of the kernels; `waivers` the file of them and its sha256, if there is one;
    `isolation` what a claim has to itself: "fork" (a process), "none". `limits`: op → argument → which values the
    backend declares to take; others were not tried. `shard`: "2/8", or "" for a whole run. `detection`: class of seeded
    faults → how many there are, and how many the suite finds in each profile. `claims_sha256`: of the IDs of all claims
    of the config, sorted, each with a line's end.
    """

    kind: ClassVar[str] = "header"
    schema: int
    suite_version: str
    suite_commit: str
    backend: str
    versions: dict[str, str]
    torch: str
    python: str
    platform: str
    cpu: str
    cpu_flags: list[str]
    engine: str
    representation: Literal["QUANTIZED", "DECOMPOSED"]
    seed: int
    profile: str
    options: dict[str, object]
    config_name: str
    config_sha256: str
    claims: int
    claims_in_config: int
    pairs: int
    started: str
    isa: str = ""
    isolation: str = ""
    waivers: dict[str, str] = field(default_factory=dict)
    limits: dict[str, dict[str, str]] = field(default_factory=dict)
    shard: str = ""
    claims_sha256: str = ""
    detection: dict[str, dict[str, Scalar]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One rule checked at one stage of one claim; `verdict` is what it alone would make of the claim.

    `cases` is how many cases or comparisons it is of, `failing` how many of them do not pass.
    """

    kind: ClassVar[str] = "check"
    claim: str
    stage: str
    rule: str
    outcome: Literal["pass", "fail", "error", "skip"]
    verdict: Verdict
    message: str
    max_lsb: Number | None
    slack_lsb: Number | None
    cases: int | None
    seconds: float
    failing: int = 0
    evidence: Evidence = field(default_factory=Evidence)
    measured: Measured = field(default_factory=Measured)

    @property
    def failed(self) -> bool:
        """Whether the outcome is ``fail`` or ``error``; a stage that is skipped carries the verdict of its cause."""
        return self.outcome in ("fail", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One claim of the backend config, with the verdict over all its checks.

    `failing` is the sum over its checks; None: some of them saw chance, so that the next run may count others.
    `graphs`: of a claim that is not VERIFIED, the pattern's graph as it was and as it became, by name.
    `script` shows by itself what is wrong; `script_path` is where it stands.
    """

    kind: ClassVar[str] = "claim"
    claim: str
    pattern: str
    dtype_config: str
    flow: Literal["ptq", "qat"]
    scheme: str
    verdict: Verdict
    waived: bool
    reason: str
    max_lsb: Number | None
    repro: str
    seconds: float
    failing: int | None = 0
    decisions: list[dict[str, Scalar]] = field(default_factory=list)
    waiver: Waiver | None = None
    graphs: dict[str, str] = field(default_factory=dict)
    script: str = ""

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
    """A model of several patterns, judged end to end as a claim is; it is no claim of the config.

    Its evidence may have a `script` that shows by itself what is wrong; `script_path` is where it stands.
    """

    kind: ClassVar[str] = "model"
    model: str
    verdict: Verdict
    waived: bool
    message: str
    max_lsb: Number | None
    cases: int | None
    seconds: float
    evidence: Evidence = field(default_factory=Evidence)
    waiver: Waiver | None = None

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
    """Something measured, shown and never judged: the `values` that `subject` has under `topic`."""

    kind: ClassVar[str] = "fact"
    topic: str
    subject: str
    values: dict[str, Scalar]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """Last row: the totals that every reader checks, and the digest of all bytes before it.

    `counts` and `models` are by verdict. `problems` fail the run beside the verdicts (waivers, expected verdicts);
    `notes` are what a reader should know. `peak_mib` is the resident size of the largest process.
    """

    kind: ClassVar[str] = "footer"
    counts: dict[Verdict, int]
    claims: int
    checks: int
    pairs: int
    outcome: Outcome
    exit_status: int
    seconds: float
    sha256: str
    models: dict[Verdict, int] = field(default_factory=dict)
    facts: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    peak_mib: float | None = None


Row = Header | Check | Claim | Model | Fact | Footer


def _script_path(name: str) -> str:
    """A name that every file system takes, and no other claim's script has."""
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"scripts/{re.sub(r'[^A-Za-z0-9_-]+', '_', name)[:80]}-{digest}.py"
