"""The rows of a results file (schema 2, docs/reports.md): one frozen class per kind of row.

The annotations *are* the schema: `reports.codec` checks every value by them. Fields with a default may be absent.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypedDict, cast

from fx_quant_conformance.reports.measured import Deployment
from fx_quant_conformance.reports.numbers import Number, Scalar, rank_number
from fx_quant_conformance.reports.shard import Shard
from fx_quant_conformance.reports.verdicts import PASSING, Outcome, Verdict

SCHEMA = 2
OF_VENDOR = "the vendor's "
"""How a text of ``foreign_code`` begins if the backend's code is meant, where none should be."""

ALWAYS: Mapping[str, object] = {"always": True}
"""Metadata of a field that is written even if it holds its default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Place of a check or a comparison; ``str()`` spells it for readers."""

    case: str = ""
    """Name of the case; "" for a whole model."""
    input: str = ""
    """Name of the input, such as ``alternating ends``."""
    output: int | None = None
    """Index of the output; None if the model has only one, or the place is not an output."""
    change: str = ""
    """Change under which the case was run again, such as ``batch``."""
    detail: str = ""
    """How the change was made, such as ``9 rows in parts of (1, 3, 5)``."""

    def __str__(self) -> str:
        output = "" if self.output is None else f"output {self.output}"
        change = f"{self.change}: {self.detail}" if self.detail else self.change
        return ", ".join(filter(None, (self.case, self.input, change, output)))


class Evidence(TypedDict, total=False):
    """Facts that a check rests on; further keys are allowed and shown unchanged."""

    where: Where
    """Case or comparison that shows the fault."""
    shared: list[str]
    """What all failing cases share and no passing one, such as ``groups > 1``; each alone tells them apart."""
    expected: list[Number]
    """Exact results at ``index``, in output steps, before rounding."""
    found: list[Number]
    """Integers that the backend gave there."""
    index: list[list[int]]
    """Places in the output tensor."""
    qparams: dict[str, dict[str, object]]
    """Scale, zero point and the like, by tensor."""
    attribution: str
    """The kinds of the differences, counted."""
    traceback: str
    """Traceback of an error in the backend's code."""
    float_ops: list[str]
    """Ops that ran in float."""
    kernels: list[str]
    """Names of the kernels that ran, if the backend reports them."""
    graph: str
    """A graph, as code or as text."""
    printed: str
    """The last output of the process before it died or hung."""
    nondeterministic: bool
    """Whether the kernel gave different results in different runs."""
    decided: Number
    """Of a model, the share of outputs of which the bound would show a fault, end to end."""
    decided_alone: Number
    """The same of its patterns and float regions alone, on average."""
    decided_within: Number
    """The same of these in context, on the values that the model gives there."""


