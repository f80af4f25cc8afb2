"""``python -m conformance claims-of``: find a Quantizer, probe it in a child process, and write what it amounts to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from backends.discovery import BackendNotFound, describe_error, find_attribute
from conformance.annotations.asking import QuantizerNotFound, check_torchao
from conformance.claims_of.derive import ProbeRow, count_claims, derive_config
from conformance.claims_of.writing import render_module, render_table
from conformance.machine.isolation import CAN_FORK, Ending, Forked, InProcess
from conformance.machine.release import DISTRIBUTION, read_suite_version
from reports.schema import Measurement, Scalar

_ROOT = Path(__file__).resolve().parents[2]
_TOPIC = "claims-of"
_MOST_PRINTED = 2000


class ProbingFailed(Exception):
    """A Quantizer that could not be probed, or claims nothing; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimsOf:
    """What is probed: the Quantizer that ``spec`` names, for post-training quantization or, ``is_qat``, for QAT.

    ``globs``: of the names of the patterns that it is probed with.
    """

    spec: str
    is_qat: bool = False
    globs: tuple[str, ...] = ("*",)

    @property
    def name(self) -> str:
        """The name of the config: that of the class, the function or the instance."""
        return self.spec.rpartition(":")[2].rpartition(".")[2]


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
            raise QuantizerNotFound(f"Quantizer {spec!r}: calling it raised {describe_error(error)}") from error
    if not isinstance(value, Quantizer):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise QuantizerNotFound(
            f"Quantizer {spec!r} is no torchao.quantization.pt2e.quantizer.Quantizer: found {kind}; name a class that "
            "derives from it, an instance of one, or a function that returns one"
        )
    return value


def write_claims(request: ClaimsOf, *, limit: float) -> WrittenClaims:
    """Probe a Quantizer in a child process, for at most ``limit`` seconds.

    Raises QuantizerNotFound, or ProbingFailed if the child ends early or the Quantizer claims nothing.
    """
    serve: Callable[[ClaimsOf], Iterator[Measurement]] = _serve
    if not CAN_FORK:
        result = InProcess(serve).run(request)
    else:
        with contextlib.closing(Forked(serve, limit=limit, share=1, is_guarded=True)) as isolation:
            result = isolation.run(request)
    if result.ending is Ending.TIMEOUT:
        raise ProbingFailed(
            f"the Quantizer {request.spec!r} was not probed within {limit:g} s: give a longer --timeout"
        )
    if result.ending is not Ending.DONE:
        raise ProbingFailed(f"probing {request.spec!r}: {result.message}\n{result.text[-_MOST_PRINTED:]}".rstrip())
    [answer] = [message for message in result.messages if isinstance(message, Measurement)]
    values = answer.values
    if "error" in values:
        raise QuantizerNotFound(str(values["error"]))
    written = WrittenClaims(
        module=str(values["module"]), table=str(values["table"]), claims=int(str(values["claims"])),
        patterns=int(str(values["patterns"])),
    )  # fmt: skip
    if not written.claims:
        raise ProbingFailed(
            f"{written.table}\nthe Quantizer {request.spec!r} annotates none of {written.patterns} patterns: does it "
            "need a configuration? Name a function that returns it configured"
        )
    return written


def _serve(request: ClaimsOf) -> Iterator[Measurement]:
    """Do the work in the child: yield one message, with what was found or why nothing was."""
    try:
        quantizer = find_quantizer(request.spec)
    except QuantizerNotFound as error:
        yield Measurement(topic=_TOPIC, subject=request.spec, values={"error": str(error)})
        return
    config, rows = derive_config(quantizer, request.name, is_qat=request.is_qat, globs=request.globs)
    module = render_module(config, rows, _describe_origin(request, quantizer, rows))
    values: dict[str, Scalar] = {
        "module": module, "table": render_table(rows), "claims": count_claims(rows),
        "patterns": len(rows),
    }  # fmt: skip
    yield Measurement(topic=_TOPIC, subject=request.spec, values=values)


def _describe_origin(request: ClaimsOf, quantizer: Any, rows: tuple[ProbeRow, ...]) -> list[str]:
    kind = type(quantizer)
    suite = f"{DISTRIBUTION} {read_suite_version(_ROOT)}"
    flow = "prepare_qat_pt2e, in train mode" if request.is_qat else "prepare_pt2e, in eval mode"
    options = [
        *(["--qat"] if request.is_qat else []),
        *(f"--pattern={glob!r}" for glob in request.globs if glob != "*"),
    ]
    return [
        f"Quantizer: {kind.__module__}.{kind.__qualname__}",
        f"Command: python -m conformance claims-of {' '.join([*options, request.spec])}",
        f"Versions: torch {version('torch')}, torchao {version('torchao')}, {suite}",
        f"Flow: {flow}; {count_claims(rows)} of {len(rows)} patterns are annotated.",
    ]
