"""Bundles for the tests: some claims of the reference backend, run from the files, and judged in this process."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from fx_quant_conformance.conformance.run.device import ElsewhereError
from fx_quant_conformance.conformance.run.elsewhere import adopt_bundle
from fx_quant_conformance.conformance.run.export import export
from fx_quant_conformance.conformance.run.judging import open_workplaces, rows_of
from fx_quant_conformance.conformance.run.options import CLAIM_TIMEOUTS, Options, raise_usage_error_for
from fx_quant_conformance.conformance.run.session import Run, open_session
from fx_quant_conformance.conformance.run.workplaces import Workplaces
from fx_quant_conformance.conformance.vectors.runner import run_bundle
from fx_quant_conformance.reports.schema import Judged
from fx_quant_conformance.reports.verdicts import Verdict

ADD = "torch.add/static:in=quint8,w=*,b=*,out=quint8/ptq/no_weight"
LINEAR = "nn.Linear/static:in=quint8,w=qint8,b=float32,out=quint8/ptq/per_tensor_symmetric"
CLAIMS = (ADD, LINEAR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict on a claim, and its reason."""

    verdict: Verdict
    reason: str


def make_options(
    backend: str, *, claims: tuple[str, ...] = (), outputs: Path | None = None, profile: str = "quick"
) -> Options:
    """Return the options of a run of a profile, or of a run on ``vectors:DIR``, which has its bundle's."""
    profile = "full" if outputs else profile
    return Options(
        backend=backend,
        report_dir=Path(),
        seed=0,
        profile=profile,
        claim_timeout=CLAIM_TIMEOUTS[profile],
        claims=claims,
        outputs=outputs,
    )


def write_bundle(
    folder: Path, backend: str = "reference", claims: tuple[str, ...] = CLAIMS, profile: str = "quick"
) -> None:
    """Export claims to a folder, with the models that a backend in Python takes."""
    export(make_options(backend, claims=claims, profile=profile), folder, ("json", "fx"), None)


def answer_bundle(folder: Path, outputs: Path, backend: str = "reference") -> None:
    """Run a bundle by a backend, from its files."""
    run_bundle(folder / "device", outputs, backend)


def judge_bundle(folder: Path, outputs: Path, *claims: str) -> dict[str, Judgement]:
    """Judge what was handed in; return the verdict on each claim and model, or on some. Raises UsageError."""
    with raise_usage_error_for(ElsewhereError):
        options = adopt_bundle(make_options(f"vectors:{folder}", claims=claims, outputs=outputs))
    run = open_session(options)
    return judge_all(run, open_workplaces(run))


def judge_all(run: Run, places: Workplaces) -> dict[str, Judgement]:
    """Judge all units of a run, and end the processes; return the verdict on each."""
    judged = dict[str, Judgement]()
    with closing(places):
        for name, unit in run.units.items():
            row = rows_of(run, unit, places.run(name))[-1]
            assert isinstance(row, Judged)
            judged[name] = Judgement(verdict=row.verdict, reason=row.reason)
    return judged
