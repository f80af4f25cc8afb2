"""QConfigs that several test modules make."""

from __future__ import annotations

from typing import Any

import torch

from fx_quant_conformance.refimpl.config.qconfig import QConfig
from fx_quant_conformance.refimpl.observers.observers import MinMaxObserver, PerChannelMinMaxObserver


def minmax_qconfig(
    activation_dtype: Any, weight_dtype: Any, *, per_channel: bool, symmetric: bool = True, **arguments: Any
) -> QConfig:
    """Return a static QConfig of min/max observers: affine activations, symmetric (or affine) weights.

    `arguments` with the prefix ``weight_`` go to the weight's observer, the others to the activation's.
    """
    weight_arguments = {k.removeprefix("weight_"): v for k, v in arguments.items() if k.startswith("weight_")}
    activation_arguments = {k: v for k, v in arguments.items() if not k.startswith("weight_")}
    schemes = {
        (False, False): torch.per_tensor_affine,
        (False, True): torch.per_tensor_symmetric,
        (True, False): torch.per_channel_affine,
        (True, True): torch.per_channel_symmetric,
    }
    observer = PerChannelMinMaxObserver if per_channel else MinMaxObserver
    return QConfig(
        activation=MinMaxObserver.with_args(dtype=activation_dtype, **activation_arguments),
        weight=observer.with_args(dtype=weight_dtype, qscheme=schemes[per_channel, symmetric], **weight_arguments),
    )
