"""From a BackendConfig to a Quantizer, and back: derive_config finds in it what the config claims."""

# ruff: noqa: E402
from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic as nni
from torch import nn

from tests.support.torchao import require_torchao

require_torchao()

from conformance.claims.claim import dtype_config_text
from conformance.claims_of.derive import derive_config
from refimpl import BackendConfig, DTypeConfig, default_backend_config, get_default_qconfig_mapping
from refimpl.patterns import normal_form, pattern_name
from refimpl.pt2e import BackendConfigQuantizer

CLAIMED = (nn.Conv2d, normal_form((nn.Conv2d, nn.ReLU)), nni.ConvReLU2d, nn.Linear, operator.add, torch.cat, nn.Sigmoid)
CLAIMED_NAMES = ("nn.Conv2d", "nn.Conv2d+nn.ReLU", "nn.Linear", "operator.add", "torch.cat", "nn.Sigmoid")
PROBED = (
    *CLAIMED_NAMES, "F.conv2d", "nn.Conv2d+F.relu", "F.linear", "nn.Linear+nn.ReLU", "operator.mul", "torch.stack",
    "nn.Hardsigmoid",
)  # fmt: skip
"""Not those with a batch norm: prepare_pt2e folds it before it asks the Quantizer."""


def _list_claims(config: BackendConfig) -> dict[str, tuple[Any, list[str]]]:
    """Return of each entry, by its pattern's name, the observation type and the static dtype configs."""
    return {
        pattern_name(entry.normal_pattern): (entry.observation_type, [*map(dtype_config_text, static)])
        for entry in config.configs
        if (static := [dtypes for dtypes in entry.dtype_configs if _is_static(dtypes)])
    }


def _is_static(dtypes: DTypeConfig) -> bool:
    return dtypes.input_dtype == torch.quint8 and not dtypes.is_dynamic


@pytest.mark.slow
def test_a_quantizer_made_of_a_config_amounts_to_that_config() -> None:
    config = BackendConfig("small")
    for entry in default_backend_config().configs:
        if entry.normal_pattern in CLAIMED:
            config.set_backend_pattern_config(entry)
    quantizer = BackendConfigQuantizer(config, get_default_qconfig_mapping("qnnpack"))
    claimed, derived = _list_claims(config), _list_claims(derive_config(quantizer, "again", globs=PROBED)[0])
    del claimed["nni.ConvReLU2d"]  # in an exported program this is conv2d and relu
    claimed["nn.Sigmoid"][1][:] = [text.replace("0..255,", "") for text in claimed["nn.Sigmoid"][1]]  # all of the dtype
    assert derived == claimed
    assert derived.keys() == set(CLAIMED_NAMES)
    assert "s=2^-8,z=0" in claimed["nn.Sigmoid"][1][0]
