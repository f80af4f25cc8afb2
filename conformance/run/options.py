"""The command line of ``pytest --pyargs fx_quant_conformance``: its options, their checks, and the choice of claims."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from heapq import nlargest
from pathlib import Path
from typing import Any

import pytest

from fx_quant_conformance.backends.names import list_names
from fx_quant_conformance.conformance.claims.effort import PROFILES
from fx_quant_conformance.conformance.machine.isa import LEVELS
from fx_quant_conformance.conformance.machine.seconds import parse_seconds
from fx_quant_conformance.reports.selection import find_matches
from fx_quant_conformance.reports.shard import Shard

CLAIM_TIMEOUTS = {"quick": 60.0, "full": 60.0, "stress": 600.0}
"""Maximal time of one claim in seconds, by profile."""


def parse_positive(text: str) -> int:
    """Return the positive integer of a text. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, found {text!r}")
    return int(text)


def parse_shard(text: str) -> Shard:
    """Return the shard of a text such as ``2/8``. Raises ArgumentTypeError."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    place, of = map(int, match.groups()) if match else (0, 0)
    if not 1 <= place <= of:
        raise argparse.ArgumentTypeError(f"expected K/N with 1 <= K <= N, such as 2/8, found {text!r}")
    return Shard(place=place, of=of)


class StoreBackend(argparse.Action):
    """Stores the name of a backend; the shell completes it by those of the shipped and the installed ones."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store the name."""
        setattr(namespace, self.dest, values)

    @staticmethod
    def completer(**given: Any) -> list[str]:
        """Return the names, as argcomplete asks for them."""
        return list_names()


OPTIONS: dict[str, dict[str, Any]] = {
    "--backend": {
        "action": StoreBackend,
        "metavar": "NAME",
        "help": "the backend to certify: a shipped one, a name from the entry-point group "
        "fx_quant_conformance.backends, module:attribute such as my_package.my_module:MyBackend, vectors:DIR for the "
        "outputs of a device, or command:FILE.toml for a command that runs one (required)",
    },
    "--outputs": {
        "metavar": "OUT",
        "help": "with --backend=vectors:DIR: the folder that a device has filled (docs/vectors.md)",
    },
    "--profile": {
        "choices": tuple(PROFILES),
        "default": "full",
        "help": "quick: nine cases per op, divided among its claims (at least one each), directed inputs only; "
        "full: every argument of an op varied, alone and in pairs, whole models, measurements; "
        "stress: many random inputs per case, and graphs drawn from the claimed patterns (default: full)",
    },
    "--max-examples": {
        "type": parse_positive,
        "metavar": "N",
        "help": "N random inputs per case in addition to all directed ones, and N graphs per fuzz job",
    },
    "--claim": {
        "action": "append",
        "default": [],
        "metavar": "ID",
        "help": "run only this claim, model (model/...) or measurement (fact/...): an exact ID, or else a glob, "
        "in which brackets may stand for themselves; repeatable",
    },
    "--model": {
        "action": "append",
        "default": [],
        "metavar": "SPEC",
        "help": "try a model of your own as well: my_package.my_module:make, a name from the entry-point group "
        "fx_quant_conformance.models, or a model of a set with random weights, as torchvision:resnet18 or the glob "
        "'timm:*lite*' (docs/models.md); repeatable",
    },
    "--list-claims": {
        "action": "store_true",
        "help": "print the IDs of the claims, one per line, and exit; with --claim='model/*' or --claim='fact/*' those "
        "of the models or measurements",
    },
    "--claim-timeout": {
        "type": parse_seconds,
        "metavar": "SECONDS",
        "help": "time after which a claim, model or measurement is killed (default: 60; 600 with --profile=stress); "
        "a --model has five times as long",
    },
    "--seed": {
        "type": int,
        "default": 0,
        "metavar": "N",
        "help": "seed for weights and inputs; the same seed gives the same results (default: 0)",
    },
    "--waivers": {
        "metavar": "FILE",
        "help": "a TOML file of waivers to use in place of the backend's own",
    },
    "--no-waivers": {
        "action": "store_true",
        "help": "use no waivers: every deviation counts",
    },
    "--without-execution-evidence": {
        "action": "store_true",
        "help": "let UNSHOWN pass: right numbers of which nothing shows that integers computed them, as the backend's "
        "execution() returns None; the report and a certificate say so",
    },
    "--isa": {
        "choices": tuple(LEVELS),
        "metavar": "LEVEL",
        "help": "run the native engines' kernels as on a CPU with this level of instruction sets: "
        f"{', '.join(LEVELS)} (default: the CPU's own)",
    },
    "--shard": {
        "type": parse_shard,
        "metavar": "K/N",
        "help": "run the K-th of N parts of the selection; fx-quant-conformance report merge joins the results",
    },
    "--resume": {
        "metavar": "FILE",
        "help": "results.jsonl of an earlier run of the same kind, such as one that was stopped: what it has judged is "
        "taken from it, and only the rest is run; waivers may have changed",
    },
    "--failed-of": {
        "metavar": "FILE",
        "help": "results.jsonl of an earlier run: run again what did not pass in it, and take over the rest; where the "
        "backend's sources have changed since, the result is INCOMPLETE: it is for the work on a kernel",
    },
    "--baseline": {
        "metavar": "FILE",
        "help": "results.jsonl of an earlier run: the report shows the differences to it, regressions first",
    },
    "--any-profile": {
        "action": "store_true",
        "help": "take a baseline of another profile as well: it has other cases, so that what differs may be no change",
    },
    "--report-dir": {
        "metavar": "DIR",
        "help": "folder for results.jsonl, report.html, scripts/ and a copy of the waivers "
        "(default: build/conformance/<backend>/ below the current folder)",
    },
}
"""The suite's options, with the arguments of pytest's addoption; docs/options.md is generated from them."""


