"""Custom modules that convert alone is told of: leaves without an observed class (rule CUS-01)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.ao.quantization.quant_type import QuantType as TorchQuantType

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import ConfigError
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.both_core import CORE, REFERENCE, TORCHS, X, assert_parity, calls, case, prepared, spots
from tests.refimpl.support.parity import parity
from tests.refimpl.test_custom_modules import DYNAMIC, RUNS, WEIGHT_ONLY, DynamicQuantized, Own, Quantized, net

Makers = tuple[Callable[[], Any], Callable[[], Any]]
MODES = [("DYNAMIC", DYNAMIC), ("WEIGHT_ONLY", WEIGHT_ONLY)]
MODE_IDS = ["dynamic", "weight-only"]


def torch_configs(mode: str, to: type = DynamicQuantized, how: str = "set_non_traceable_module_classes") -> Makers:
    """Prepare keeps the module whole, convert swaps its class."""
    value: Any = ["own"] if how.endswith("names") else [Own]
    return (
        lambda: getattr(TORCHS.PrepareCustomConfig(), how)(value),
        lambda: TORCHS.ConvertCustomConfig().set_observed_to_quantized_mapping(Own, to, TorchQuantType[mode]),
    )


@pytest.mark.rule("CUS-01")
@pytest.mark.parametrize(("mode", "qconfig"), MODES, ids=MODE_IDS)
@pytest.mark.parametrize("run", RUNS)
def test_a_leaf_that_convert_is_told_of_is_torchs(run: str, mode: str, qconfig: Any) -> None:
    def mapping() -> Any:
        return flows.global_mapping(qconfig)

    forms = CORE if run != "last" else (*CORE, "lowered")
    assert_parity(lambda: net(RUNS[run]), mapping, custom=torch_configs(mode), converts=forms)


@pytest.mark.rule("CUS-01")
def test_it_may_be_named_and_is_swapped_in_convert_alone() -> None:
    custom = torch_configs("DYNAMIC", how="set_non_traceable_module_names")
    assert_parity(net, lambda: flows.global_mapping(DYNAMIC), custom=custom, converts=REFERENCE)
    prepare_config, convert_config = (make() for make in torch_configs("DYNAMIC"))
    found = prepared(net(), flows.global_mapping(DYNAMIC), prepare_custom_config=prepare_config)
    assert type(found.get_submodule("own")) is Own
    assert [value for _, value, _ in spots(found)] == ["x", "own"], "what goes into it is not observed"
    for convert in (refimpl.convert_to_reference_fx, refimpl.convert_fx):
        model = convert(found, convert_config)
        assert type(model.get_submodule("own")) is DynamicQuantized
        torch.testing.assert_close(model(X), net()(X), atol=0.1, rtol=0.1)
    assert type(refimpl.convert_to_reference_fx(found).get_submodule("own")) is Own


@pytest.mark.rule("CUS-01")
@pytest.mark.rule("QCM-03")
def test_without_a_qconfig_it_stays_and_torch_fails() -> None:
    def mapping() -> Any:
        return flows.global_mapping(DYNAMIC).set_module_name("own", None)

    found = parity(case(net, mapping, custom=torch_configs("DYNAMIC"), converts=REFERENCE))
    assert list(found) == ["reference"] and "torch raises AssertionError: " in found["reference"]
    prepare_config, convert_config = (make() for make in torch_configs("DYNAMIC"))
    model = prepared(net(), mapping(), prepare_custom_config=prepare_config)
    assert type(refimpl.convert_to_reference_fx(model, convert_config).get_submodule("own")) is Own


@pytest.mark.rule("CUS-01")
def test_a_class_for_another_mode_is_an_error() -> None:
    prepare_config, convert_config = (make() for make in torch_configs("WEIGHT_ONLY"))
    model = prepared(net(), flows.global_mapping(DYNAMIC), prepare_custom_config=prepare_config)
    with pytest.raises(ConfigError, match="'own': observed_to_quantized_mapping has no class for Own in mode dynamic"):
        refimpl.convert_to_reference_fx(model, convert_config)


@pytest.mark.rule("CUS-01")
def test_a_static_one_works_between_quantized_values_as_in_torch() -> None:
    assert_parity(net, custom=torch_configs("STATIC", Quantized), converts=("reference", "lowered"))


@pytest.mark.rule("CUS-01")
@pytest.mark.parametrize("run", ["last", "between float ops", "before a sharing op"])
def test_a_static_one_that_is_not_observed_around_is_an_error(run: str) -> None:
    """Torch raises AssertionError, or returns a model that cannot run."""
    prepare_config, convert_config = (make() for make in torch_configs("STATIC", Quantized))
    model = prepared(net(RUNS[run]), prepare_custom_config=prepare_config)
    with pytest.raises(ConfigError, match=r"'own': a static one takes and returns .*name Own in set_float_to_observed"):
        refimpl.convert_to_reference_fx(model, convert_config)
    assert "Own" in calls(refimpl.convert_to_reference_fx(model)), "without a class for it, it is a float module"
