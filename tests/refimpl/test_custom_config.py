"""The custom configs: torch's attributes, dict forms and front-door conversions (rules STD-01, CUS-01 to CUS-04)."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx
from torch import nn
from torch.ao.quantization import default_qconfig
from torch.ao.quantization.backend_config import get_native_backend_config
from torch.ao.quantization.fx import custom_config as torchs
from torch.ao.quantization.qconfig_mapping import QConfigMapping as TorchMapping
from torch.ao.quantization.quant_type import QuantType as TorchQuantType

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl.config import custom_config as ours
from fx_quant_conformance.refimpl.config.backend_config import BackendConfig
from fx_quant_conformance.refimpl.config.custom_config import QuantType
from fx_quant_conformance.refimpl.config.qconfig import QConfigMapping
from fx_quant_conformance.refimpl.errors import ConfigError, QConfigError

INPUTS = (torch.zeros(1, 3),)
NAMES = ("FuseCustomConfig", "PrepareCustomConfig", "ConvertCustomConfig")


def filled(module: Any, name: str, mapping: Any, backend_config: Any) -> Any:
    """Set every part of a custom config of torch's module or of ours: the calls are the same."""
    config = getattr(module, name)().set_preserved_attributes(["note"])
    if name == "ConvertCustomConfig":
        return config.set_observed_to_quantized_mapping(nn.Linear, nn.Identity)
    if name == "FuseCustomConfig":
        return config
    child = module.PrepareCustomConfig().set_input_quantized_indexes([0])
    return (
        config.set_standalone_module_name("a.b", mapping, INPUTS, child, backend_config)
        .set_standalone_module_class(nn.Conv2d, None, INPUTS, None, None)
        .set_float_to_observed_mapping(nn.Linear, nn.Bilinear)
        .set_non_traceable_module_names(["c"])
        .set_non_traceable_module_classes([nn.LSTM])
        .set_input_quantized_indexes([0, 1])
        .set_output_quantized_indexes([2])
    )


@pytest.mark.rule("CUS-04")
@pytest.mark.parametrize("name", NAMES)
def test_attributes_and_dict_form_are_torchs_and_the_round_trip_is_the_identity(name: str) -> None:
    mapping, torch_mapping = (kind().set_global(default_qconfig) for kind in (QConfigMapping, TorchMapping))
    config = BackendConfig("vendor")
    mine, theirs = filled(ours, name, mapping, config), filled(torchs, name, torch_mapping, config)
    kind = getattr(ours, name)
    assert vars(kind()) == vars(getattr(torchs, name)()), "the empty ones differ"
    assert kind.from_dict(mine.to_dict()) == mine != kind().set_preserved_attributes(["other"])
    assert kind.from_dict({}) == kind() and kind().to_dict() == {}
    assert vars(mine).keys() == vars(theirs).keys()
    found, expected = mine.to_dict(), theirs.to_dict()
    for form in (found, expected):  # QConfigMapping has its own comparison: here only that it is in dict form
        for entry in form.get("standalone_module_name", []):
            assert entry[1][""] == default_qconfig
    strip = [("a.b", {"input_quantized_idxs": [0]}, config)]
    for form in (found, expected):
        assert [(e[0], e[3], e[4]) for e in form.pop("standalone_module_name", [])] in ([], strip)
    assert found == expected


@pytest.mark.rule("CFG-14")
@pytest.mark.rule("STD-01")
def test_torchs_objects_are_taken_with_all_that_is_in_them() -> None:
    mapping = TorchMapping().set_module_name("x", default_qconfig)
    taken = ours.PrepareCustomConfig.of(filled(torchs, "PrepareCustomConfig", mapping, get_native_backend_config()))
    entry = taken.standalone_module_names["a.b"]
    assert isinstance(entry.qconfig_mapping, QConfigMapping)
    assert entry.qconfig_mapping.module_name_qconfigs == {"x": default_qconfig}
    assert entry.example_inputs is INPUTS
    assert entry.prepare_custom_config == ours.PrepareCustomConfig().set_input_quantized_indexes([0])
    assert isinstance(entry.backend_config, BackendConfig)
    assert entry.backend_config.name == "native"
    assert taken.standalone_module_classes == {nn.Conv2d: ours.StandaloneModuleConfigEntry(None, INPUTS, None, None)}
    assert taken.float_to_observed_mapping == {QuantType.STATIC: {nn.Linear: nn.Bilinear}}
    assert (taken.non_traceable_module_names, taken.non_traceable_module_classes) == (["c"], [nn.LSTM])
    assert (taken.input_quantized_indexes, taken.output_quantized_indexes) == ([0, 1], [2])
    assert taken.preserved_attributes == ["note"]