EXPORTING = ("--backend", "--profile", "--max-examples", "--claim", "--claim-timeout", "--seed", "--shard")
"""The options that ``export`` takes too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the command line."""

    backend: str
    report_dir: Path
    seed: int
    profile: str
    claim_timeout: float
    """In seconds, for one claim or job."""
    claims: tuple[str, ...] = ()
    """IDs or globs of claims and jobs; none: all."""
    models: tuple[str, ...] = ()
    """What names models that are handed in."""
    max_examples: int | None = None
    list_claims: bool = False
    without_execution_evidence: bool = False
    """Lets UNSHOWN pass."""
    waivers: Path | None = None
    """Replaces the backend's own file."""
    no_waivers: bool = False
    """Ignores ``waivers`` and the backend's own file."""
    isa: str | None = None
    """A name of ``conformance.machine.isa.LEVELS``; None: what the CPU has."""
    outputs: Path | None = None
    """What a device handed in."""
    shard: Shard | None = None
    """Which part of how many is run; None: all."""
    resume: Path | None = None
    """The results of an earlier run, which are taken over."""
    failed_of: Path | None = None
    """The results of an earlier run of which only what passes is taken over."""
    baseline: Path | None = None
    """The results of a run with which the report compares."""
    any_profile: bool = False
    """Whether the report compares with ``baseline`` also if that is of another profile."""

    @property
    def is_complete(self) -> bool:
        """Whether every case of a claim is tried, on all directed inputs."""
        return self.profile != "quick" and self.max_examples is None

    def repro(self, claim_id: str) -> str:
        """Return the command that runs one claim again, as it was run here."""
        words = [
            "pytest",
            "--pyargs",
            "fx_quant_conformance",
            f"--backend={shlex.quote(self.backend)}",
            f"--seed={self.seed}",
        ]
        options = (
            (self.profile != "full", f"--profile={self.profile}"),
            (self.max_examples is not None, f"--max-examples={self.max_examples}"),
            (self.claim_timeout != CLAIM_TIMEOUTS[self.profile], f"--claim-timeout={self.claim_timeout:g}"),
            (self.without_execution_evidence, "--without-execution-evidence"),
            (self.isa is not None, f"--isa={self.isa}"),
            (self.outputs is not None, f"--outputs={shlex.quote(str(self.outputs))}"),
            (self.waivers is not None, f"--waivers={shlex.quote(str(self.waivers))}"),
            (self.no_waivers, "--no-waivers"),
        )
        words += [text for is_set, text in options if is_set]
        words += [f"--model={shlex.quote(spec)}" for spec in self.models]
        return " ".join([*words, "--claim", shlex.quote(claim_id)])


REMOVED = {
    "--allow-quality": "declare Capabilities.tolerance of the ops whose results are up to a step off",
    "--cache": "answers are not kept any more; --resume takes over what an earlier run has judged",
    "--deadline": "stop the run with Ctrl-C or SIGTERM, which end it with its report, and go on with --resume",
}
"""Options of earlier versions, and what to do instead."""


