"""What the installed suite says of a run, as ``python -m conformance describe`` writes it: a certificate is held to it.

The suite fills these classes in, and `reports.against_suite` compares them; each is a record of `reports.codec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from reports.numbers import Scalar
from reports.schema import Header, Waiver


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedClaim:
    """A claim of the backend's config; the fields are those of the claim's row."""

    claim: str
    pattern: str
    dtype_config: str
    dtypes: str
    flow: str
    scheme: str
    repro: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedJob:
    """A model (without a topic) or a measurement of the profile."""

    id: str
    topic: str = ""
    subject: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The run as the suite opens it here, by the options that its header has, with the backend's own waivers."""

    header: Header
    """The header that the run would get."""
    claims: list[DescribedClaim]
    """All claims of the config."""
    jobs: list[DescribedJob]
    """All jobs of the profile."""
    waivers: dict[str, Waiver]
    """The waiver that covers each claim or model of the results file, by ID, on the day of the run."""
    allowed: list[str]
    """The IDs of claims and models of the results file that pass by the run's options: their QUALITY or UNSHOWN."""
    problems: list[str]
    """What fails the run besides its verdicts: waivers that do not fit, verdicts that are not the expected ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDescription:
    """What the installed suite says of a run."""

    kind: ClassVar[str] = "description"
    suite_version: str
    """Version of the suite."""
    suite_commit: str
    """Commit of its checkout or release, as in a header."""
    detection: dict[str, dict[str, Scalar]]
    """Its detection power, as in a header."""
    stages: list[str]
    """Its stages: each claim has a check for each, in this order."""
    random: int
    """The random inputs that the profile gives each case."""
    opened: Opened | None = None
    """The run as it is opened here; None: the backend could not be asked."""
    error: str = ""
    """Why the backend could not be asked."""