@pytest.mark.rule("CUS-04")
@pytest.mark.rule("CFG-14")
@pytest.mark.parametrize("name", NAMES)
def test_none_and_ours_come_in_silence_and_a_dict_with_torchs_kind_of_warning(name: str) -> None:
    kind = getattr(ours, name)
    config = kind().set_preserved_attributes(["note"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kind.of(None) == kind()
        assert kind.of(config) is config
        assert kind.of(getattr(torchs, name)().set_preserved_attributes(["note"])) == config
    with pytest.warns(FutureWarning, match=f"a dict in the place of a {name} is deprecated"):
        assert kind.of({"preserved_attributes": ["note"]}) == config


@pytest.mark.rule("CUS-04")
def test_dicts_inside_a_dict_are_taken_too() -> None:
    form = {"standalone_module_class": [(nn.Conv2d, {"": None}, INPUTS, {"input_quantized_idxs": [0]}, {"name": "v"})]}
    entry = ours.PrepareCustomConfig.from_dict(form).standalone_module_classes[nn.Conv2d]
    assert entry.qconfig_mapping == QConfigMapping()
    assert entry.prepare_custom_config == ours.PrepareCustomConfig().set_input_quantized_indexes([0])
    assert entry.backend_config is not None
    assert entry.backend_config.name == "v"


@pytest.mark.rule("CFG-13")
def test_an_unknown_key_is_refused_with_the_nearest_and_torch_drops_it() -> None:
    wrong = {"input_quantized_idx": [0]}
    assert torchs.PrepareCustomConfig.from_dict(wrong).to_dict() == {}
    with pytest.raises(
        ConfigError, match=r"PrepareCustomConfig.*'input_quantized_idx'; did you mean 'input_quantized_"
    ):
        ours.PrepareCustomConfig.from_dict(wrong)
    with pytest.raises(ConfigError, match=r"FuseCustomConfig\.from_dict: unknown key 'input_quantized_idxs'"):
        ours.FuseCustomConfig.from_dict({"input_quantized_idxs": [0]})


@pytest.mark.rule("CUS-04")
@pytest.mark.parametrize("wrong", [3, ours.ConvertCustomConfig()])
def test_anything_else_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="expected a PrepareCustomConfig, found"):
        ours.PrepareCustomConfig.of(wrong)


@pytest.mark.rule("CUS-04")
def test_wrong_parts_are_named() -> None:
    with pytest.raises(ConfigError, match=r"standalone_module_name: expected a list of rows of 5 items, found \[\('a'"):
        ours.PrepareCustomConfig.from_dict({"standalone_module_name": [("a", None)]})
    with pytest.raises(QConfigError, match="expected a QConfigMapping, found 3"):
        ours.PrepareCustomConfig().set_standalone_module_name("a", 3, INPUTS, None, None)
    with pytest.raises(
        ConfigError, match=r"FuseCustomConfig.preserved_attributes: expected a list of strings, found 'note'"
    ):
        ours.FuseCustomConfig().set_preserved_attributes("note")  # type: ignore[arg-type]


@pytest.mark.rule("CUS-01")
def test_modes_are_torchs_by_name_and_value() -> None:
    assert {mode.name: mode.value for mode in QuantType} == {mode.name: mode.value for mode in TorchQuantType}
    for mode in TorchQuantType:
        assert QuantType.of(mode) is QuantType.of(mode.name.lower()) is QuantType[mode.name]
    config = ours.ConvertCustomConfig().set_observed_to_quantized_mapping(nn.Linear, nn.Identity, QuantType.DYNAMIC)
    assert config.observed_to_quantized_mapping[TorchQuantType.DYNAMIC] == {nn.Linear: nn.Identity}  # type: ignore[index]
    with pytest.raises(ConfigError, match="expected one of 'dynamic', 'static', 'qat', 'weight_only', found 'statik'"):
        QuantType.of("statik")


@pytest.mark.rule("CUS-01")
def test_observed_classes_may_be_given_for_each_mode_where_torch_takes_static_alone() -> None:
    with pytest.raises(ValueError, match="only supported for static"):
        torchs.PrepareCustomConfig().set_float_to_observed_mapping(nn.Linear, nn.Bilinear, TorchQuantType.DYNAMIC)
    config = ours.PrepareCustomConfig().set_float_to_observed_mapping(nn.Linear, nn.Bilinear, QuantType.DYNAMIC)
    assert config.to_dict() == {"float_to_observed_custom_module_class": {"dynamic": {nn.Linear: nn.Bilinear}}}


@pytest.mark.rule("CUS-04")
def test_the_warning_of_a_dict_points_at_the_users_call_at_every_front_door() -> None:
    model, vendor = nn.Sequential(nn.Linear(3, 3)).eval(), {"name": "vendor"}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        refimpl.fuse_fx(model, {}, vendor)
        prepared = refimpl.prepare_fx(model, {"": None}, INPUTS, {}, backend_config=vendor)
        refimpl.prepare_qat_fx(copy.deepcopy(model).train(), {"": None}, INPUTS, {}, backend_config=vendor)
        refimpl.convert_fx(copy.deepcopy(prepared), {}, qconfig_mapping={"": None}, backend_config=vendor)
        refimpl.convert_to_reference_fx(prepared, {}, qconfig_mapping={"": None}, backend_config=vendor)
    found = [warning for warning in seen if warning.category is FutureWarning]
    assert {warning.filename for warning in found} == {__file__}
    assert len({(warning.lineno, str(warning.message)) for warning in found}) == len(found) == 2 + 3 + 3 + 3 + 3
