"""Why a claim may come out of PT2E otherwise than of FX graph mode; each reason with an experiment that shows it.

A reason with an experiment is taken for a claim's difference only if the experiment shows it on this very claim. What
raises an error has no reason, except where a reason says that the pattern has no form in an exported program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import refimpl
from benchmarks.pt2e_both import Both, convert_both, find_difference
from conformance.claims.build import build_model
from conformance.claims.case import Case
from conformance.claims.claim import FLOAT_QPARAMS, Claim
from conformance.claims.inputs import Batch, draw_calibration_inputs
from conformance.stages.calibration import leaves_of, mapping_for
from refimpl.patterns import leaves


@dataclass(frozen=True, slots=True)
class Trial:
    """A case of a claim, and what both flows are given of it."""

    claim: Claim
    case: Case
    config: refimpl.BackendConfig

    def build(self) -> tuple[nn.Module, Sequence[Batch]]:
        """Return the float model and its calibration inputs, the same ones each time."""
        torch.manual_seed(0)
        return build_model(self.case), draw_calibration_inputs(self.case)

    def convert(self, model: nn.Module, batches: Sequence[Batch], *, is_trained: bool = True) -> Both:
        """Take the model through both flows. Raises what they raise."""
        mapping = mapping_for(self.claim, self.case, self.config)
        is_qat, custom = self.claim.flow == "qat", leaves_of(self.claim)
        return convert_both(model, mapping, self.config, batches, is_qat=is_qat, is_trained=is_trained, custom=custom)


class Reason(NamedTuple):
    """Why claims cannot come out the same.

    ``has_form``: the pattern exists in an exported program; only then the claim is tried. ``is_shown``: tells whether
    an experiment on a claim that differs shows the reason.
    """

    key: str
    text: str
    holds: Callable[[Claim], bool]
    has_form: bool = True
    is_shown: Callable[[Trial, Both], bool] = lambda trial, both: True


# -- which claims ------------------------------------------------------------------------------------------------------


def _names(claim: Claim) -> list[str]:
    return [getattr(leaf, "__name__", str(leaf)) for leaf in leaves(claim.entry.normal_pattern)]


def _is_qat_module(claim: Claim) -> bool:
    return any(".qat." in str(getattr(leaf, "__module__", "")) for leaf in leaves(claim.entry.normal_pattern))


def _is_fused_norm(claim: Claim) -> bool:
    return any("Bn" in name for name in _names(claim))


def _has_layer_and_norm(claim: Claim) -> bool:
    names = _names(claim)
    has_layer = any(name.startswith(("Conv", "Linear")) for name in names)
    return _is_fused_norm(claim) or (has_layer and any("BatchNorm" in name for name in names))


def _is_merged_by_torchao(claim: Claim) -> bool:
    return any(name.startswith("Conv") and name.endswith(("1d", "2d")) for name in _names(claim))


def _has_no_such_method(claim: Claim) -> bool:
    pattern = claim.entry.pattern
    return isinstance(pattern, str) and not hasattr(Tensor, pattern)


# -- experiments -------------------------------------------------------------------------------------------------------


def _is_refused(trial: Trial, both: Both) -> bool:
    """Tell whether the Quantizer says that PT2E has no words for what it left in float."""
    return any(str(row["reason"]).startswith("PT2E: ") for row in both.quantizer.explain().rows())


def _is_same_with(change: Callable[[_BatchNorm], None]) -> Callable[[Trial, Both], bool]:
    """Return an experiment: with other numbers in its batch norms, untrained, the claim comes out the same."""

    def is_same(trial: Trial, _: Both) -> bool:
        model, batches = trial.build()
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        with torch.no_grad():
            for norm in norms:
                change(norm)
        return bool(norms) and find_difference(trial.convert(model, batches, is_trained=False), batches) == ""

    return is_same


def _make_exact(norm: _BatchNorm) -> None:
    """Give a batch norm torchao's eps, a deviation of exactly one, and weights of plus or minus two."""
    assert norm.running_var is not None
    norm.eps = 1e-05
    norm.running_var.fill_(1 - norm.eps)
    assert bool((norm.running_var + norm.eps == 1).all())
    norm.weight.copy_(2 * norm.weight.sign())


def _make_identity(norm: _BatchNorm) -> None:
    """Let a batch norm return what it is given."""
    _make_exact(norm)
    assert norm.running_mean is not None
    norm.weight.fill_(1)
    norm.bias.zero_()
    norm.running_mean.zero_()


# -- the reasons -------------------------------------------------------------------------------------------------------

REASONS = (
    Reason(
        "qat module",
        "A QAT module is no float model: its fake quantizes are part of it, and torch.export does not take them "
        "(data-dependent guards).",
        _is_qat_module,
        has_form=False,
    ),
    Reason(
        "no such method",
        "The entry names a method that tensors do not have, so no model holds it.",
        _has_no_such_method,
        has_form=False,
    ),
    Reason(
        "no op",
        "Export writes no op: nn.Identity does nothing, nor does contiguous() on a contiguous tensor.",
        lambda claim: _names(claim) in (["Identity"], ["contiguous"]),
        has_form=False,
    ),
    Reason(
        "export fails",
        "torch.export fails on the suite's model of unsqueeze_ in place (IndexError: list index out of range).",
        lambda claim: _names(claim) == ["unsqueeze_"],
        has_form=False,
    ),
    Reason(
        "real zero points",
        "quantized_decomposed.quantize_per_channel drops the fraction of a zero point (finding 83), and those of "
        "per_channel_affine_float_qparams are real numbers. The Quantizer leaves the pattern in float, and says so; so "
        "it does with 4-bit rows, which have no plain integer dtype.",
        lambda claim: claim.scheme == FLOAT_QPARAMS,
        is_shown=_is_refused,
    ),
    Reason(
        "batch norm kept",
        "FX keeps the batch norm of a fused module (nni.ConvBn2d) that the float model has already. prepare_pt2e folds "
        "every batch norm after a convolution or linear layer, before it asks the Quantizer. With a batch norm that "
        "returns what it is given, the claim comes out the same.",
        lambda claim: claim.flow == "ptq" and _is_fused_norm(claim),
        is_shown=_is_same_with(_make_identity),
    ),
    Reason(
        "eps in QAT",
        "In QAT torchao trains a convolution of one or two dimensions and its batch norm as ops of its own, whose eps "
        "is always 1e-05 (finding 78), and reads the range of a weight that it folds in another order of float32 "
        "operations. With that eps, and numbers for which the order does not matter, the claim comes out the same.",
        lambda claim: claim.flow == "qat" and _has_layer_and_norm(claim) and _is_merged_by_torchao(claim),
        is_shown=_is_same_with(_make_exact),
    ),
    Reason(
        "batch norm apart in QAT",
        "In QAT torchao leaves a batch norm after Conv3d or a linear layer in float, and quantizes the weight without "
        "it; FX quantizes the folded weight. With a batch norm that returns what it is given, the claim comes out the "
        "same.",
        lambda claim: claim.flow == "qat" and _has_layer_and_norm(claim) and not _is_merged_by_torchao(claim),
        is_shown=_is_same_with(_make_identity),
    ),
)


def find_reason(claim: Claim) -> Reason | None:
    """Return the first reason why a claim may differ."""
    return next((reason for reason in REASONS if reason.holds(claim)), None)
