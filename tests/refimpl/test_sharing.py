"""Ops that share an observer: which slots are one group, and whose constructor it has (OBS-02, OBS-07, OBS-08)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    ObservationType,
    QConfigMapping,
)
from tests.refimpl.support.small_plans import INPUTS, OURS, U8, Net, groups, plan


@pytest.mark.rule("OBS-07")
@pytest.mark.rule("PAT-08")
def test_a_methods_operand_by_keyword_counts() -> None:
    kinds = {0: ObservationType.INPUT_OUTPUT_NOT_OBSERVED, 1: ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT}
    entry = BackendPatternConfig("add").add_dtype_config(DTypeConfig(U8, U8))
    config = BackendConfig("method").set_backend_pattern_config(
        entry._set_num_tensor_args_to_observation_type(
            {**kinds, 2: ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT}
        )
    )
    for run in (lambda net, x, y: x.add(y), lambda net, x, y: x.add(other=y)):
        mapping = QConfigMapping().set_global(OURS)
        found = refimpl.prepare_fx(Net(run).eval(), mapping, INPUTS, backend_config=config)
        assert groups(refimpl.explain(found).plan) == [("x", 0), ("y", 1), ("add", 2)]


@pytest.mark.rule("OBS-08")
def test_every_element_of_a_list_is_an_input_and_all_share() -> None:
    found = plan(lambda net, x, y: torch.cat([net.a(x), y, net.b(x)], 1))
    shared = {group for value, group in groups(found) if value in ("a", "y", "b", "cat")}
    assert len(shared) == 1 and len(groups(found)) == 5


@pytest.mark.rule("OBS-02")
def test_a_later_element_that_a_sharing_op_made_keeps_its_grid_and_joins_by_a_second_slot() -> None:
    found = plan(lambda net, x, y: torch.cat([net.a(x).unsqueeze(0), net.b(x).reshape(1, 3, 4)], 0).relu())
    of_b, of_cat = groups(found)[3][1], groups(found)[-1][1]
    assert groups(found)[3:] == [("b", of_b), ("reshape", of_b), ("reshape", of_cat), ("cat", of_cat), ("relu", of_cat)]
    assert [slot.consumers for slot in found.slots if slot.value == "reshape"] == [None, ("cat",)]


@pytest.mark.rule("OBS-02")
def test_a_later_element_that_shares_with_the_first_already_has_no_second_slot() -> None:
    found = plan(lambda net, x, y: (lambda a: torch.cat([a, F.relu(a)], 1))(net.a(x)))
    assert [value for value, _ in groups(found)] == ["x", "a", "relu", "cat"]


@pytest.mark.rule("OBS-02")
@pytest.mark.parametrize("name", ["x86", "qnnpack"])
def test_the_first_elements_observer_is_that_of_all_though_a_sigmoid_was_computed_before_it(name: str) -> None:
    def run(net: Net, x: Tensor, y: Tensor) -> Tensor:
        gate = torch.sigmoid(net.b(x))
        return torch.cat([net.a(x), gate], 1)

    model, mapping = Net(run).eval(), refimpl.get_default_qconfig_mapping(name)
    prepared = refimpl.prepare_fx(model, mapping, INPUTS)
    observer = mapping.global_qconfig.activation()
    shared = {slot.value: prepared.get_submodule(slot.name) for slot in refimpl.explain(prepared).plan.slots}
    assert shared["cat"] is shared["a"] is shared["sigmoid"] and type(shared["cat"]) is type(observer)