def register(parser: pytest.Parser) -> None:
    """Add the suite's options to pytest's."""
    group = parser.getgroup("conformance")
    for name, settings in OPTIONS.items():
        group.addoption(name, **settings)
    for name in REMOVED:
        group.addoption(name, nargs="?", const="", type=_refuse_removed(name), help=argparse.SUPPRESS)


def _refuse_removed(name: str) -> Callable[[str], str]:
    """Return a type of an option that was removed: it refuses each value, and says what to do instead."""

    def refuse(value: str) -> str:
        raise argparse.ArgumentTypeError(f"is gone: {REMOVED[name]}")

    return refuse


def read_options(config: pytest.Config) -> Options:
    """Read and check the command line. Raises UsageError when no backend is named."""
    option = config.option
    if not option.backend:
        raise pytest.UsageError(
            "the suite needs a backend: pytest --pyargs fx_quant_conformance --backend=NAME "
            "(such as qnnpack, or my_package.my_module:MyBackend)"
        )
    if option.resume and option.failed_of:
        raise pytest.UsageError("--resume and --failed-of: give one; both name the run that is gone on with")
    if option.waivers and option.no_waivers:
        raise pytest.UsageError("--waivers and --no-waivers: give one of the two")
    return Options(
        backend=option.backend,
        report_dir=Path(option.report_dir).absolute() if option.report_dir else default_report_dir(option.backend),
        seed=option.seed,
        profile=option.profile,
        max_examples=option.max_examples,
        claims=tuple(option.claim),
        models=tuple(option.model),
        list_claims=option.list_claims,
        without_execution_evidence=option.without_execution_evidence,
        claim_timeout=option.claim_timeout or CLAIM_TIMEOUTS[option.profile],
        waivers=Path(option.waivers).absolute() if option.waivers else None,
        no_waivers=option.no_waivers,
        isa=option.isa,
        outputs=Path(option.outputs) if option.outputs else None,
        shard=option.shard,
        resume=Path(option.resume).absolute() if option.resume else None,
        failed_of=Path(option.failed_of).absolute() if option.failed_of else None,
        baseline=Path(option.baseline).absolute() if option.baseline else None,
        any_profile=option.any_profile,
    )


def make_options(given: argparse.Namespace) -> Options:
    """Return the options of EXPORTING, as the command line of an export gives them. Raises UsageError."""
    if not given.backend:
        raise pytest.UsageError("export needs a backend: --backend=NAME")
    return Options(
        backend=given.backend,
        report_dir=Path(),
        seed=given.seed,
        profile=given.profile,
        claim_timeout=given.claim_timeout or CLAIM_TIMEOUTS[given.profile],
        claims=tuple(given.claim),
        max_examples=given.max_examples,
        shard=given.shard,
    )


def default_report_dir(backend: str) -> Path:
    """Return the backend's folder below ``build/`` in the current folder; what a path cannot hold becomes ``_``."""
    return Path.cwd() / "build" / "conformance" / (re.sub(r"[^\w.-]+", "_", backend).strip(".") or "_")


def select_ids(ids: Sequence[str], globs: Sequence[str]) -> frozenset[str]:
    """Choose IDs: each text is an exact ID, or else a glob. Raises UsageError for one that matches nothing."""
    chosen = set(ids) if not globs else set()
    for text in globs:
        matches = find_matches(text, ids)
        if not matches:
            near = ", ".join(_find_nearest(text, ids))
            raise pytest.UsageError(
                f"--claim {text!r} matches no claim, model or measurement; nearest: {near}; --list-claims lists them"
            )
        chosen.update(matches)
    return frozenset(chosen)


def _find_nearest(text: str, ids: Sequence[str]) -> list[str]:
    """Return the three IDs that are most like a text: first by the pattern, then by what follows it."""
    parts = [each.strip("*") for each in text.partition("/")[::2]]

    def measure(claim_id: str) -> tuple[float, float]:
        own = claim_id.partition("/")[::2]
        ratios = [SequenceMatcher(None, *pair, autojunk=False).ratio() for pair in zip(parts, own, strict=True)]
        return ratios[0], ratios[1]

    return nlargest(3, ids, key=measure)


@contextmanager
def raise_usage_error_for(kind: type[Exception], prefix: str = "") -> Iterator[None]:
    """Turn errors of this kind into pytest's usage errors."""
    try:
        yield
    except kind as error:
        raise pytest.UsageError(f"{prefix}{error}") from error
