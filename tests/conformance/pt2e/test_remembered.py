"""Remembering torchao's patterns: the same models, in less time."""

# ruff: noqa: E402
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.support.torchao import require_torchao

require_torchao()

from torchao.quantization.pt2e import export_utils, move_exported_model_to_eval, qat_utils, utils
from torchao.quantization.pt2e.export_utils import WrapperModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e

from fx_quant_conformance.conformance.pt2e import remembered
from fx_quant_conformance.conformance.pt2e.remembered import remember_patterns
from fx_quant_conformance.refimpl import default_backend_config, get_default_qat_qconfig_mapping
from fx_quant_conformance.refimpl.exported.pt2e import BackendConfigQuantizer

_EXAMPLE = (torch.ones(1, 1, 3, 3), torch.ones(1, 1, 1, 1))


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[object, GraphModule]:
    """What is remembered: nothing at first."""
    empty: dict[object, GraphModule] = {}
    monkeypatch.setattr(remembered, "_MEMORY", empty)
    return empty


def _export(pattern: object, *example: Tensor, **kwargs: Tensor) -> GraphModule:
    exported: GraphModule = utils._get_aten_graph_module_for_pattern(pattern, example or _EXAMPLE, **kwargs)
    return exported


def _wrap(function: Callable[..., Tensor], is_relu: bool) -> Any:
    def pattern(x: Tensor, weight: Tensor, **kwargs: Tensor) -> Tensor:
        y = function(x, weight, **kwargs)
        return torch.relu(y) if is_relu else y

    return WrapperModule(pattern)


def _list_nodes(model: GraphModule) -> list[tuple[str, str, str, str]]:
    return [(node.name, str(node.target), str(node.args), str(node.kwargs)) for node in model.graph.nodes]


def _train_and_convert() -> GraphModule:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()).train()
    inputs = (torch.randn(2, 2, 5, 5),)
    quantizer = BackendConfigQuantizer(default_backend_config(), get_default_qat_qconfig_mapping("x86"), is_qat=True)
    prepared = prepare_qat_pt2e(torch.export.export(model, inputs).module(), quantizer)
    prepared(*inputs)
    move_exported_model_to_eval(prepared)
    prepared(*inputs)
    converted: GraphModule = convert_pt2e(prepared)
    return converted


@pytest.mark.slow
def test_a_trained_model_is_the_same_and_patterns_are_exported_once(memory: dict[object, GraphModule]) -> None:
    expected = _train_and_convert()
    with remember_patterns():
        first = _train_and_convert()
        count = len(memory)
        second = _train_and_convert()
    assert count > 100
    assert len(memory) == count
    inputs = torch.randn(2, 2, 5, 5)
    for model in (first, second):
        assert _list_nodes(model) == _list_nodes(expected)
        assert torch.equal(model(inputs), expected(inputs))


@pytest.mark.slow
def test_what_a_pattern_holds_tells_it_from_others(memory: dict[object, GraphModule]) -> None:
    convolve, multiply = torch.nn.functional.conv2d, torch.mul
    with remember_patterns():
        nodes = [
            _list_nodes(_export(_wrap(function, is_relu)))
            for function in (convolve, multiply)
            for is_relu in (True, False)
        ]
        again = _list_nodes(_export(_wrap(multiply, is_relu=True)))
    assert len(memory) == len({str(each) for each in nodes}) == 4
    assert again == nodes[2]


@pytest.mark.slow
def test_other_inputs_are_another_pattern(memory: dict[object, GraphModule]) -> None:
    """Of another shape, of another dtype, and with a keyword."""
    convolution = _wrap(torch.nn.functional.conv2d, is_relu=False)
    with remember_patterns():
        _export(convolution)
        _export(convolution, torch.ones(1, 1, 4, 4), torch.ones(1, 1, 1, 1))
        _export(convolution, *(each.double() for each in _EXAMPLE))
        _export(convolution, *_EXAMPLE, bias=torch.ones(1))
    assert len(memory) == 4


def test_a_pattern_may_be_changed_by_its_caller() -> None:
    with remember_patterns():
        first = _export(_wrap(torch.mul, is_relu=True))
        count = len(first.graph.nodes)
        relu = next(node for node in first.graph.nodes if "relu" in node.name)
        relu.replace_all_uses_with(relu.args[0])
        first.graph.erase_node(relu)
        assert len(_export(_wrap(torch.mul, is_relu=True)).graph.nodes) == count


@pytest.mark.slow
def test_what_no_key_can_be_made_of_is_exported_each_time(memory: dict[object, GraphModule]) -> None:
    with remember_patterns():
        for _ in range(2):
            assert "linear" in str(_list_nodes(_export(nn.Linear(2, 2), torch.ones(1, 2))))
    assert memory == {}


def test_the_function_is_replaced_where_it_was_imported_and_put_back() -> None:
    name = remembered._NAME
    own = getattr(utils, name)
    with pytest.raises(ValueError, match="leave"), remember_patterns():
        assert getattr(qat_utils, name) is getattr(utils, name) is not own
        setattr(export_utils, name, getattr(utils, name))  # as a module that is imported now has it
        raise ValueError("leave")
    assert getattr(qat_utils, name) is getattr(utils, name) is vars(export_utils).pop(name) is own
