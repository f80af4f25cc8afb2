"""The native backends' tables against torch's own configs, pair by pair (CFG-05, CFG-06, CFG-09, FUS-02)."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import torch.ao.quantization.quantize_fx  # torch's configs need it loaded before them
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import backend_config as theirs
from torch.ao.quantization.backend_config.x86 import get_x86_backend_config

from fx_quant_conformance.backends.torch_engines.tables import TABLES, NativeName, native_config
from fx_quant_conformance.refimpl.config.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    ObservationType,
    as_backend_config,
)
from fx_quant_conformance.refimpl.config.native import default_backend_config
from fx_quant_conformance.refimpl.config.patterns import is_match_all, leaves, pattern_name
from fx_quant_conformance.refimpl.errors import ConfigError

THEIRS: dict[NativeName, Callable[[], theirs.BackendConfig]] = {
    "native": theirs.get_native_backend_config,
    "qnnpack": theirs.get_qnnpack_backend_config,
    "fbgemm": theirs.get_fbgemm_backend_config,
    "x86": get_x86_backend_config,
    "onednn": theirs.get_onednn_backend_config,
}
VALUES = (
    "observation_type",
    "dtype_configs",
    "root_module",
    "qat_module",
    "reference_quantized_module",
    "fused_module",
    "_num_tensor_args_to_observation_type",
    "_input_type_to_index",
)
CALLABLES = ("fuser_method", "_root_node_getter", "_extra_inputs_getter")
each_backend = pytest.mark.parametrize("name", THEIRS)

Pair = tuple[BackendPatternConfig, BackendPatternConfig]


def pairs_of(name: NativeName) -> list[Pair]:
    return list(zip(native_config(name).configs, as_backend_config(THEIRS[name]()).configs, strict=True))


def with_our_wildcard(pattern: Any) -> Any:
    """Write a pattern, in either format, with one marker for the two wildcard classes."""
    if isinstance(pattern, tuple):
        return tuple(with_our_wildcard(part) for part in pattern)
    return "*" if is_match_all(pattern) else pattern


@each_backend
@pytest.mark.rule("PAT-07")
def test_patterns_are_torchs_in_torchs_order(name: NativeName) -> None:
    torchs = THEIRS[name]()
    config = native_config(name)
    assert config.name == torchs.name
    found = [with_our_wildcard(entry.normal_pattern) for entry in config.configs]
    assert found == [with_our_wildcard(pattern) for pattern in torchs._pattern_complex_format_to_config]
    for entry, other in pairs_of(name):
        assert entry.pattern == other.pattern
        assert with_our_wildcard(entry._pattern_complex_format) == with_our_wildcard(other._pattern_complex_format)


@each_backend
@pytest.mark.parametrize("attribute", VALUES)
@pytest.mark.rule("CFG-05")
@pytest.mark.rule("CFG-06")
def test_attribute_is_torchs_for_every_pattern(name: NativeName, attribute: str) -> None:
    different = {
        pattern_name(entry.normal_pattern): (getattr(entry, attribute), getattr(other, attribute))
        for entry, other in pairs_of(name)
        if getattr(entry, attribute) != getattr(other, attribute)
    }
    assert different == {}


@each_backend
@pytest.mark.parametrize("attribute", CALLABLES)
@pytest.mark.rule("CFG-06")
def test_callable_is_present_where_torchs_is(name: NativeName, attribute: str) -> None:
    for entry, other in pairs_of(name):
        assert (getattr(entry, attribute) is None) is (getattr(other, attribute) is None), entry


@each_backend
@pytest.mark.rule("CFG-09")
def test_every_call_gives_a_new_config(name: NativeName) -> None:
    one, other = native_config(name), native_config(name)
    one.configs[0].dtype_configs.clear()
    for entry in one.configs:
        entry._input_type_to_index["weight"] = 9
        entry._num_tensor_args_to_observation_type[9] = ObservationType.INPUT_OUTPUT_NOT_OBSERVED
    for config in (other, native_config(name)):
        assert config.configs[0].dtype_configs
        assert not any(entry._input_type_to_index.get("weight") == 9 for entry in config.configs)
        assert not any(9 in entry._num_tensor_args_to_observation_type for entry in config.configs)


@pytest.mark.rule("CFG-09")
def test_an_unknown_name_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match="'fbgem'; expected one of native, qnnpack, fbgemm, x86, onednn"):
        native_config("fbgem")  # type: ignore[arg-type]
    assert set(get_args(NativeName)) == set(TABLES)


@pytest.mark.rule("CFG-09")
def test_the_default_is_torchs_native_config() -> None:
    config = default_backend_config()
    assert config.name == theirs.get_native_backend_config().name == "native"
    assert config.to_dict() == native_config("native").to_dict()
    config.configs[0].dtype_configs.clear()
    assert default_backend_config().configs[0].dtype_configs, "a fresh one for every caller"


@each_backend
@pytest.mark.rule("CFG-08")
def test_dict_form_gives_the_same_config(name: NativeName) -> None:
    found = native_config(name).to_dict()
    assert BackendConfig.from_dict(found).to_dict() == found


@each_backend
@pytest.mark.rule("FUS-02")
def test_config_can_be_copied_and_pickled(name: NativeName) -> None:
    config = native_config(name)
    assert [entry.normal_pattern for entry in copy.deepcopy(config).configs] == [
        entry.normal_pattern for entry in config.configs
    ]
    for entry in config.configs:
        for attribute in CALLABLES:
            again = pickle.loads(pickle.dumps(getattr(entry, attribute)))
            assert repr(again) == repr(getattr(entry, attribute))


# ---- fuser methods in behaviour ---------------------------------------------------------------------------


class Extra(nn.Module):
    """Stands for the module behind a wildcard: no fuser method may touch it."""


MODULE_OF_FUNCTION: dict[Any, type[nn.Module]] = {
    F.relu: nn.ReLU,
    F.leaky_relu: nn.LeakyReLU,
    torch.tanh: nn.Tanh,
}


def instance_of(leaf: Any) -> Any:
    """Return what the fuse flow hands a fuser method for a node that matched this leaf."""
    if is_match_all(leaf):
        return Extra()
    leaf = MODULE_OF_FUNCTION.get(leaf, leaf)
    if not isinstance(leaf, type):
        return leaf
    if "Conv" in leaf.__name__:
        return leaf(4, 6, 3)
    if "BatchNorm" in leaf.__name__:
        return randomized(leaf(6))
    return leaf(4, 6) if leaf is nn.Linear else leaf()


def randomized(norm: Any) -> nn.Module:
    """Give a batch norm statistics and parameters that are not its initial ones."""
    for tensor in (norm.running_mean, norm.weight.data, norm.bias.data):
        tensor.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    assert isinstance(norm, nn.Module)
    return norm


def arguments_for(entry: BackendPatternConfig, is_qat: bool) -> Any:
    """Instances in the order that the entry's fuser method takes, all in one mode."""

    def build(part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(build(item) for item in part)
        made = instance_of(part)
        return made.train(is_qat) if isinstance(made, nn.Module) else made

    torch.manual_seed(0)
    return build(entry.pattern if entry.pattern is not None else entry.normal_pattern)


def outcome(fuser: Any, is_qat: bool, arguments: Any) -> tuple[Any, ...]:
    """Class and state of what the fuser method returns, or the fact that it refuses."""
    try:
        fused = fuser(is_qat, *arguments)
    except Exception:
        return ("refused",)
    kinds = [type(module) for module in fused.modules()]
    return (
        kinds,
        getattr(fused, "add", None),
        {key: value.clone() for key, value in fused.state_dict().items()},
    )


def same_outcome(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    if one == ("refused",) or other == ("refused",):
        return one == other
    states = one[2], other[2]
    equal = states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][key], states[1][key]) for key in states[0]
    )
    return one[:2] == other[:2] and equal


