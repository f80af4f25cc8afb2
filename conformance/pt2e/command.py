"""``fx-quant-conformance claims-of``: find Quantizers, probe them in a child process, write what they amount to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from fx_quant_conformance.backends.discovery import find_attribute
from fx_quant_conformance.backends.names import BackendNotFound, format_error
from fx_quant_conformance.conformance.machine.child import Answer, Ending, Parent, Recipe
from fx_quant_conformance.conformance.machine.frames import Frame
from fx_quant_conformance.conformance.machine.release import DISTRIBUTION, ROOT, read_suite_version
from fx_quant_conformance.conformance.machine.workplace import Workplace, make_answer
from fx_quant_conformance.conformance.pt2e.asking import QuantizerNotFound, check_torchao
from fx_quant_conformance.conformance.pt2e.derive import ProbeRow, count_claims, derive_config
from fx_quant_conformance.conformance.pt2e.merging import Part, merge_parts
from fx_quant_conformance.conformance.pt2e.probe import RAISED, REFUSED
from fx_quant_conformance.conformance.pt2e.remembered import remember_patterns
from fx_quant_conformance.conformance.pt2e.writing import WIDTH, render_module, render_table
from fx_quant_conformance.reports.numbers import Scalar
from fx_quant_conformance.reports.schema import Measurement

_TOPIC = "claims-of"
_MOST_PRINTED = 2000


class ProbingFailed(Exception):
    """A Quantizer that could not be probed, or claims nothing; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimsOf:
    """What is probed."""

    specs: tuple[str, ...] = ()
    """They name the Quantizers for post-training quantization."""
    qat_specs: tuple[str, ...] = ()
    """They name the Quantizers for QAT."""
    globs: tuple[str, ...] = ("*",)
    """Globs of the names of the patterns that the Quantizers are probed with."""
    config_name: str = ""
    """The name of the config; "": that of the first class, function or instance."""
    width: int = WIDTH
    """The width of the longest line of the module."""

    @property
    def flows(self) -> tuple[tuple[str, bool], ...]:
        """Each spec, and whether it is for QAT."""
        return (*((spec, False) for spec in self.specs), *((spec, True) for spec in self.qat_specs))

    @property
    def name(self) -> str:
        """The name of the config."""
        return self.config_name or _name_of(self.flows[0][0])

    def __str__(self) -> str:
        """Return the specs as the command line has them."""
        return " ".join([*self.specs, *(f"--qat {spec}" for spec in self.qat_specs)])


def _name_of(spec: str) -> str:
    """Return the name of the class, the function or the instance."""
    return spec.rpartition(":")[2].rpartition(".")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenClaims:
    """The text of the module and of the table, and how many patterns are claimed of those that are in the table."""

    module: str
    table: str
    claims: int
    patterns: int


def find_quantizer(spec: str) -> Any:
    """Return the torchao Quantizer that ``module:attribute`` names. Raises QuantizerNotFound.

    A class is called without arguments, and so is a function; an instance is taken as it is.
    """
    check_torchao()
    from torchao.quantization.pt2e.quantizer import Quantizer

    try:
        value = find_attribute(spec, f"Quantizer {spec!r}")
    except BackendNotFound as error:
        raise QuantizerNotFound(str(error)) from None
    if not isinstance(value, Quantizer) and callable(value):
        try:
            value = value()
        except (Exception, SystemExit) as error:
            raise QuantizerNotFound(f"Quantizer {spec!r}: calling it raised {format_error(error)}") from error
    if not isinstance(value, Quantizer):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise QuantizerNotFound(
            f"Quantizer {spec!r} is no torchao.quantization.pt2e.quantizer.Quantizer: found {kind}; name a class that "
            "derives from it, an instance of one, or a function that returns one"
        )
    return value


