"""Model sets: the architectures of torchvision, timm and transformers, with random weights from a seed.

``torchvision:resnet18``, or a glob such as ``timm:*lite*``; nothing is downloaded. The extra ``models`` installs them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from fx_quant_conformance.backends.names import format_error
from fx_quant_conformance.conformance.own_models.transformers_set import BASE, create, list_architectures

SIDE = 64
"""Height and width of the images, in pixels, unless a model takes only larger ones."""
BATCHES, IMAGES = 2, 2
"""Number of calibration batches, and of images in each."""
_WILD = frozenset("*?[")
_MISSING = "is not installed: pip install 'fx-quant-conformance[models]'"


class ModelSetError(Exception):
    """A model set that is not installed, or that has no such model; the message says what to do."""


def is_of_set(spec: str) -> bool:
    """Tell whether a spec names models of a set."""
    return spec.partition(":")[0] in _SETS


def expand(spec: str) -> tuple[str, ...]:
    """Return the specs of single models that a glob stands for; any other spec as it is. Raises ModelSetError."""
    of_set, _, glob = spec.partition(":")
    if not is_of_set(spec) or not _WILD.intersection(glob):
        return (spec,)
    names = [name for name in _SETS[of_set]().list_models() if fnmatchcase(name, glob)]
    if not names:
        raise ModelSetError(f"{of_set} has no model that {glob!r} matches")
    return tuple(f"{of_set}:{name}" for name in sorted(names))


def make(spec: str, seed: int) -> dict[str, Any]:
    """Return a model of a set, example inputs and calibration batches, as a ``GivenModel`` has them.

    The inputs are random: images of normal noise, tokens. Raises ModelSetError.
    """
    of_set, _, name = spec.partition(":")
    models = _SETS[of_set]()
    if name.removesuffix(BASE) not in models.list_models():
        raise ModelSetError(f"{of_set} has no model {name!r}")
    torch.default_generator.manual_seed(seed)
    try:
        model, made = models.create(name)
    except Exception as error:
        raise ModelSetError(f"{of_set} cannot make it: {format_error(error)}") from error
    if isinstance(made, int):
        batches = [(torch.randn(IMAGES, 3, made, made),) for _ in range(BATCHES)]
        return {"model": _settle(model, batches), "example_inputs": batches[0], "calibration": batches}
    return {"model": model, "example_inputs": (), "kwargs": made[0], "calibration": [((), each) for each in made]}


def _settle(model: nn.Module, batches: Sequence[tuple[Tensor, ...]]) -> nn.Module:
    """Return the model in eval mode, its batch norms with statistics of the images, and parameters as after training.

    Without, values would grow from layer to layer, or vanish.
    """
    norms = [each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    with torch.no_grad():
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all batches
            if norm.affine:
                norm.weight.uniform_(0.5, 1.5)
                norm.bias.uniform_(-0.5, 0.5)
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():  # a head that begins at zero: all outputs would be its bias
                nn.init.trunc_normal_(parameter, std=0.02)
        model.train()
        for batch in batches if norms else ():
            model(*batch)
    return model.eval()


class _Detector(nn.Module):
    """What a detector quantizes: its backbone and its head, which give classes and boxes of all places and scales.

    Anchors, the choice of boxes, and what is cut out of the image around them are code on a CPU.
    """

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.backbone = detector.backbone
        self.head = detector.rpn.head if hasattr(detector, "rpn") else detector.head

    def forward(self, images: Tensor) -> Any:
        """Return what the head gives for the features of a batch of images."""
        return self.head(list(self.backbone(images).values()))


class _Torchvision:
    """torchvision.models."""

    def __init__(self) -> None:
        self._models = _import("torchvision.models")

    def _list(self, *modules: Any) -> list[str]:
        return [name for module in modules for name in self._models.list_models(module=module)]

    def list_models(self) -> Sequence[str]:
        """Return the names of the models for images: classifiers, segmentation, detectors."""
        return self._list(self._models, self._models.segmentation, self._models.detection)

    def create(self, name: str) -> tuple[nn.Module, int]:
        """Return a model, and the height and width of its images.

        Layers that leave out whole samples in training do nothing after it: they are replaced, as they call an operator
        of torchvision, which the backend's process would have to import.
        """
        side = _SIDES.get(name, SIDE)
        arguments: dict[str, Any] = {"image_size": side} if name.startswith("vit_") else {}
        if name in ("googlenet", "inception_v3"):
            arguments["init_weights"] = True
        if name not in self._list(self._models):
            arguments["weights_backbone"] = None
        model: nn.Module = self._models.get_model(name, weights=None, **arguments)
        if name in self._list(self._models.detection):
            model = _Detector(model)
        for path, module in list(model.named_modules()):
            if type(module).__name__ == "StochasticDepth":
                model.set_submodule(path, nn.Identity())
        return model, side


class _Timm:
    """timm."""

    def __init__(self) -> None:
        self._timm = _import("timm")

    def list_models(self) -> Sequence[str]:
        """Return the names of the models."""
        names: Sequence[str] = self._timm.list_models()
        return names

    def create(self, name: str) -> tuple[nn.Module, int]:
        """Return a model, and the height and width of its images: its own if it takes no other."""
        model = self._timm.create_model(name, pretrained=False)
        config: Mapping[str, Any] = model.pretrained_cfg
        return model, config["input_size"][-1] if config.get("fixed_input_size") else SIDE


class _Transformers:
    """transformers."""

    def __init__(self) -> None:
        with suppress(ModelSetError):  # it imports torchvision, where that is installed
            _import("torchvision")
        self._package = _import("transformers")
        _import("transformers.models.auto.modeling_auto")

    def list_models(self) -> Sequence[str]:
        """Return the names of the classes of models without a head."""
        return list_architectures(self._package)

    def create(self, name: str) -> tuple[nn.Module, Sequence[Mapping[str, Any]]]:
        """Return a model, small or ``@base``, and the keywords of some calls."""
        return create(self._package, name)


_SETS: Mapping[str, Callable[[], _Torchvision | _Timm | _Transformers]] = {
    "torchvision": _Torchvision,
    "timm": _Timm,
    "transformers": _Transformers,
}
_SIDES = {"inception_v3": 96, "ssd300_vgg16": 300}
"""Models of torchvision whose images must be larger."""


def _import(name: str) -> Any:
    """Import a module of torchvision or timm. Raises ModelSetError."""
    package = name.partition(".")[0]
    try:
        return _import_without_operators(name)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] == package:
            raise ModelSetError(f"{package} {_MISSING}") from error
        raise ModelSetError(f"{name} does not import: {format_error(error)}") from error
    except Exception as error:
        raise ModelSetError(f"{name} does not import: {format_error(error)}") from error


def _import_without_operators(name: str) -> Any:
    """Import a module; if torchvision's library of operators does not load, with empty ones in their place.

    torchvision's wheel on PyPI is built for torch with CUDA: with a CPU build of torch its library does not load, and
    the import ends with "operator torchvision::nms does not exist". No classifier calls these operators.
    """
    try:
        return importlib.import_module(name)
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for half_imported in [each for each in sys.modules if each.partition(".")[0] in ("torchvision", "timm")]:
        del sys.modules[half_imported]
    return importlib.import_module(name)
