"""The signature beside a certificate: a Sigstore bundle, as GitHub's attestations write it for the vendor's CI.

The signature itself is not checked here, for that needs the signer's public keys: `describe_signature` names the
command that does. Only what the bundle is about is compared.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from reports.results import ResultsError

SIGNATURE = "certificate.sigstore.json"
"""Name of the bundle in a certificate's folder."""


def describe_signature(folder: Path, certificate: Path) -> str:
    """Say in a line whether a certificate is signed, and what checks the signature.

    Raises ResultsError for a bundle that cannot be read, or is about something else.
    """
    bundle = folder / SIGNATURE
    if not bundle.exists():
        return f"unsigned: there is no {SIGNATURE}; who made this certificate is not known"
    kind = _read_statement(bundle, certificate)
    return (
        f"signed, but by whom is not checked here: gh attestation verify {certificate} --bundle {bundle} "
        f"--predicate-type {kind} --repo OWNER/NAME, with the vendor's repository"
    )


def _read_statement(bundle: Path, certificate: Path) -> str:
    """Return the type of the predicate that a bundle signs. Raises ResultsError if it is not about the certificate."""
    try:
        envelope = json.loads(bundle.read_text(encoding="utf-8"))["dsseEnvelope"]
        signed: dict[str, Any] = json.loads(base64.b64decode(envelope["payload"]))
        digests = [each["digest"]["sha256"] for each in signed["subject"]]
        stated = json.loads(certificate.read_text(encoding="utf-8"))
        is_same = all(signed[key] == stated[key] for key in ("predicateType", "predicate"))
    except OSError as error:
        raise ResultsError(f"{bundle}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ResultsError(f"{bundle}: is no Sigstore bundle of an in-toto statement: {error!r}") from error
    if not is_same or hashlib.sha256(certificate.read_bytes()).hexdigest() not in digests:
        raise ResultsError(f"{bundle}: signs another certificate than {certificate.name}")
    return str(signed["predicateType"])
