"""What a config refuses when it is written, and what the linter finds in it (CFG-01 to CFG-14, FUS-03, FUS-08)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic as nni
import torch.ao.nn.quantized.reference as nnqr
import torch.ao.quantization.quantize_fx  # torch's configs need it loaded before them
from torch import nn
from torch.ao.quantization import backend_config as theirs

from fx_quant_conformance.refimpl.config import backend_config as ours
from fx_quant_conformance.refimpl.config.dtype_config import DTypeConfig
from fx_quant_conformance.refimpl.errors import ConfigError
from tests.refimpl.support.both_configs import as_theirs, config_of, fuse

Entry = ours.BackendPatternConfig
FAULTS: tuple[tuple[ours.BackendPatternConfig, str], ...] = (
    (
        Entry((nn.Linear, nn.ReLU)).set_fused_module(nni.LinearReLU),
        "FUS-08: nn.Linear+nn.ReLU has fused_module LinearReLU, but no fuser_method",
    ),
    (Entry((nn.Linear, nn.ReLU)).set_fuser_method(fuse), "FUS-08: nn.Linear+nn.ReLU has a fuser_method, but neither"),
    (
        Entry((torch.add, nn.ReLU)).set_fuser_method(fuse).set_fused_module(nn.Sequential),
        "FUS-03: torch.add+nn.ReLU has a fuser_method, but its root torch.add is no module",
    ),
    (
        Entry(nn.Linear).set_reference_quantized_module(nnqr.Linear),
        "CFG-11: nn.Linear has a reference_quantized_module",
    ),
)


@pytest.mark.rule("FUS-08")
@pytest.mark.rule("FUS-03")
@pytest.mark.rule("CFG-11")
@pytest.mark.parametrize(("entry", "expected"), FAULTS)
def test_a_fault_that_needs_no_model_is_found_and_torch_says_nothing(entry: Any, expected: str) -> None:
    clean = Entry(nn.Conv2d).set_root_module(nn.Conv2d).set_reference_quantized_module(nnqr.Conv2d)
    (found,) = ours.lint_config(config_of(clean, entry))
    assert found.startswith(expected)
    torchs = theirs.BackendConfig().set_backend_pattern_config(
        theirs.BackendPatternConfig.from_dict(as_theirs(entry.to_dict()))
    )
    assert ours.lint_config(torchs) == (found,), "torch's class takes the entry without a word"


@pytest.mark.rule("FUS-08")
def test_a_fuser_method_that_folds_into_the_roots_class_needs_no_fused_module() -> None:
    entry = Entry((nn.ConvTranspose2d, nn.BatchNorm2d)).set_fuser_method(fuse).set_root_module(nn.ConvTranspose2d)
    assert ours.lint_config(config_of(entry)) == ()


@pytest.mark.rule("FUS-08")
@pytest.mark.parametrize("name", ["native", "fbgemm", "qnnpack", "x86", "onednn", "tensorrt", "executorch"])
def test_the_configs_that_torch_ships_are_clean(name: str) -> None:
    module = import_module(f"torch.ao.quantization.backend_config.{name}")
    assert ours.lint_config(getattr(module, f"get_{name}_backend_config")()) == ()


@pytest.mark.rule("CFG-08")
def test_an_observation_type_of_none_in_a_dict_is_refused_and_other_parts_of_none_are_unset() -> None:
    with pytest.raises(ConfigError, match=r"observation type: expected one of OUTPUT_USE_DIFFERENT.*found None"):
        ours.BackendPatternConfig.from_dict({"observation_type": None})
    unset = ours.BackendPatternConfig.from_dict({"root_module": None, "num_tensor_args_to_observation_type": None})
    assert vars(unset) == vars(ours.BackendPatternConfig())


Untyped: Any = ours.BackendPatternConfig  # what a type checker would refuse is given on purpose
UntypedConfig: Any = ours.BackendConfig
UntypedDTypes: Any = DTypeConfig


@pytest.mark.rule("CFG-14")
@pytest.mark.rule("CFG-01")
@pytest.mark.parametrize("member", list(ours.ObservationType), ids=lambda member: member.name)
def test_setters_take_torchs_observation_types_as_ours(member: ours.ObservationType) -> None:
    torchs = theirs.ObservationType[member.name]
    entry = Untyped(nn.ReLU).set_observation_type(torchs)
    assert entry.observation_type is member
    entry._set_num_tensor_args_to_observation_type({1: torchs})
    assert entry._num_tensor_args_to_observation_type == {1: member}


@pytest.mark.rule("CFG-08")
@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: Untyped(nn.ReLU).set_observation_type("shared"), "expected one of .* found 'shared'"),
        (lambda: Untyped(nn.ReLU)._set_num_tensor_args_to_observation_type({0: 5}), "found 5"),
        (lambda: Untyped(nn.ReLU).add_dtype_config(3), "expected a DTypeConfig, found 3"),
        (lambda: Untyped(nn.ReLU).set_dtype_configs([None]), "expected a DTypeConfig, found None"),
        (lambda: Untyped.from_dict({"dtype_configs": 3}), "expected a list of DTypeConfigs, found 3"),
        (lambda: Untyped.from_dict({"dtype_configs": [None]}), "expected a DTypeConfig, found None"),
        (lambda: UntypedConfig.from_dict({"configs": None}), "expected a list of entries, found None"),
        (lambda: UntypedConfig.from_dict({"configs": [3]}), "expected a BackendPatternConfig, found 3"),
        (lambda: UntypedDTypes(bias_dtype="float"), "bias_dtype: expected a torch.dtype or None, found 'float'"),
        (lambda: UntypedDTypes(is_dynamic="yes"), "is_dynamic: expected a bool or None, found 'yes'"),
    ],
)
def test_what_a_setter_cannot_take_is_refused_at_once(build: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build()


@pytest.mark.rule("CFG-08")
@pytest.mark.rule("CFG-14")
def test_dtype_configs_of_torchs_and_dict_forms_become_ours() -> None:
    torchs = theirs.DTypeConfig(input_dtype=torch.quint8)
    entry = Untyped(nn.ReLU).add_dtype_config(torchs).add_dtype_config({"input_dtype": torch.quint8})
    assert entry.dtype_configs == [DTypeConfig(torch.quint8)] * 2


@pytest.mark.rule("CFG-12")
def test_a_dict_that_is_given_or_returned_is_copied() -> None:
    asked = {"weight": 1}
    entry = Untyped.from_dict({"pattern": nn.Linear, "input_type_to_index": asked})
    asked["bias"] = 2
    entry.to_dict()["input_type_to_index"]["other"] = 3
    assert entry._input_type_to_index == {"weight": 1}
