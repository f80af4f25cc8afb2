"""The ways to quantize the models of the zoo: mappings of torch's QConfigs, with backend config, engine and mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.both_flows import PER_CHANNEL, QCONFIG, torch_mappings, torch_qconfigs, torchs
from tests.refimpl.support.parity import Recipe

Tweak = Callable[[Any], Any]  # adds keys to a mapping
NOT_LOWERED = ("reference", "decomposed")  # no native engine takes qint8 activations
NOT_DECOMPOSED = ("reference", "lowered")  # torch has no decomposed form of these dtypes

_SIGNED_WEIGHT = {"dtype": torch.qint8, "qscheme": torch.per_tensor_symmetric, "eps": 2**-12}
SIGNED = torch_qconfigs.QConfig(  # within the bounds of the configs with qint8 activations
    activation=torchs.MinMaxObserver.with_args(dtype=torch.qint8, eps=2**-12),
    weight=torchs.MinMaxObserver.with_args(**_SIGNED_WEIGHT, quant_min=-127, quant_max=127),
)
WIDE = torch_qconfigs.QConfig(  # the weight's range is out of bounds (DTY-03)
    activation=SIGNED.activation, weight=torchs.MinMaxObserver.with_args(**_SIGNED_WEIGHT)
)
HISTOGRAM = torch_qconfigs.QConfig(activation=torchs.HistogramObserver, weight=QCONFIG.weight)
MOVING = torch_qconfigs.QConfig(activation=torchs.MovingAverageMinMaxObserver, weight=PER_CHANNEL.weight)
NARROW = torch_qconfigs.QConfig(
    activation=torchs.MinMaxObserver.with_args(dtype=torch.quint8, reduce_range=True), weight=PER_CHANNEL.weight
)
DYNAMIC = torch_qconfigs.default_dynamic_qconfig
DYNAMIC_PER_CHANNEL = torch_qconfigs.per_channel_dynamic_qconfig
FLOAT16_DYNAMIC = torch_qconfigs.float16_dynamic_qconfig
FLOAT16_STATIC = torch_qconfigs.float16_static_qconfig
WEIGHT_ONLY = torch_qconfigs.float_qparams_weight_only_qconfig
WEIGHT_ONLY_4BIT = torch_qconfigs.float_qparams_weight_only_qconfig_4bit


def only_global(qconfig: Any, tweak: Tweak = lambda mapping: mapping) -> Callable[[], Any]:
    """Return a maker of a mapping with a global QConfig and what ``tweak`` adds."""
    return lambda: tweak(flows.global_mapping(qconfig))


def embeddings(qconfig: Any) -> Tweak:
    """Quantize embeddings weight-only."""
    return lambda mapping: mapping.set_object_type(nn.Embedding, qconfig).set_object_type(nn.EmbeddingBag, qconfig)


def without_embeddings(mapping: Any) -> Any:
    return embeddings(None)(mapping)


def types(qconfig: Any, *kinds: Any) -> Tweak:
    """Give object types a QConfig."""

    def tweak(mapping: Any) -> Any:
        for kind in kinds:
            mapping.set_object_type(kind, qconfig)
        return mapping

    return tweak


def default(name: str) -> Callable[[], Any]:
    return partial(torch_mappings.get_default_qconfig_mapping, name)


def default_qat(name: str) -> Callable[[], Any]:
    return partial(torch_mappings.get_default_qat_qconfig_mapping, name)


def mixed(mapping: Any) -> Any:
    """Static sums, products and convolutions, dynamic linears (with their relu) and RNNs, weight-only embeddings."""
    return types(DYNAMIC, nn.Linear, F.linear, nn.ReLU, F.relu, nn.LSTM, nn.GRU)(embeddings(WEIGHT_ONLY)(mapping))


RECIPES: dict[str, Recipe] = {
    "minmax": Recipe(mapping=only_global(QCONFIG)),
    "per channel": Recipe(mapping=only_global(PER_CHANNEL), config="fbgemm", engine="fbgemm"),
    "native": Recipe(mapping=only_global(PER_CHANNEL), config="native", engine="x86"),
    "fixed": Recipe(mapping=lambda: default("qnnpack")().set_global(QCONFIG), config="native"),
    "signed": Recipe(mapping=only_global(SIGNED), config="qnnpack", converts=NOT_LOWERED),
    "wide weight": Recipe(mapping=only_global(WIDE), config="qnnpack", converts=NOT_LOWERED),
    "x86 minmax": Recipe(mapping=only_global(QCONFIG), config="x86", engine="x86"),
    "onednn minmax": Recipe(mapping=only_global(PER_CHANNEL), config="onednn", engine="onednn"),
    "tensorrt": Recipe(mapping=only_global(SIGNED), config="tensorrt", converts=NOT_LOWERED),
    "executorch": Recipe(mapping=only_global(SIGNED), config="executorch", converts=NOT_LOWERED),
    "histogram": Recipe(mapping=only_global(HISTOGRAM), config="native"),
    "moving": Recipe(mapping=only_global(MOVING), config="native", engine="x86"),
    "narrow": Recipe(mapping=only_global(NARROW), config="fbgemm", engine="fbgemm"),
    "fbgemm": Recipe(mapping=default("fbgemm"), config="fbgemm", engine="fbgemm"),
    "x86": Recipe(mapping=default("x86"), config="x86", engine="x86"),
    "qnnpack": Recipe(mapping=default("qnnpack"), config="qnnpack", engine="qnnpack"),
    "onednn": Recipe(mapping=default("onednn"), config="onednn", engine="onednn"),
    "qat fbgemm": Recipe(mapping=default_qat("fbgemm"), config="fbgemm", engine="fbgemm", is_qat=True),
    "qat x86": Recipe(mapping=default_qat("x86"), config="x86", engine="x86", is_qat=True),
    "qat qnnpack": Recipe(mapping=default_qat("qnnpack"), is_qat=True),
    "qat onednn": Recipe(mapping=default_qat("onednn"), config="onednn", engine="onednn", is_qat=True),
    "dynamic": Recipe(mapping=only_global(DYNAMIC), config="native"),
    "dynamic per channel": Recipe(mapping=only_global(DYNAMIC_PER_CHANNEL), config="native"),
    **{
        f"dynamic {name}": Recipe(mapping=only_global(DYNAMIC), config="native", engine=name)
        for name in ("x86", "fbgemm", "onednn")
    },
    "dynamic per channel x86": Recipe(mapping=only_global(DYNAMIC_PER_CHANNEL), config="native", engine="x86"),
    "float16 dynamic": Recipe(
        mapping=only_global(FLOAT16_DYNAMIC), config="native", engine="fbgemm", converts=NOT_DECOMPOSED
    ),
    "float16 static": Recipe(mapping=only_global(FLOAT16_STATIC), config="native", engine="fbgemm"),
    "weight only": Recipe(mapping=only_global(None, embeddings(WEIGHT_ONLY)), config="native"),
    "weight only 4 bit": Recipe(mapping=only_global(None, embeddings(WEIGHT_ONLY_4BIT)), config="native"),
    "static, embeddings float": Recipe(mapping=only_global(QCONFIG, without_embeddings), config="native"),
    "mixed": Recipe(mapping=only_global(QCONFIG, mixed), config="native"),
}