def write_claims(request: ClaimsOf, *, limit: float) -> WrittenClaims:
    """Probe Quantizers in a child process, for at most ``limit`` seconds.

    Raises QuantizerNotFound, or ProbingFailed if the child ends early or nothing is claimed.
    """
    recipe = Recipe(open=_open, arguments=(request,), is_guarded=True)
    with contextlib.closing(Workplace(recipe, limit=limit, holds="the Quantizer")) as place:
        result = place.run(Frame(head={}))
    if result.ending is Ending.TIMEOUT:
        raise ProbingFailed(f"probing {str(request)!r} took more than {limit:g} s: give a longer --timeout")
    if result.ending is not Ending.DONE:
        raise ProbingFailed(f"probing {str(request)!r}: {result.message}\n{result.text[-_MOST_PRINTED:]}".rstrip())
    [answer] = [message for message in result.messages if isinstance(message, Measurement)]
    values = answer.values
    if "error" in values:
        raise QuantizerNotFound(str(values["error"]))
    written = WrittenClaims(
        module=str(values["module"]),
        table=str(values["table"]),
        claims=int(str(values["claims"])),
        patterns=int(str(values["patterns"])),
    )
    if values["raised"]:
        text = f"the Quantizer {str(request)!r} annotates no pattern"
        raise ProbingFailed(f"{written.table}\n{text}: {values['raised']}")
    if not written.claims:
        raise ProbingFailed(
            f"{written.table}\nthe Quantizer {str(request)!r} annotates none of {written.patterns} patterns: does it "
            "need a configuration? Name a function that returns it configured"
        )
    return written


def _open(parent: Parent, request: ClaimsOf) -> Answer:
    return make_answer(parent, lambda _: _serve(request))


def _serve(request: ClaimsOf) -> Iterator[Measurement]:
    """Do the work in the child: yield one message, with what was found or why nothing was."""
    try:
        quantizers = [find_quantizer(spec) for spec, _ in request.flows]
    except QuantizerNotFound as error:
        yield Measurement(topic=_TOPIC, subject=str(request), values={"error": str(error)})
        return
    parts = list[Part]()
    with remember_patterns():
        for quantizer, (spec, is_qat) in zip(quantizers, request.flows, strict=True):
            config, rows = derive_config(quantizer, request.name, is_qat=is_qat, globs=request.globs)
            parts.append(Part(name=_name_of(spec), is_qat=is_qat, config=config, rows=rows))
    if len(parts) > 1:
        config, rows = merge_parts(request.name, parts)
    module = render_module(config, rows, _format_origin(request, quantizers, parts, rows), width=request.width)
    values: dict[str, Scalar] = {
        "module": module,
        "table": render_table(rows),
        "claims": count_claims(rows),
        "patterns": len(rows),
        "raised": _find_raised(rows),
    }
    yield Measurement(topic=_TOPIC, subject=str(request), values=values)


def _find_raised(rows: tuple[ProbeRow, ...]) -> str:
    """Return what the Quantizers raised of the first pattern, if they did of each that could be exported; else ""."""
    asked = [row.reason for row in rows if row.dtypes or not row.reason.startswith(REFUSED)]
    return asked[0] if asked and all(reason.startswith(RAISED) for reason in asked) else ""


def _format_origin(
    request: ClaimsOf, quantizers: Sequence[Any], parts: Sequence[Part], rows: tuple[ProbeRow, ...]
) -> list[str]:
    kinds = dict.fromkeys(f"{type(each).__module__}.{type(each).__qualname__}" for each in quantizers)
    suite = f"{DISTRIBUTION} {read_suite_version(ROOT)}"
    options = [
        *([f"--name={request.config_name}"] if request.config_name else []),
        *([f"--line-length={request.width}"] if request.width != WIDTH else []),
        *(f"--pattern={glob!r}" for glob in request.globs if glob != "*"),
    ]
    return [
        f"Quantizer: {', '.join(kinds)}",
        f"Command: fx-quant-conformance claims-of {' '.join([*options, str(request)])}",
        f"Versions: torch {version('torch')}, torchao {version('torchao')}, {suite}",
        *(_format_flow(part) for part in parts),
        *([f"Together: {count_claims(rows)} of {len(rows)} patterns."] if len(parts) > 1 else []),
    ]


def _format_flow(part: Part) -> str:
    flow = "prepare_qat_pt2e, in train mode" if part.is_qat else "prepare_pt2e, in eval mode"
    return f"Flow of {part.name}: {flow}; {count_claims(part.rows)} of {len(part.rows)} patterns are annotated."
