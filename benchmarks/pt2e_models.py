"""The suite's whole models through both flows: FX graph mode, and PT2E with BackendConfigQuantizer.

Each model runs as in profile full: in PTQ and QAT, with each dtype of activations that the config claims.

    python -m benchmarks.pt2e_models                # native and executorch
    python -m benchmarks.pt2e_models x86
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, combinations
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.pt2e_both import Both
from benchmarks.pt2e_flows import CONFIGS, name_backend
from benchmarks.pt2e_reasons import Trial, compare, is_same, list_refused, make_norms_exact, norms_of
from fx_quant_conformance.backends.discovery import find_backend
from fx_quant_conformance.backends.names import format_error
from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.claim import enumerate_claims
from fx_quant_conformance.conformance.claims.inputs import Batch, draw_calibration_inputs
from fx_quant_conformance.conformance.pt2e.remembered import remember_patterns
from fx_quant_conformance.conformance.whole_models import digits
from fx_quant_conformance.conformance.whole_models.architectures import ARCHITECTURES
from fx_quant_conformance.conformance.whole_models.jobs import jobs
from fx_quant_conformance.conformance.whole_models.setups import EXTENTS, make_mapping, setups_of

PROFILE = "full"
IDENTITY = "nn.Identity, for which export writes no op"
NO_WORDS = "weights that PT2E has no words for"
NORMS = "batch norm in QAT"


class Row(NamedTuple):
    """How one model came out. ``difference``: "" the same. ``reason``: "" none was shown."""

    config: str
    model: str
    setup: str
    difference: str
    reason: str


def compare_models(name: str) -> Iterator[Row]:
    """Take each whole model of a config through both flows, in each way that the profile quantizes it."""
    backend = find_backend(name_backend(name))
    config, capabilities = backend.backend_config(), backend.capabilities()
    claims, known = enumerate_claims(config, capabilities), {job.id for job in jobs(config, capabilities, PROFILE)}
    makers = {each.name: partial(_make, each.case()) for each in ARCHITECTURES} | {"digits": _make_digits}
    for model, make in makers.items():
        for setup in setups_of(claims, capabilities, EXTENTS[PROFILE]):
            if f"model/{model}/{setup}" in known:
                mapping = partial(make_mapping, claims, setup)
                trial = Trial(make=make, map_qconfigs=mapping, config=config, is_qat=setup.flow == "qat")
                yield Row(name, model, str(setup), *_compare(trial))


def _make(case: Case) -> tuple[nn.Module, Sequence[Batch]]:
    torch.manual_seed(0)
    return case.build(), draw_calibration_inputs(case)


def _make_digits() -> tuple[nn.Module, Sequence[Batch]]:
    """Return the network for digits, untrained, and its images; random ones without scikit-learn."""
    torch.manual_seed(0)
    images = (digits.load() or [torch.rand(128, 1, 8, 8)])[0][: 2 * digits.BATCH]
    return digits.DigitsNetwork().eval(), [(batch,) for batch in torch.split(images, digits.BATCH)]


def _compare(trial: Trial) -> tuple[str, str]:
    """Say how the flows differ, and the reason that an experiment shows. An error is a difference without one."""
    try:
        difference, both = compare(trial)
        return difference, _find_reason(trial, both) if difference else ""
    except Exception as error:
        return format_error(error), ""


def _find_reason(trial: Trial, both: Both) -> str:
    """Return the fewest reasons without which the flows give the same, joined by commas; "" if they never do."""
    model, refused = trial.make()[0], list_refused(trial, both)
    changes = {
        IDENTITY: _drop_identities if any(isinstance(module, nn.Identity) for module in model.modules()) else None,
        NORMS: make_norms_exact if trial.is_qat and norms_of(model) else None,
    }
    open_reasons = [reason for reason, change in changes.items() if change is not None] + [NO_WORDS] * bool(refused)
    for size in range(1, len(open_reasons) + 1):
        for chosen in combinations(open_reasons, size):
            made = [change for reason, change in changes.items() if change is not None and reason in chosen]
            left = refused if NO_WORDS in chosen else ()
            if is_same(trial, *made, left=left, is_trained=NORMS not in chosen):
                return ", ".join(chosen)
    return ""


class _PassesOn(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


def _drop_identities(model: nn.Module) -> None:
    """Put modules that tracing does not see in the place of a model's nn.Identity."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Identity):
                setattr(module, name, _PassesOn())


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the models; print a row for each that differs, and the counts. Status 1: one is unexplained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", choices=[[], *CONFIGS], metavar="CONFIG")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    with remember_patterns():
        for row in chain.from_iterable(map(compare_models, options.configs or ("native", "executorch"))):
            rows.append(row)
            if row.difference:
                shown = row.reason or f"unexplained: {row.difference[:300]}"
                print(f"{row.config}: {row.model}/{row.setup}: {shown}", flush=True)
    for name in dict.fromkeys(row.config for row in rows):
        of_config = [row for row in rows if row.config == name]
        same = sum(not row.difference for row in of_config)
        explained = sum(bool(row.reason) for row in of_config)
        models = len({row.model for row in of_config})
        print(
            f"{name}: {models} models in {len(of_config)} ways: {same} the same, {explained} with a reason, "
            f"{len(of_config) - same - explained} unexplained"
        )
    return int(any(row.difference and not row.reason for row in rows))


if __name__ == "__main__":
    sys.exit(main())
