"""Why a claim may come out of PT2E otherwise than of FX graph mode; each reason with an experiment that shows it.

A reason with an experiment is taken for a claim's difference only if the experiment shows it on this very claim. What
raises an error has no reason, except where a reason says that the pattern has no form in an exported program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.pt2e_both import Both, convert_both, find_difference
from fx_quant_conformance import refimpl
from fx_quant_conformance.conformance.claims.build import build_model
from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.claim import FLOAT_QPARAMS, Claim
from fx_quant_conformance.conformance.claims.inputs import Batch, draw_calibration_inputs
from fx_quant_conformance.conformance.stages.calibration import leaves_of, mapping_for
from fx_quant_conformance.refimpl.config.patterns import leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A float model, and what both flows are given with it.

    ``make``: returns the model and its calibration inputs, the same ones each time. ``map_qconfigs``: returns the
    mapping for a model. ``custom``: None: the default.
    """

    make: Callable[[], tuple[nn.Module, Sequence[Batch]]]
    map_qconfigs: Callable[[nn.Module], refimpl.QConfigMapping]
    config: refimpl.BackendConfig
    is_qat: bool
    custom: refimpl.PrepareCustomConfig | None = None

    def convert(
        self, model: nn.Module, batches: Sequence[Batch], *, is_trained: bool = True, left: Collection[Any] = ()
    ) -> Both:
        """Take a model through both flows, with the ops of ``left`` in float. Raises what they raise."""
        mapping = self.map_qconfigs(model)
        for op in left:
            mapping.set_object_type(op, None)
        return convert_both(
            model, mapping, self.config, batches, is_qat=self.is_qat, is_trained=is_trained, custom=self.custom
        )


def trial_of(claim: Claim, case: Case, config: refimpl.BackendConfig) -> Trial:
    """Return the trial of a claim's case."""

    def make() -> tuple[nn.Module, Sequence[Batch]]:
        torch.manual_seed(0)
        return build_model(case), draw_calibration_inputs(case)

    return Trial(
        make=make,
        map_qconfigs=lambda _: mapping_for(claim, case, config),
        config=config,
        is_qat=claim.flow == "qat",
        custom=leaves_of(claim),
    )


def compare(trial: Trial) -> tuple[str, Both]:
    """Take the trial's model through both flows; say how they differ, and return what they gave."""
    model, batches = trial.make()
    both = trial.convert(model, batches)
    return find_difference(both, batches), both


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


def is_same(
    trial: Trial, *changes: Callable[[nn.Module], object], left: Collection[Any] = (), is_trained: bool = False
) -> bool:
    """Tell whether the flows give the same with a model that is changed, and with some ops left in float."""
    model, batches = trial.make()
    with torch.no_grad():
        for change in changes:
            change(model)
    return find_difference(trial.convert(model, batches, is_trained=is_trained, left=left), batches) == ""


def list_refused(trial: Trial, both: Both) -> set[Any]:
    """Return the ops that the Quantizer leaves in float since PT2E has no words for them, as it says."""
    decisions = both.quantizer.explain().plan.decisions
    refused = [decision.entry for decision in decisions if decision.reason.startswith("PT2E: ")]
    return {op for entry in refused if entry is not None for op in leaves(trial.config.configs[entry].normal_pattern)}


def norms_of(model: nn.Module) -> list[_BatchNorm]:
    """List a model's batch norms."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def make_norms_exact(model: nn.Module) -> None:
    """Give batch norms torchao's eps, a deviation of exactly one, and weights of plus or minus two."""
    for norm in norms_of(model):
        assert norm.running_var is not None
        norm.eps = 1e-05
        norm.running_var.fill_(1 - norm.eps)
        assert bool((norm.running_var + norm.eps == 1).all())
        norm.weight.copy_(2 * norm.weight.sign())


def _make_norms_identities(model: nn.Module) -> None:
    """Let batch norms return what they are given."""
    make_norms_exact(model)
    for norm in norms_of(model):
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
        is_shown=lambda trial, both: is_same(trial, left=list_refused(trial, both), is_trained=True),
    ),
    Reason(
        "batch norm kept",
        "FX keeps the batch norm of a fused module (nni.ConvBn2d) that the float model has already. prepare_pt2e folds "
        "every batch norm after a convolution or linear layer, before it asks the Quantizer. With a batch norm that "
        "returns what it is given, the claim comes out the same.",
        lambda claim: claim.flow == "ptq" and _is_fused_norm(claim),
        is_shown=lambda trial, _: is_same(trial, _make_norms_identities),
    ),
    Reason(
        "eps in QAT",
        "In QAT torchao trains a convolution of one or two dimensions and its batch norm as ops of its own, whose eps "
        "is always 1e-05 (finding 78), and reads the range of a weight that it folds in another order of float32 "
        "operations. With that eps, and numbers for which the order does not matter, the claim comes out the same.",
        lambda claim: claim.flow == "qat" and _has_layer_and_norm(claim) and _is_merged_by_torchao(claim),
        is_shown=lambda trial, _: is_same(trial, make_norms_exact),
    ),
    Reason(
        "batch norm apart in QAT",
        "In QAT torchao leaves a batch norm after Conv3d or a linear layer in float, and quantizes the weight without "
        "it; FX quantizes the folded weight. With a batch norm that returns what it is given, the claim comes out the "
        "same.",
        lambda claim: claim.flow == "qat" and _has_layer_and_norm(claim) and not _is_merged_by_torchao(claim),
        is_shown=lambda trial, _: is_same(trial, _make_norms_identities),
    ),
)


def find_reason(claim: Claim) -> Reason | None:
    """Return the first reason why a claim may differ."""
    return next((reason for reason in REASONS if reason.holds(claim)), None)
