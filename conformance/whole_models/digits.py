"""Digits: a small network trained on real data, scikit-learn's digits; its accuracy is measured, its numbers judged.

1,797 images of 8 × 8 (E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, 1998). scikit-learn is
optional; without it there is a measurement that says so.
"""

from __future__ import annotations

import copy
import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.machine.fault import FaultFound
from fx_quant_conformance.conformance.machine.messages import Begin
from fx_quant_conformance.conformance.oracle.grids import output_step, place_on_grids
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.lower import Declined, lower, run_lowered
from fx_quant_conformance.conformance.whole_models.judging import (
    JudgedModel,
    judge_model,
    make_failed_check,
    read_unclaimed,
)
from fx_quant_conformance.conformance.whole_models.setups import ModelSetup
from fx_quant_conformance.conformance.whole_models.training import descend
from fx_quant_conformance.conformance.whole_models.units import ModelUnit
from fx_quant_conformance.reports.schema import Check, Measurement, ModelResult, Where

NEEDS = (nn.Conv2d, nn.Linear)
MISSING = "scikit-learn is not installed: pip install 'fx-quant-conformance[digits]'"
EVERY = 5  # every fifth image is for the test
EPOCHS, RATE = 6, 0.4
QAT_EPOCHS, QAT_RATE = 1, 0.1
BATCH, CALIBRATING_BATCHES = 64, 4


class DigitsNetwork(nn.Module):
    """Two convolutions with batch norm and relu, pooling, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.pool = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.MaxPool2d(2)
        self.conv2, self.bn2, self.relu = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
        self.average, self.classify = nn.AdaptiveAvgPool2d(2), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Any:
        """Take images float32 (N, 1, 8, 8); give the scores of the ten digits, (N, 10)."""
        x = self.pool(self.relu(self.bn1(self.conv1(x))))
        return self.classify(torch.flatten(self.average(self.relu(self.bn2(self.conv2(x)))), 1))


def run(claims: tuple[Claim, ...], setup: ModelSetup, bench: Bench) -> Iterator[Begin | ModelResult | Measurement]:
    """Train, quantize and judge the network; give its accuracy and its verdict."""
    started, name, data = time.perf_counter(), f"model/digits/{setup}", load()
    if data is None:
        yield Measurement(topic="accuracy", subject=name, values={"missing": MISSING})
        return
    torch.default_generator.manual_seed(bench.seed_for("model/digits"))
    images, labels = data
    is_unseen = torch.arange(len(images)) % EVERY == 0
    seen, seen_labels = images[~is_unseen], labels[~is_unseen]
    unseen, unseen_labels = images[is_unseen], labels[is_unseen]
    network = DigitsNetwork().train()
    fit(network, seen, seen_labels, epochs=EPOCHS, rate=RATE)
    network.eval()
    unit = ModelUnit(
        id=name,
        model=copy.deepcopy(network),
        claims=claims,
        setup=setup,
        calibration=[(batch,) for batch in torch.split(seen, BATCH)[:CALIBRATING_BATCHES]],
        train=lambda network, _: fit(network, seen, seen_labels, epochs=QAT_EPOCHS, rate=QAT_RATE),
        draw=lambda reference: [
            place_on_grids(reference, (batch,))
            for batch in torch.split(unseen, BATCH)
            if len(batch) == BATCH or bench.capabilities.dynamic_batch
        ],
    )
    values: dict[str, Any] = {"images": len(unseen), "float": measure_top1(network, unseen, unseen_labels)}
    judged = yield from judge_model(bench, unit)
    try:
        for part in _measure_accuracy(bench, judged, unseen, unseen_labels):
            values |= part
    except FaultFound as found:
        is_judged = judged.check.outcome == "fail" or read_unclaimed(judged.check)
        if not (isinstance(found, Declined) and is_judged):  # by its parts, or as declined
            judged = replace(judged, check=make_failed_check(name, found.fault))
    yield Measurement(topic="accuracy", subject=name, values=values)
    yield judged.make_row(time.perf_counter() - started)


def _measure_accuracy(bench: Bench, judged: JudgedModel, images: Tensor, labels: Tensor) -> Iterator[dict[str, float]]:
    """Yield the accuracy of the reference model, of the lowered one, and what may differ. Raises FaultFound."""
    if judged.quantized is None:
        return
    reference = judged.quantized.reference
    (on_grid,) = place_on_grids(reference, (images,))
    yield {"reference": measure_top1(reference, on_grid, labels)}
    lowered, where = lower(bench, reference, (on_grid,)), Where(input="all unseen images")
    yield {"backend": measure_top1(lambda batch: run_lowered(lowered, where, (batch,)), on_grid, labels)}
    yield measure_undecided(reference, on_grid, judged.check)


def load() -> tuple[Tensor, Tensor] | None:
    """Return images (float32 in 0…1, N × 1 × 8 × 8) and labels (int64); None without scikit-learn."""
    try:
        data = importlib.import_module("sklearn.datasets").load_digits()
    except ModuleNotFoundError:
        return None
    images = torch.tensor(data.images.tolist(), dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(data.target.tolist())


def fit(network: nn.Module, images: Tensor, labels: Tensor, epochs: int, rate: float) -> None:
    """Train by stochastic gradient descent, at a falling rate, on batches in an order from torch's generator."""
    for epoch in range(epochs):
        falling = rate * (1 - epoch / epochs)
        for chosen in torch.split(torch.randperm(len(images)), BATCH):
            descend(network, F.cross_entropy(network(images[chosen]), labels[chosen]), falling)


def measure_top1(network: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor) -> float:
    """Return the share of images whose largest output is their label's."""
    with torch.no_grad():
        return round(float((network(images).argmax(1) == labels).double().mean()), 6)


def measure_undecided(reference: GraphModule, images: Tensor, check: Check) -> dict[str, float]:
    """Return the share of images on which the two largest outputs are too near to tell a right kernel's label.

    Nothing where no distance was measured, or the output is on no grid. A backend's outputs lie within
    ``check.max_lsb`` of the exact ones, the reference's within the bound: a label can differ where the two largest are
    no more than twice the sum of both apart. No more images than these may change.
    """
    step = output_step(reference)
    if check.max_lsb is None or check.slack_lsb is None or not step:
        return {}
    apart = 2 * (float(check.max_lsb) + 0.5 + float(check.slack_lsb)) * step
    with torch.no_grad():
        first, second = reference(images).topk(2, dim=1).values.unbind(1)
    return {"undecided": round(float((first - second <= apart).double().mean()), 6)}