def evidence(values: Mapping[str, object]) -> Evidence:
    """Return values as evidence; the codec checks the types of the known keys."""
    return cast("Evidence", dict(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiver:
    """The vendor's words for a waived deviation."""

    reason: str
    """Why the deviation may stay."""
    url: str | None
    """Address of the ticket."""
    expires: str | None
    """Last day on which the waiver holds, an ISO date."""
    max_lsb: Number | None
    """Largest error that is covered, in output steps."""
    findings: list[str] = field(default_factory=list, hash=False)
    """Names of the findings that explain it; the header has their texts."""
    where: str = ""
    """The condition on cases that it covers; "": every case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A pattern of a model, run alone on the values that the reference model has there."""

    node: str
    """Name of the pattern's last node."""
    pattern: str
    """Readable name of the pattern."""
    verdict: Verdict
    """Verdict of the pattern alone."""
    sqnr_db: Number | None = None
    """As that of Statistics; None if nothing was compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Statistics of all comparisons of a check, for the plots; they are not judged."""

    distances: list[int] = field(default_factory=list)
    """Number of output elements at a distance ``|q − v|`` within each of BINS, and beyond the last."""
    sqnr_db: Number | None = None
    """Ratio of the exact result's power, from its zero point, to that of the distances, in dB."""
    layers: list[Layer] = field(default_factory=list)
    """The patterns of a model in the order of its graph, if it was judged pattern by pattern."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """First row: the backend, the environment and the settings of the run."""

    kind: ClassVar[str] = "header"
    schema: int
    """Version of this schema."""
    suite_version: str
    """Version of the suite."""
    suite_commit: str
    """Commit of the suite, a checkout or a release, with ``-dirty`` if files differ from it; ``unknown`` elsewhere."""
    backend: str
    """Name of the backend."""
    versions: dict[str, str]
    """Versions of the packages that the backend depends on, as the backend reports them."""
    torch: str
    """Version of torch."""
    python: str
    """Version of Python."""
    platform: str
    """Operating system and machine."""
    cpu: str
    """Model of the processor."""
    cpu_flags: list[str]
    """Instruction sets of the processor that matter to quantized kernels."""
    engine: str
    """The ``torch.backends.quantized.engine``, or ""."""
    representation: Literal["QUANTIZED", "DECOMPOSED", "EXPORTED"]
    """Form of the reference models that the backend takes."""
    seed: int
    """Seed of weights and inputs: the same seed gives the same results."""
    profile: str
    """Profile of the run: ``quick``, ``full`` or ``stress``."""
    options: dict[str, object]
    """Options of the command line that decide what is run, and how."""
    config_name: str
    """Name of the BackendConfig."""
    config_sha256: str
    """Digest of everything that the config claims."""
    claims: int
    """Number of selected claims."""
    claims_in_config: int
    """Number of claims in the config."""
    pairs: int
    """Number of (pattern, dtype config) pairs in the config."""
    started: str
    """Start of the run, in UTC, ISO 8601."""
    isa: str = ""
    """Level of instruction sets that the kernels ran at."""
    waivers: dict[str, str] = field(default_factory=dict)
    """Name of the waiver file and its sha256, if one is used."""
    findings: dict[str, str] = field(default_factory=dict)
    """Texts of the findings that waivers name, by name, as Markdown; the first line is the heading."""
    limits: dict[str, dict[str, str]] = field(default_factory=dict)
    """Supported argument values that the backend declares, by op and argument; other values were not tried."""
    capabilities: dict[str, str] = field(default_factory=dict)
    """What else the backend declares, where that is not the default: it decides what a right result is."""
    registered: dict[str, str] = field(default_factory=dict)
    """What the backend registers, by the pattern: models, ranges, and the roundings that its own op is allowed."""
    shard: Shard | None = None
    """Part of the run that this file holds; None for a whole run."""
    sources_sha256: str = ""
    """Digest of the files that the backend's code, and the suite's, came from; "" if they cannot be told."""
    resumed: int = 0
    """Number of claims and models that an earlier run judged, and whose rows were taken over (``--resume``)."""
    claims_sha256: str = ""
    """Digest of the sorted IDs of all claims of the config, each followed by a newline."""
    detection: dict[str, dict[str, Scalar]] = field(default_factory=dict)
    """Number of seeded faults, and of those that the suite finds in each profile, by class of faults."""
    foreign_code: list[str] = field(default_factory=list)
    """Foreign code in pytest's process when the run began, and in that of an earlier run (``--resume``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The outcome of one stage for one claim."""

    kind: ClassVar[str] = "check"
    claim: str
    """ID of the claim."""
    stage: str
    """Name of the stage, such as ``convert`` or ``numerics``."""
    rule: str
    """ID of the rule that is broken, or that was checked; "" if the stage was not concluded."""
    outcome: Literal["pass", "fail", "error", "skip"]
    """``fail``: a rule is broken; ``error``: the suite itself failed; ``skip``: not reached, or not built."""
    verdict: Verdict
    """Verdict of the claim if this were its only check; a claim gets the worst verdict of its checks."""
    message: str = field(default="", metadata=ALWAYS)
    """What is wrong, in words."""
    max_lsb: Number | None = field(default=None, metadata=ALWAYS)
    """Largest distance from the exact result, in output steps. (NUM-03)"""
    slack_lsb: Number | None = field(default=None, metadata=ALWAYS)
    """Largest derived slack beyond half a step, in output steps. (NUM-04)"""
    allowed: str = ""
    """What a right result may be off by, in output steps, whole: ``0.5 + 0.000305``; of several bounds the widest."""
    cases: int | None = field(default=None, metadata=ALWAYS)
    """Number of cases or comparisons."""
    seconds: float = field(default=0.0, metadata=ALWAYS)
    """Time that the stage took, in seconds."""
    failing: int = 0
    """Number of cases or comparisons that do not pass."""
    evidence: Evidence = field(default_factory=Evidence)
    """Facts that the outcome rests on."""
    failing_cases: dict[str, str] = field(default_factory=dict)
    """Each failing case by its name, with its arguments, shapes and scales as a Python dict; "" where no case fails but
    the claim as a whole."""
    statistics: Statistics | None = None
    """Statistics of all comparisons, for numerics only."""

    @property
    def failed(self) -> bool:
        """Whether the outcome is ``fail`` or ``error``; a stage that is skipped carries the verdict of its cause."""
        return self.outcome in ("fail", "error")

    @property
    def is_nondeterministic(self) -> bool:
        """Whether the kernel gave different results in different runs."""
        return bool(self.evidence.get("nondeterministic"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A row that has the verdict of a claim or model."""

    kind: ClassVar[str]
    verdict: Verdict
    """Verdict: of a claim, the worst of its checks'; of a model, that of the whole model."""
    waived: bool = field(default=False, metadata=ALWAYS)
    """Whether a waiver covers the claim or model."""
    reason: str = field(default="", metadata=ALWAYS)
    """What is wrong, in words: of a claim, the message of the check that decides."""
    max_lsb: Number | None = field(default=None, metadata=ALWAYS)
    """Largest distance from the exact result, in output steps."""
    seconds: float = field(default=0.0, metadata=ALWAYS)
    """Time that the claim's stages or the model took, in seconds."""
    waiver: Waiver | None = None
    """The waiver that covers the claim or model."""
    script: str = ""
    """A program that shows the fault without the suite, or ""."""
    execution: Literal["", "reported", "numbers", "none"] = ""
    """What shows that integers computed it: the backend's report, its numbers, or nothing; "" if it came not so far."""
    sureness: str = ""
    """How sure that is, in words."""
    accepted: bool = False
    """Whether the run lets it pass although it is UNSHOWN (``--without-execution-evidence``)."""
    lowerings: int = 0
    """Number of times that the backend's process was asked to lower a model."""
    runs: int = 0
    """Number of runs of lowered models that the backend's process made."""
    foreign_code: list[str] = field(default_factory=list)
    """Foreign code that the judge's process has imported itself."""

    @property
    def id(self) -> str:
        """ID of the claim or model: the field named after the kind of the row."""
        return str(getattr(self, self.kind))

    @property
    def script_path(self) -> str:
        """Path of the script in the report folder, unique and valid in every file system; "" without a script."""
        digest = hashlib.sha256(self.id.encode(errors="surrogatepass")).hexdigest()[:8]
        return f"scripts/{re.sub(r'[^A-Za-z0-9_-]+', '_', self.id)[:80]}-{digest}.py" if self.script else ""

    @property
    def passes(self) -> bool:
        """Whether this claim or model lets a run pass."""
        return self.waived or self.accepted or self.verdict in PASSING


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimResult(Judged):
    """One claim of the backend config, with the verdict over all its checks."""

    kind: ClassVar[str] = "claim"
    claim: str
    """ID of the claim, stable over runs: pattern, dtype config, flow and scheme."""
    pattern: str
    """Readable name of the pattern, such as ``nn.Conv2d+nn.ReLU``."""
    dtype_config: str
    """The dtype config as text, with its constraints."""
    dtypes: str = ""
    """The dtypes of the dtype config, without their constraints."""
    flow: Literal["ptq", "qat"]
    """Post-training quantization, or quantization-aware training."""
    scheme: str
    """Weight scheme, such as ``per_channel_symmetric``; ``no_weight`` without a weight."""
    repro: str = field(default="", metadata=ALWAYS)
    """Command that runs only this claim."""
    failing: int | None = 0
    """Number of cases and comparisons that do not pass; None: it varies from run to run."""
    op: str = ""
    """The op of the case that the deciding check shows, as Python; "" for a claim that passes, or if unknown."""
    decisions: list[dict[str, Scalar]] = field(default_factory=list)
    """Decision log of prepare, row by row."""
    graphs: dict[str, str] = field(default_factory=dict)
    """Graphs of the pattern before and after, by name; only of a claim that is not VERIFIED."""
    beside_own_code: bool = False
    """The claim is about the vendor's own classes or functions: what judged it had imported the vendor's package."""

    @property
    def pair(self) -> tuple[str, str]:
        """The pattern and dtype config, which claims of several flows and schemes share."""
        return self.pattern, self.dtype_config


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResult(Judged):
    """A model of several patterns, judged end to end as a claim is; it is not a claim of the config."""

    kind: ClassVar[str] = "model"
    model: str
    """ID of the model, such as ``model/resnet/ptq/…``."""
    rule: str = ""
    """ID of the rule that is broken, or that was checked."""
    cases: int | None = field(default=None, metadata=ALWAYS)
    """Number of inputs that the model was run on."""
    evidence: Evidence = field(default_factory=Evidence)
    """Facts that the verdict rests on."""
    statistics: Statistics | None = None
    """Statistics of the outputs end to end, and of the model's patterns."""
    float_db: list[Number] = field(default_factory=list)
    """Ratio of each output of the float model to the reference model's error, in dB: the backend has no part in it."""
    deployment: Deployment | None = None
    """What else was measured of a model that was handed in."""

    @property
    def worst_db(self) -> Number | None:
        """The smallest of ``float_db``; None without any."""
        return min(self.float_db, key=rank_number, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Something measured, shown and never judged."""

    kind: ClassVar[str] = "measurement"
    topic: str
    """Topic: ``fingerprint``, ``accuracy`` or ``nonfinite``."""
    subject: str
    """The claim, op or model that was measured."""
    values: dict[str, Scalar]
    """Measured values, by name."""
    claims: list[str] = field(default_factory=list)
    """IDs of the claims whose kernels were measured, beside which the report shows the values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """Last row: the totals that every reader checks, and the digest of all bytes before it."""

    kind: ClassVar[str] = "footer"
    counts: dict[Verdict, int]
    """Number of claims with each verdict that occurs, waived ones included."""
    claims: int
    """Number of claim rows."""
    checks: int
    """Number of check rows."""
    pairs: int
    """Number of (pattern, dtype config) pairs among the claims."""
    outcome: Outcome
    """Outcome of the run."""
    exit_status: int
    """Exit status of the process."""
    seconds: float
    """Duration of the run, in seconds; of merged shards, the sum of theirs."""
    sha256: str
    """Digest of all bytes before this row."""
    models: dict[Verdict, int] = field(default_factory=dict)
    """Number of models with each verdict that occurs."""
    measurements: int = 0
    """Number of measurement rows."""
    problems: list[str] = field(default_factory=list)
    """Reasons other than verdicts why the run fails: waivers that do not fit, verdicts that are not as expected."""
    notes: list[str] = field(default_factory=list)
    """Notes for the reader."""
    peak_mib: float | None = None
    """Resident size of the largest process, in MiB."""
    foreign_code: list[str] = field(default_factory=list)
    """Foreign code in pytest's processes when the run ended, beyond what the header names."""


Row = Header | Check | ClaimResult | ModelResult | Measurement | Footer
