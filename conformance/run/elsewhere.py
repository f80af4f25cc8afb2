"""Backends that run elsewhere, in words of ``--backend``: ``vectors:DIR`` and ``command:FILE`` (docs/vectors.md)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fx_quant_conformance.backends.base import Representation
from fx_quant_conformance.backends.names import format_error
from fx_quant_conformance.conformance.remote.client import RemoteBackend
from fx_quant_conformance.conformance.remote.description import read_description
from fx_quant_conformance.conformance.remote.worker import describe_backend
from fx_quant_conformance.conformance.run.device import ElsewhereError
from fx_quant_conformance.conformance.run.options import CLAIM_TIMEOUTS, Options, parse_shard
from fx_quant_conformance.conformance.vectors.bundle import JUDGE, Bundle, BundleError, read_bundle
from fx_quant_conformance.conformance.vectors.files import digest_file, digest_folder
from fx_quant_conformance.conformance.vectors.formats import FormatError, choose_form, choose_formats
from fx_quant_conformance.conformance.vectors.replay import ReplayBackend
from fx_quant_conformance.reports.handed_in import BUNDLE, COMMAND, HANDED_IN, VECTORS
from fx_quant_conformance.reports.reading import FileFault

if TYPE_CHECKING:
    from fx_quant_conformance.conformance.vectors.command import CommandSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBundle:
    """The source of all pieces of work: one bundle, and one folder of outputs."""

    bundle: Bundle
    outputs: Path

    def find(self, work: str) -> tuple[Bundle, Path]:
        """Return the bundle and the folder."""
        return self.bundle, self.outputs

    def format_script(self, work: str, case: str, heading: str) -> str:
        """Return none: who has run the device knows how."""
        return ""


def adopt_bundle(options: Options) -> Options:
    """Return the options of a run on ``vectors:DIR``: profile, seed and selection are the bundle's.

    Other options are returned as they are. Raises ElsewhereError for a folder that is no bundle, for outputs that are
    not there or of another bundle, and for a seed or profile on the command line that is not the bundle's.
    """
    if not options.backend.startswith(VECTORS):
        if options.outputs is not None and not options.backend.startswith(COMMAND):
            raise ElsewhereError("--outputs belongs to --backend=vectors:DIR")
        return options
    bundle = _open(options)
    try:
        return _adopt(options, bundle.plan["options"])
    except (KeyError, ValueError, TypeError, argparse.ArgumentTypeError) as error:
        raise ElsewhereError(f"{bundle.folder} is no bundle: its options: {format_error(error)}") from error


def _adopt(options: Options, made: Mapping[str, Any]) -> Options:
    if not isinstance(made["seed"], int) or made["profile"] not in CLAIM_TIMEOUTS:
        raise ValueError(f"seed {made['seed']!r}, profile {made['profile']!r}")
    for name, default in (("profile", "full"), ("seed", 0), ("max_examples", None)):
        given = getattr(options, name)
        if given not in (default, made[name]):
            option = name.replace("_", "-")
            raise ElsewhereError(f"--{option}={given}: the bundle has {option} {made[name]}; leave the option out")
    timeout = options.claim_timeout
    if timeout == CLAIM_TIMEOUTS[options.profile]:
        timeout = CLAIM_TIMEOUTS[made["profile"]]
    own = None if made["shard"] is None else parse_shard(made["shard"])
    return replace(
        options,
        profile=made["profile"],
        seed=made["seed"],
        max_examples=made["max_examples"],
        claim_timeout=timeout,
        claims=options.claims or tuple(made["claim"]),
        shard=options.shard or own,
    )


def _open(options: Options) -> Bundle:
    """Read the bundle of ``vectors:DIR``. Raises ElsewhereError."""
    try:
        return read_bundle(Path(options.backend.removeprefix(VECTORS)).absolute())
    except BundleError as error:
        raise ElsewhereError(str(error)) from error


def open_vectors(options: Options) -> ReplayBackend:
    """Return the backend of a bundle and the outputs that were handed in for it. Raises ElsewhereError."""
    bundle, outputs = _open(options), options.outputs
    if outputs is None:
        raise ElsewhereError(f"--backend={options.backend} needs --outputs=OUT: the folder that the device has filled")
    if bundle.cases and not outputs.is_dir():
        raise ElsewhereError(f"--outputs={outputs}: there is no such folder")
    folders = sorted(path.name for path in outputs.iterdir()) if bundle.cases else []
    if strangers := [name for name in folders if name not in bundle.cases]:
        raise ElsewhereError(
            f"--outputs={outputs}: {strangers[0]} ({len(strangers)} of {len(folders)} names) is no case of the "
            f"bundle {bundle.folder}: these outputs belong to another one"
        )
    try:
        digest, files = digest_folder(outputs)
    except (FileFault, OSError) as error:
        raise ElsewhereError(f"--outputs={outputs}: {error}") from error
    versions = {BUNDLE: f"sha256 {bundle.digest}", HANDED_IN: f"{files} files, sha256 {digest}"}
    try:
        return _make_replay(bundle.plan["description"], versions, OneBundle(bundle=bundle, outputs=outputs), bundle)
    except (KeyError, TypeError, AttributeError) as error:
        raise ElsewhereError(f"{bundle.folder} is no bundle: its description: {format_error(error)}") from error


def _make_replay(data: dict[str, Any], versions: dict[str, str], source: OneBundle, bundle: Bundle) -> ReplayBackend:
    """Return the backend that a bundle's plan describes; its kernels run at no level of this machine."""
    waivers = data["waivers"]
    data = data | {
        "engine": "",
        "unavailable": None,
        "versions": data["versions"] | versions,
        "waivers": None if waivers is None else str(bundle.folder / JUDGE / Path(waivers).name),
    }
    imports = str(bundle.plan["imports"])
    return ReplayBackend(read_description(data), source=source, imports=imports, text=json.dumps(data))


class CommandBackend(RemoteBackend):
    """A backend that a command runs, known by its description. ``settings``: those of its file."""

    runs_elsewhere = True

    def __init__(self, *described: Any, settings: CommandSettings, **more: Any) -> None:
        super().__init__(*described, **more)
        self.settings = settings
        self.imports = settings.config

    def own_arguments(self) -> dict[str, Any]:
        """Return the settings."""
        return {"settings": self.settings}


def open_command(options: Options, text: str | None) -> CommandBackend:
    """Return the backend of ``command:FILE``. ``text``: its description, if another process has asked for it.

    Raises ElsewhereError for a file that cannot be used, StartError and DescriptionError for its config.
    """
    from fx_quant_conformance.conformance.vectors.command import CommandError, read_settings

    try:
        settings = read_settings(Path(options.backend.removeprefix(COMMAND)).absolute())
    except CommandError as error:
        raise ElsewhereError(str(error)) from error
    place = str(settings.file.parent)
    if place not in sys.path:
        sys.path.append(place)
    if text is None:
        data = describe_backend(settings.config, limit=options.claim_timeout, needs_lower=False)
        try:
            form = choose_form(Representation[data["representation"]], choose_formats(settings.formats))
        except FormatError as error:
            raise ElsewhereError(f"{settings.file}: formats: {error}") from error
        if data["unavailable"] is None:
            data["versions"] |= {"command": f"{settings.file.name}, sha256 {digest_file(settings.file)}"}
        data |= {"engine": "", "representation": form.name}
        data["name"] = settings.name or data["name"]
        if settings.waivers is not None:
            data["waivers"] = str(settings.waivers)
        text = json.dumps(data)
    return CommandBackend(read_description(json.loads(text)), settings=settings, text=text)