@each_backend
@pytest.mark.parametrize("is_qat", [False, True], ids=["ptq", "qat"])
@pytest.mark.rule("FUS-02")
def test_fuser_methods_do_what_torchs_do(name: NativeName, is_qat: bool) -> None:
    fusable = [(entry, other) for entry, other in pairs_of(name) if entry.fuser_method is not None]
    assert len(fusable) == {"onednn": 46}.get(name, 25)
    refused = []
    for entry, other in fusable:
        arguments = arguments_for(entry, is_qat)
        found = outcome(entry.fuser_method, is_qat, copy.deepcopy(arguments))
        assert same_outcome(found, outcome(other.fuser_method, is_qat, arguments)), entry
        if found == ("refused",):
            refused.append(pattern_name(entry.normal_pattern))
    # Only in QAT, and only where no fused QAT class exists.
    expected = 0 if not is_qat else {"onednn": 3 + 8 + 1}.get(name, 3)
    assert len(refused) == expected, refused


@pytest.mark.rule("FUS-03")
@pytest.mark.rule("FUS-04")
def test_getters_pick_what_torchs_pick() -> None:
    complex_pairs = [pair for pair in pairs_of("onednn") if pair[0]._pattern_complex_format is not None]
    assert len(complex_pairs) == 16
    for entry, other in complex_pairs:
        nested = numbered(entry.normal_pattern)
        for attribute in ("_root_node_getter", "_extra_inputs_getter"):
            assert getattr(entry, attribute)(nested) == getattr(other, attribute)(nested)
        assert entry._root_node_getter is not None
        root = entry._root_node_getter(nested)
        assert root == f"{pattern_name(nn.Conv2d)} {list(leaves(entry.normal_pattern)).index(nn.Conv2d)}"


def numbered(pattern: Any) -> Any:
    """A nested tuple of names in the shape of the pattern, each with its index in forward order."""
    order = iter(range(sum(1 for _ in leaves(pattern))))

    def name(part: Any) -> Any:
        if not isinstance(part, tuple):
            return f"{pattern_name(part)} {next(order)}"
        arguments = [name(argument) for argument in part[1:]]
        return (name(part[0]), *arguments)

    return name(pattern)


@each_backend
@pytest.mark.rule("FUS-08")
def test_transposed_convolution_is_the_one_fusion_without_a_fused_module(name: NativeName) -> None:
    odd = {
        pattern_name(entry.normal_pattern)
        for entry in native_config(name).configs
        if (entry.fuser_method is None) is not (entry.fused_module is None)
    }
    assert odd == {f"nn.ConvTranspose{d}d+nn.BatchNorm{d}d" for d in (1, 2, 3)}
