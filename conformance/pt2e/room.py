"""What this room adds: the stage annotate, jobs of ops that no entry claims, and ``claims-of`` (`rooms`)."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fx_quant_conformance.conformance.commands import REFUSED, USAGE, complain
from fx_quant_conformance.conformance.machine.seconds import parse_seconds
from fx_quant_conformance.conformance.rooms import Room
from fx_quant_conformance.reports.text import show

if TYPE_CHECKING:
    from fx_quant_conformance.backends.base import Backend
    from fx_quant_conformance.conformance.claims.claim import Claim
    from fx_quant_conformance.conformance.machine.fault import Fault
    from fx_quant_conformance.conformance.pipeline.job import Job
    from fx_quant_conformance.conformance.stages.state import ClaimState


def _gives_quantizer(backend: Backend) -> bool:
    from fx_quant_conformance.conformance.remote.executor import executor_of

    return executor_of(backend).gives_quantizer


def _check(run: ClaimState) -> Iterator[Fault]:
    from fx_quant_conformance.conformance.pt2e.stage import check_annotations

    return check_annotations(run)


def _list_jobs(claims: Sequence[Claim]) -> tuple[Job, ...]:
    from fx_quant_conformance.conformance.pt2e.unclaimed_ops import jobs

    return jobs(claims)


def _add_claims_of(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Have a torchao Quantizer annotate a model of each pattern that the suite knows, and write the BackendConfig "
        "that this amounts to as a Python module, to be read and committed (docs/vendor-guide.md): some minutes."
    )
    parser.set_defaults(run=_claims_of)
    spec = "MODULE:QUANTIZER"
    add = parser.add_argument
    add("quantizer", nargs="*", metavar=spec, help="a class, an instance, or what returns one; of several, one config")
    add("--qat", action="append", metavar=spec, help="one for training, by prepare_qat_pt2e; may be repeated")
    add("--name", default="", help="of the config; default: that of the first Quantizer")
    add("--line-length", type=int, default=88, metavar="N", help="of the module (default: 88)")
    add(
        "--pattern",
        action="append",
        metavar="GLOB",
        help="only patterns of such a name, as nn.Conv2d*; may be repeated",
    )
    add("--timeout", type=parse_seconds, default=3600.0, metavar="SECONDS", help="for all (default: 3600)")
    add("-o", dest="output", type=Path, metavar="FILE", help="the module to write; default: claims_of_QUANTIZER.py")


def _claims_of(options: argparse.Namespace) -> int:
    from fx_quant_conformance.conformance.pt2e.asking import QuantizerNotFound  # needs torch
    from fx_quant_conformance.conformance.pt2e.command import ClaimsOf, ProbingFailed, write_claims

    request = ClaimsOf(
        specs=tuple(options.quantizer),
        qat_specs=tuple(options.qat or ()),
        globs=tuple(options.pattern or ["*"]),
        config_name=options.name,
        width=options.line_length,
    )
    if not request.flows:
        return complain("no Quantizer is named: give MODULE:QUANTIZER, or --qat MODULE:QUANTIZER", USAGE)
    output = options.output or Path(f"claims_of_{request.name}.py")
    try:
        written = write_claims(request, limit=options.timeout)
        output.write_text(written.module, encoding="utf-8")
    except (QuantizerNotFound, OSError) as error:
        return complain(error, USAGE)
    except ProbingFailed as error:
        return complain(error, REFUSED)
    print(f"{show(written.table)}\n\n{output}: {written.claims} claims, of {written.patterns} patterns")
    return 0


ROOM = Room(
    applies=_gives_quantizer,
    stage="annotate",
    rule="OBS-15",
    check=_check,
    list_jobs=_list_jobs,
    commands={"claims-of": ("write the BackendConfig that a torchao Quantizer amounts to", _add_claims_of)},
)
