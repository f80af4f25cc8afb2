"""Asking a backend for its Quantizer, and for what that annotates."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from torch import nn
from torch.fx import GraphModule

from fx_quant_conformance.backends.base import Backend, QuantizerRequest
from fx_quant_conformance.backends.names import format_error
from fx_quant_conformance.conformance.pt2e.probe import Probe, Prober
from fx_quant_conformance.conformance.pt2e.programs import make_program
from fx_quant_conformance.conformance.pt2e.spelling import describe_places


class QuantizerNotFound(Exception):
    """There is no usable Quantizer, or torchao is missing; the message is one line that says what to do."""


def check_torchao() -> None:
    """Raise QuantizerNotFound, with the command that installs it, if torchao is missing, or is not for this torch."""
    if find_spec("torchao") is None:
        command = "pip install -c constraints.txt 'fx-quant-conformance[pt2e]'"
        raise QuantizerNotFound(f"torchao is not installed, which a Quantizer needs: {command}")
    try:
        import_module("torchao.quantization.pt2e.quantizer")
    except Exception as error:  # whatever it misses in this torch
        found = f"torchao {version('torchao')} cannot be imported with torch {version('torch')}"
        raise QuantizerNotFound(f"{found}, and a Quantizer needs it: {format_error(error)}") from error


def annotate(backend: Backend, given: tuple[QuantizerRequest, dict[str, Probe]]) -> dict[str, Any] | None:
    """Have a backend's Quantizer annotate models, and return what came of it as data (`spelling.read_places`).

    ``given``: what the Quantizer is for, and the models by name. None: the backend has none for that. This runs the
    vendor's code, and raises what ``quantizer`` raises; TypeError if that returns no Quantizer, QuantizerNotFound if
    torchao is missing.
    """
    request, probes = given
    quantizer = _make_quantizer(backend, request)
    if quantizer is None:
        return None
    return describe_places(Prober(quantizer, is_qat=request.is_qat).probe(probes))


def lower_annotated(
    backend: Backend, given: tuple[QuantizerRequest, nn.Module, GraphModule, tuple[Any, ...]]
) -> Callable[..., Any]:
    """Return what ``lower`` makes of a float model's program as the backend's Quantizer has it quantized.

    ``given``: what the Quantizer is for, the float model, its reference model and example inputs. The grids are those
    of the reference model. Raises OtherGridError where they cannot be, and what the vendor's code raises.
    """
    request, model, reference, inputs = given
    quantizer = _make_quantizer(backend, request)
    is_dynamic = backend.capabilities().dynamic_batch
    return backend.lower(make_program(quantizer, model, reference, inputs, dynamic_batch=is_dynamic), inputs)


def _make_quantizer(backend: Backend, request: QuantizerRequest) -> Any:
    check_torchao()
    from torchao.quantization.pt2e.quantizer import Quantizer

    quantizer = backend.quantizer(request)
    if quantizer is not None and not isinstance(quantizer, Quantizer):
        kind = f"{type(quantizer).__module__}.{type(quantizer).__qualname__}"
        text = "return a torchao.quantization.pt2e.quantizer.Quantizer, or None"
        raise TypeError(f"quantizer() returned {kind}; {text}")
    return quantizer
