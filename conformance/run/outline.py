"""What a run's own process, which imports no torch, knows of the run: a judge tells it, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeAlias

from fx_quant_conformance.reports.codec import line_of, row_of
from fx_quant_conformance.reports.schema import Header

Place: TypeAlias = Literal["plain", "beside", "model", "model beside"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A claim, or a job, which judges a model or measures something."""

    id: str
    kind: Literal["claim", "model", "measurement"]
    place: Place = "plain"
    """What the judge's process holds beside the suite: nothing, the vendor's code, a user's model, or both."""
    is_adaptive: bool = False
    """Whether what it asks for next depends on the last answer."""
    pattern: str = ""
    """A claim has ``pattern`` to ``scheme``, as in its row."""
    dtype_config: str = ""
    dtypes: str = ""
    flow: Literal["ptq", "qat"] = "ptq"
    scheme: str = ""
    cases: int = 0
    """How many cases a claim has, if that was asked for: the longest have the most."""
    topic: str = ""
    """A measurement has ``topic`` and ``subject``."""
    subject: str = ""

    def __str__(self) -> str:
        return self.id


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A run in outline."""

    header: Header
    """The first row of the results file, without what the run's own process adds."""
    units: tuple[Unit, ...]
    """Those that are selected, jobs first, because the longest are among them."""
    known: tuple[str, ...]
    """The IDs of all units that the backend has in any profile."""
    claims: tuple[str, ...]
    """The IDs of all claims of the config."""
    stages: tuple[str, ...]
    sources: tuple[str, ...] | None
    """The files and folders that the backend's code comes from; None: they cannot be told."""
    left_out: tuple[str, ...]
    """What this torch lacks, and is not tried."""
    waiver_file: str | None
    waivers: str = ""
    """What stands in that file."""
    foreign_code: tuple[str, ...] = ()
    """What else the judge's process holds (`conformance.machine.foreign`)."""

    def to_data(self) -> dict[str, Any]:
        """Return it as data that JSON holds."""
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        return given | {"header": line_of(self.header), "units": [asdict(unit) for unit in self.units]}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Outline:
        """Return the outline that was made data."""
        header = row_of(data["header"])
        assert isinstance(header, Header)
        several = {name: tuple(data[name]) for name in ("known", "claims", "stages", "left_out", "foreign_code")}
        sources = None if data["sources"] is None else tuple(data["sources"])
        units = tuple(Unit(**unit) for unit in data["units"])
        file, text = data["waiver_file"], data["waivers"]
        return cls(header=header, units=units, sources=sources, waiver_file=file, waivers=text, **several)
