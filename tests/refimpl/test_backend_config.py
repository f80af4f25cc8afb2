"""BackendConfig and its entries, beside torch's classes of those names (rules CFG-01, CFG-05 to CFG-14)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic as nni
import torch.ao.nn.qat as nnqat
import torch.ao.nn.quantized.reference as nnqr
import torch.ao.quantization.quantize_fx  # torch's configs need it loaded before them
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.ao.quantization import backend_config as theirs
from torch.ao.quantization.backend_config import utils as their_utils
from torch.ao.quantization.utils import MatchAllNode as TheirMatchAllNode

from fx_quant_conformance.refimpl.config import backend_config as ours
from fx_quant_conformance.refimpl.config.dtype_config import DTypeConfig, DTypeWithConstraints
from fx_quant_conformance.refimpl.config.patterns import MatchAllNode
from fx_quant_conformance.refimpl.errors import ConfigError
from tests.refimpl.support.both_configs import as_theirs, config_of, dtype_configs, first, fuse

PATTERNS = (nn.Linear, F.linear, "view", (nn.Conv2d, nn.ReLU), (nn.Conv2d, nn.BatchNorm2d, F.relu))
KINDS = tuple(ours.ObservationType)


# ---- strategies -------------------------------------------------------------------------------------------

# Every optional key of an entry's dict form, and a value for it.
OPTIONAL: dict[str, Any] = {
    "root_module": nn.Linear,
    "qat_module": nnqat.Linear,
    "reference_quantized_module_for_root": nnqr.Linear,
    "fused_module": nni.LinearReLU,
    "fuser_method": fuse,
    "root_node_getter": first,
    "extra_inputs_getter": first,
    "num_tensor_args_to_observation_type": {1: KINDS[1], 2: KINDS[0]},
    "input_type_to_index": {"weight": 1, "bias": 2},
}


@st.composite
def entry_dicts(draw: st.DrawFn) -> dict[str, Any]:
    """A dict form in the shape that to_dict gives."""
    found: dict[str, Any] = {
        "observation_type": draw(st.sampled_from(KINDS)),
        "dtype_configs": [config.to_dict() for config in draw(st.lists(dtype_configs, max_size=3))],
    }
    key = draw(st.sampled_from(("pattern", "pattern_complex_format")))
    found[key] = draw(st.sampled_from(PATTERNS))
    return found | {key: OPTIONAL[key] for key in draw(st.sets(st.sampled_from(sorted(OPTIONAL))))}


# ---- observation types ------------------------------------------------------------------------------------


@pytest.mark.rule("CFG-01")
def test_observation_types_are_torchs_three() -> None:
    expected = {
        "OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT": 0,
        "OUTPUT_SHARE_OBSERVER_WITH_INPUT": 1,
        "INPUT_OUTPUT_NOT_OBSERVED": 2,
    }
    assert {kind.name: kind.value for kind in ours.ObservationType} == expected
    assert {kind.name: kind.value for kind in theirs.ObservationType} == expected


@pytest.mark.rule("CFG-01")
@pytest.mark.parametrize("value", [0, "OUTPUT_SHARE_OBSERVER_WITH_INPUT"])
def test_anything_else_is_no_observation_type(value: object) -> None:
    with pytest.raises(ConfigError, match="expected one of OUTPUT_USE_DIFFERENT"):
        ours.ObservationType.of(value)


# ---- entries ----------------------------------------------------------------------------------------------

SETTERS: dict[str, tuple[str, Any]] = {
    "set_pattern": ("pattern", (nn.Linear, nn.ReLU)),
    "set_observation_type": ("observation_type", KINDS[1]),
    "add_dtype_config": ("dtype_configs", DTypeConfig(torch.quint8)),
    "set_dtype_configs": ("dtype_configs", [DTypeConfig(torch.quint8), DTypeConfig(torch.qint8)]),
    "set_root_module": ("root_module", nn.Linear),
    "set_qat_module": ("qat_module", nnqat.Linear),
    "set_reference_quantized_module": ("reference_quantized_module", nnqr.Linear),
    "set_fused_module": ("fused_module", nni.LinearReLU),
    "set_fuser_method": ("fuser_method", fuse),
    "_set_root_node_getter": ("_root_node_getter", first),
    "_set_extra_inputs_getter": ("_extra_inputs_getter", first),
    "_set_num_tensor_args_to_observation_type": ("_num_tensor_args_to_observation_type", {1: KINDS[1]}),
    "_set_input_type_to_index": ("_input_type_to_index", {"weight": 1}),
    "_set_pattern_complex_format": ("_pattern_complex_format", (nn.ReLU, nn.Linear)),
}


@pytest.mark.rule("CFG-05")
@pytest.mark.rule("CFG-06")
@pytest.mark.parametrize("setter", SETTERS)
def test_a_setter_changes_one_attribute_and_returns_the_entry_as_torchs_does(setter: str) -> None:
    attribute, value = SETTERS[setter]
    entry, untouched = ours.BackendPatternConfig(), vars(ours.BackendPatternConfig())
    assert getattr(entry, setter)(value) is entry
    expected = [value] if setter.startswith("add") else value
    assert vars(entry) == untouched | {attribute: expected}
    torchs = theirs.BackendPatternConfig()
    assert getattr(torchs, setter)(value) is torchs
    assert getattr(torchs, attribute) == expected


@pytest.mark.rule("CFG-05")
def test_an_entry_has_torchs_attributes_and_no_setter_is_missing() -> None:
    assert set(vars(ours.BackendPatternConfig())) == set(vars(theirs.BackendPatternConfig()))
    setters = {name for name in dir(theirs.BackendPatternConfig) if name.lstrip("_").startswith(("set_", "add_"))}
    assert setters == SETTERS.keys()


@pytest.mark.rule("CFG-07")
@pytest.mark.parametrize("module", [ours, theirs], ids=["ours", "torch"])
def test_only_one_of_pattern_and_complex_format(module: Any) -> None:
    with pytest.raises(ValueError, match="Only one of"):
        module.BackendPatternConfig(nn.Linear)._set_pattern_complex_format(nn.Linear)
    with pytest.raises(ValueError, match="Only one of"):
        module.BackendPatternConfig()._set_pattern_complex_format(nn.Linear).set_pattern(nn.Linear)
    with pytest.raises(ValueError, match="Only one of"):
        module.BackendPatternConfig.from_dict({"pattern": nn.Linear, "pattern_complex_format": nn.Linear})


@pytest.mark.rule("CFG-12")
def test_set_dtype_configs_copies_its_list_where_torch_shares_it() -> None:
    for module, dtype_config, after in ((ours, DTypeConfig, 1), (theirs, theirs.DTypeConfig, 2)):
        shared = [dtype_config(torch.quint8)]
        one, other = (
            module.BackendPatternConfig(pattern).set_dtype_configs(shared) for pattern in (nn.Linear, nn.Conv2d)
        )
        one.add_dtype_config(dtype_config(torch.qint8))
        assert (len(one.dtype_configs), len(other.dtype_configs), len(shared)) == (2, after, after)


@pytest.mark.rule("CFG-13")
@pytest.mark.parametrize(
    ("kind", "key", "nearest"),
    [
        ("DTypeConfig", "bias_type", "bias_dtype"),  # torch's docstring has this key, its code another
        ("BackendPatternConfig", "reference_quantized_module", "reference_quantized_module_for_root"),
        ("BackendConfig", "config", "configs"),
    ],
)
def test_unknown_keys_are_named_with_the_nearest_known_one(kind: str, key: str, nearest: str) -> None:
    our_class = DTypeConfig if kind == "DTypeConfig" else getattr(ours, kind)
    with pytest.raises(ConfigError) as raised:
        our_class.from_dict({key: None})
    assert f"unknown key {key!r}; did you mean {nearest!r}?" in str(raised.value)
    their_class = getattr(theirs, kind)
    assert their_class.from_dict({key: "dropped"}).to_dict() == their_class().to_dict()


@pytest.mark.rule("CFG-13")
def test_an_unknown_key_with_no_near_one_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match="unknown key 'zzz'; known: 'name', 'configs'"):
        ours.BackendConfig.from_dict({"zzz": 1})


# ---- BackendConfig ----------------------------------------------------------------------------------------


@pytest.mark.rule("CFG-09")
@pytest.mark.parametrize("module", [ours, theirs], ids=["ours", "torch"])
def test_a_later_entry_replaces_the_earlier_whole_in_its_place(module: Any) -> None:
    entry = module.BackendPatternConfig
    config = module.BackendConfig("a").set_name("b")
    first_entries = [entry((nn.Linear, nn.ReLU)).set_root_module(nn.Linear), entry(nn.Conv2d)]
    config.set_backend_pattern_configs(first_entries)
    later = entry()._set_pattern_complex_format((nn.ReLU, nn.Linear)).set_fuser_method(fuse)
    assert config.set_backend_pattern_config(later) is config
    assert config.name == "b"
    assert config.configs == [later, first_entries[1]]
    assert config.configs[0].root_module is None


@pytest.mark.rule("CFG-09")
@pytest.mark.parametrize("module", [ours, theirs], ids=["ours", "torch"])
def test_configs_is_a_copy(module: Any) -> None:
    config = module.BackendConfig().set_backend_pattern_config(module.BackendPatternConfig(nn.Linear))
    config.configs.clear()
    assert len(config.configs) == 1


@pytest.mark.rule("CFG-09")
@pytest.mark.rule("CFG-14")
def test_torchs_wildcard_and_ours_make_the_same_pattern() -> None:
    entries = [
        ours.BackendPatternConfig()._set_pattern_complex_format((torch.add, nn.Conv2d, wildcard))
        for wildcard in (MatchAllNode, TheirMatchAllNode)
    ]
    assert config_of(*entries).configs == [entries[1]]


@pytest.mark.rule("CFG-09")
def test_an_entry_without_a_pattern_cannot_be_set() -> None:
    with pytest.raises(ConfigError, match="without a pattern"):
        config_of(ours.BackendPatternConfig())


@pytest.mark.slow
@pytest.mark.rule("CFG-10")
@given(st.lists(entry_dicts(), max_size=3), st.text(max_size=5))
def test_config_dict_forms_agree_with_torchs(entries: list[dict[str, Any]], name: str) -> None:
    found = {"name": name, "configs": entries}
    once = ours.BackendConfig.from_dict(found).to_dict()
    assert ours.BackendConfig.from_dict(once).to_dict() == once
    assert as_theirs(once) == theirs.BackendConfig.from_dict(as_theirs(found)).to_dict()


@pytest.mark.rule("CFG-10")
def test_entries_come_as_objects_or_dicts() -> None:
    entry = ours.BackendPatternConfig(nn.Linear).set_root_module(nn.Linear)
    config = ours.BackendConfig.from_dict({"configs": [entry, {"pattern": nn.Conv2d}]})
    assert config.configs[0] is entry
    assert [item.pattern for item in config.configs] == [nn.Linear, nn.Conv2d]


# ---- torch's objects in the place of ours -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.rule("CFG-14")
@given(st.lists(entry_dicts(), max_size=3))
def test_torchs_config_is_read_by_attribute(entries: list[dict[str, Any]]) -> None:
    torchs = theirs.BackendConfig.from_dict(as_theirs({"name": "theirs", "configs": entries}))
    read = ours.as_backend_config(torchs)
    assert read.to_dict() == ours.BackendConfig.from_dict({"name": "theirs", "configs": entries}).to_dict()


@pytest.mark.rule("CFG-14")
def test_torchs_parts_are_taken_one_by_one() -> None:
    constraint = theirs.DTypeWithConstraints(dtype=torch.qint8, scale_min_lower_bound=0.5)
    mixed = DTypeConfig(constraint, torch.qint8)  # type: ignore[arg-type]
    assert mixed.input_dtype_with_constraints == DTypeWithConstraints(torch.qint8, scale_min_lower_bound=0.5)
    entry = theirs.BackendPatternConfig(nn.Linear).add_dtype_config(theirs.DTypeConfig(constraint))
    config = ours.BackendConfig().set_backend_pattern_config(entry)  # type: ignore[arg-type]
    assert config.configs[0].dtype_configs == [DTypeConfig(constraint)]  # type: ignore[arg-type]
    assert isinstance(config.configs[0].observation_type, ours.ObservationType)


@pytest.mark.rule("CFG-14")
def test_our_own_objects_are_taken_as_they_are() -> None:
    config = config_of(ours.BackendPatternConfig(nn.Linear))
    assert ours.as_backend_config(config) is config
    with pytest.warns(FutureWarning, match="a dict in the place of a BackendConfig is deprecated"):
        assert ours.as_backend_config(config.to_dict()).to_dict() == config.to_dict()
    assert ours.as_backend_pattern_config(config.configs[0]) is config.configs[0]


@pytest.mark.rule("CFG-14")
@pytest.mark.parametrize("value", [None, nn.Linear])
def test_objects_without_the_attributes_are_rejected(value: object) -> None:
    for read in (ours.as_backend_config, ours.as_backend_pattern_config, DTypeConfig.of):
        with pytest.raises(ConfigError, match="expected a") as raised:
            read(value)
        assert repr(value) in str(raised.value)


@pytest.mark.rule("CFG-14")
@pytest.mark.parametrize("name", ["native", "onednn"])
def test_torchs_own_readers_read_ours_by_their_private_name(name: str) -> None:
    torchs: Any = getattr(theirs, f"get_{name}_backend_config")()
    read: Any = ours.as_backend_config(torchs)

    def plain(pattern: Any) -> Any:
        if isinstance(pattern, tuple):
            return tuple(map(plain, pattern))
        return MatchAllNode if pattern is TheirMatchAllNode else pattern

    mine, expected = read._pattern_complex_format_to_config, torchs._pattern_complex_format_to_config
    assert list(mine) == list(map(plain, expected)) and list(mine.values()) == read.configs
    for reader in ("get_pattern_to_input_type_to_index", "get_module_to_qat_module", "get_fuser_method_mapping"):
        found, wanted = (getattr(their_utils, reader)(config) for config in (read, torchs))
        assert list(found) == list(map(plain, wanted))
