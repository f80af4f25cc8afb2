"""derive_config: what hand-written Quantizers annotate is what the derived entries say."""

# ruff: noqa: E402
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic as nni
import torch.ao.nn.intrinsic.qat as nniqat
import torch.ao.nn.qat as nnqat
import torch.ao.nn.quantized.reference as nnqr
import torch.nn.functional as F
from torch import nn

from tests.support.torchao import require_torchao

require_torchao()

from fx_quant_conformance.conformance.pt2e.derive import ProbeRow, derive_config
from fx_quant_conformance.refimpl import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    ObservationType,
)
from fx_quant_conformance.refimpl.config.backend_config import lint_config
from fx_quant_conformance.refimpl.config.patterns import Pattern, normal_form
from tests.conformance.support import quantizers as q

DIFFERENT = ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT
SHARE = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
U8 = DTypeWithConstraints(torch.quint8, scale_min_lower_bound=2**-12)
S8_WEIGHT = DTypeWithConstraints(torch.qint8, quant_min_lower_bound=-127, quant_max_upper_bound=127)
STATIC_WEIGHTED = DTypeConfig(U8, U8, S8_WEIGHT, torch.float32)
STATIC = DTypeConfig(U8, U8)
aten = torch.ops.aten


def derive(
    by_target: dict[Any, q.Annotate], *globs: str, is_qat: bool = False
) -> tuple[BackendConfig, dict[str, ProbeRow]]:
    config, rows = derive_config(q.ByTarget(by_target), "mine", is_qat=is_qat, globs=globs)
    assert config.name == "mine"
    assert lint_config(config) == ()
    return config, {row.pattern: row for row in rows}


def entry_of(config: BackendConfig, pattern: Pattern) -> BackendPatternConfig:
    [entry] = [each for each in config.configs if each.normal_pattern == normal_form(pattern)]
    return entry


def claim_of(config: BackendConfig, pattern: Pattern) -> tuple[ObservationType, list[DTypeConfig]]:
    entry = entry_of(config, pattern)
    return entry.observation_type, entry.dtype_configs


@pytest.mark.slow
def test_a_static_linear_layer_with_its_weight_per_channel() -> None:
    config, rows = derive({aten.linear.default: q.weighted()}, "nn.Linear", "F.linear", "nn.Conv2d", "nnqat.Linear")
    assert [entry.normal_pattern for entry in config.configs] == [nn.Linear, F.linear]
    assert claim_of(config, nn.Linear) == claim_of(config, F.linear) == (DIFFERENT, [STATIC_WEIGHTED])
    module = entry_of(config, nn.Linear)
    assert (module.root_module, module.reference_quantized_module, module.qat_module) == (nn.Linear, nnqr.Linear, None)
    assert entry_of(config, F.linear)._input_type_to_index == {"weight": 1, "bias": 2}
    assert rows["nn.Linear"].schemes == ("per_channel_symmetric",)
    assert rows["nn.Linear"].notes == ()
    assert rows["nn.Conv2d"].reason == "not annotated"
    assert "nnqat.Linear" not in rows


def test_a_cat_that_shares_one_observer() -> None:
    config, _ = derive({aten.cat.default: q.shared}, "torch.cat")
    assert claim_of(config, torch.cat) == (SHARE, [STATIC])


def test_a_sigmoid_with_fixed_qparams_between_quantized_ops() -> None:
    by_target = {aten.sigmoid.default: lambda node: q.mark(node, {}, q.SIGMOID), aten.linear.default: q.weighted()}
    config, rows = derive(by_target, "nn.Sigmoid")
    fixed = DTypeWithConstraints(torch.quint8, scale_exact_match=1 / 256, zero_point_exact_match=0)
    assert claim_of(config, nn.Sigmoid) == (DIFFERENT, [DTypeConfig(fixed, fixed)])
    assert rows["nn.Sigmoid"].notes == ("only between quantized ops",)


def test_a_sigmoid_with_fixed_qparams_that_nothing_is_quantized_before() -> None:
    _, rows = derive({aten.sigmoid.default: lambda node: q.mark(node, {}, q.SIGMOID)}, "nn.Sigmoid")
    assert rows["nn.Sigmoid"].reason == "no input is quantized: a dtype config is about all inputs"


def test_a_dynamic_linear_layer() -> None:
    config, _ = derive({aten.linear.default: q.weighted(q.DYNAMIC, q.WEIGHT, None)}, "nn.Linear")
    first = DTypeWithConstraints(torch.qint8, scale_min_lower_bound=2**-10)
    dynamic = DTypeConfig(first, torch.float32, S8_WEIGHT, torch.float32, is_dynamic=True)
    assert claim_of(config, nn.Linear) == (DIFFERENT, [dynamic])


@pytest.mark.slow
def test_a_quantizer_that_raises_on_one_pattern_costs_that_pattern_only() -> None:
    by_target = {aten.linear.default: q.weighted(), aten.conv2d.default: q.refuse}
    config, rows = derive(by_target, "nn.Linear", "nn.Conv2d", "F.relu")
    assert [entry.normal_pattern for entry in config.configs] == [nn.Linear]
    assert rows["nn.Conv2d"].reason == "the Quantizer raised: ValueError: no rule for aten.conv2d.default"
    assert rows["F.relu"].reason == "not annotated"


def test_ops_that_are_annotated_one_by_one_are_no_pattern() -> None:
    by_target = {aten.conv2d.default: q.weighted(), aten.relu.default: q.elementwise()}
    config, rows = derive(by_target, "nn.Conv2d", "nn.ReLU", "nn.Conv2d+nn.ReLU")
    assert claim_of(config, nn.Conv2d) == (DIFFERENT, [STATIC_WEIGHTED])
    assert claim_of(config, nn.ReLU) == (DIFFERENT, [STATIC])
    assert rows["nn.Conv2d+nn.ReLU"].reason == "not annotated as one: observed inside, conv2d → relu"


@pytest.mark.slow
def test_ops_that_are_annotated_as_one_are_a_pattern_with_its_fused_module() -> None:
    by_target = {aten.conv2d.default: q.weighted_with_relu()}
    config, rows = derive(by_target, "nn.Conv2d", "nn.ReLU", "nn.Conv2d+nn.ReLU", "nni.ConvReLU2d", "nn.Conv2d+nn.Tanh")
    entry = entry_of(config, (nn.Conv2d, nn.ReLU))
    assert claim_of(config, (nn.Conv2d, nn.ReLU)) == (DIFFERENT, [STATIC_WEIGHTED])
    assert entry.fused_module is nni.ConvReLU2d
    assert entry.fuser_method is not None
    assert rows["nn.ReLU"].reason == "not annotated"
    assert "nn.Conv2d+nn.Tanh" not in rows  # a composition of no config, and not claimed


def test_a_composition_that_no_config_has_is_claimed_by_its_root() -> None:
    def with_tanh(node: Any) -> None:
        [tanh] = node.users
        q.mark(node, {node.args[0]: q.ACTIVATION, node.args[1]: q.WEIGHT}, None)
        q.mark(tanh, {}, q.ACTIVATION) if tanh.target is aten.tanh.default else q.weighted()(node)

    config, _ = derive({aten.conv1d.default: with_tanh}, "nn.Conv1d", "nn.Conv1d+nn.Tanh")
    entry = entry_of(config, (nn.Conv1d, nn.Tanh))
    assert (entry.root_module, entry.reference_quantized_module) == (nn.Conv1d, nnqr.Conv1d)
    assert entry.dtype_configs == [STATIC_WEIGHTED]


def test_a_fused_module_names_its_root_where_the_root_has_no_entry() -> None:
    def only_with_relu(node: Any) -> None:
        if next(iter(node.users)).target is aten.relu.default:
            q.weighted_with_relu()(node)

    config, rows = derive({aten.conv2d.default: only_with_relu}, "nn.Conv2d", "nn.Conv2d+nn.ReLU", "nni.ConvReLU2d")
    assert rows["nn.Conv2d"].reason == "not annotated"
    fused = entry_of(config, nni.ConvReLU2d)
    assert (fused.root_module, fused.reference_quantized_module) == (nn.Conv2d, nnqr.Conv2d)


@pytest.mark.slow
def test_inputs_only_are_a_claim_where_the_reader_quantizes_the_output_and_no_pattern_with_what_is_left_out() -> None:
    config, rows = derive({aten.linear.default: q.weighted(output=None)}, "nn.Linear", "nn.Linear+nn.Tanh")
    assert claim_of(config, nn.Linear) == (DIFFERENT, [STATIC_WEIGHTED])
    assert rows["nn.Linear"].notes == ("the output is quantized where its reader is",)
    assert rows["nn.Linear+nn.Tanh"].reason == "not annotated as one: tanh left out"


def test_inputs_only_is_no_claim_where_nothing_quantizes_the_output() -> None:
    _, rows = derive({aten.mul.Tensor: q.elementwise(output=None)}, "torch.mul")
    assert rows["torch.mul"].reason == (
        "inputs are quantized and the output is not: a static dtype config has no words for it"
    )


@pytest.mark.slow
def test_what_is_annotated_only_behind_a_quantized_op() -> None:
    by_target = {aten.linear.default: q.weighted(), aten.max_pool2d.default: q.shared_behind_quantized}
    config, rows = derive(by_target, "nn.MaxPool2d")
    assert claim_of(config, nn.MaxPool2d) == (SHARE, [STATIC])
    assert rows["nn.MaxPool2d"].notes == ("only between quantized ops",)


def test_a_weight_alone() -> None:
    by_target = {aten.embedding.default: lambda node: q.mark(node, {node.args[0]: q.WEIGHT})}
    config, _ = derive(by_target, "nn.Embedding")
    assert claim_of(config, nn.Embedding) == (DIFFERENT, [DTypeConfig(torch.float32, torch.float32, S8_WEIGHT)])


def test_a_derived_bias_is_a_note() -> None:
    config, rows = derive({aten.linear.default: q.weighted(bias=q.derived_bias)}, "nn.Linear")
    assert claim_of(config, nn.Linear) == (DIFFERENT, [STATIC_WEIGHTED])
    [note] = rows["nn.Linear"].notes
    assert note.startswith("bias: int32, derived: Capabilities(int32_bias=True)")


@pytest.mark.parametrize(
    ("target", "annotate", "pattern", "reason"),
    [
        (aten.add.Tensor, q.first_input_only, "torch.add", "only 1 of 2 inputs are quantized"),
        (aten.cat.default, q.half_shared, "torch.cat", "the output shares the observer of one input"),
        (aten.linear.default, q.weighted(q.FLOAT8, output=q.FLOAT8), "nn.Linear", "activation of torch.float8_e4m3fn"),
        (aten.linear.default, q.weighted(bias=q.WEIGHT), "nn.Linear", "bias of int8 with an observer of its own"),
        (aten.linear.default, q.weighted(weight=q.ALONG_INPUTS), "nn.Linear", "its weight is quantized along axis 1"),
        (aten.linear.default, q.weighted(weight=None), "nn.Linear", "inputs are quantized and the weight is not"),
        (aten.linear.default, q.weighted(q.DYNAMIC), "nn.Linear", "inputs are quantized dynamically"),
        (aten.mul.Tensor, q.elementwise(q.DYNAMIC, None), "torch.mul", "2 inputs are quantized dynamically"),
        (aten.prelu.default, q.elementwise(), "nn.PReLU", "its weight is quantized, and an entry for it has none"),
    ],
)
def test_what_a_config_has_no_words_for(target: Any, annotate: q.Annotate, pattern: str, reason: str) -> None:
    config, rows = derive({target: annotate}, pattern)
    assert rows[pattern].reason.startswith(reason)
    assert config.configs == []


def test_dtypes_that_torch_has_no_quantized_tensors_of_are_claimed_as_they_are() -> None:
    config, _ = derive({aten.linear.default: q.weighted(q.INT16, output=q.INT16)}, "nn.Linear")
    assert claim_of(config, nn.Linear) == (DIFFERENT, [DTypeConfig(torch.int16, torch.int16, S8_WEIGHT, torch.float32)])


def test_an_operand_that_is_a_number() -> None:
    config, rows = derive(
        {aten.add.Tensor: q.elementwise(), aten.mul.Tensor: q.shared_with_number}, "torch.add", "torch.mul"
    )
    assert entry_of(config, torch.add)._num_tensor_args_to_observation_type[1] is DIFFERENT
    assert entry_of(config, torch.mul)._num_tensor_args_to_observation_type == {0: DIFFERENT, 1: SHARE, 2: DIFFERENT}
    assert rows["torch.add"].notes == rows["torch.mul"].notes == ()


def test_an_operand_that_is_a_number_is_a_note_if_it_is_left_in_float() -> None:
    def of_two_tensors(node: Any) -> None:
        if len(node.all_input_nodes) == 2:
            q.elementwise()(node)

    config, rows = derive({aten.add.Tensor: of_two_tensors}, "torch.add")
    assert claim_of(config, torch.add) == (DIFFERENT, [STATIC])
    assert rows["torch.add"].notes == ("with a number as operand: not annotated",)


@pytest.mark.parametrize(
    ("is_qat", "activation", "weight", "reason"),
    [
        (True, q.ACTIVATION, q.WEIGHT, "observed by observers: leave --qat out"),
        (False, q.TRAINED_ACTIVATION, q.TRAINED_WEIGHT, "observed by fake quantizes, as for training: give --qat"),
    ],
)
def test_a_quantizer_for_the_other_flow(is_qat: bool, activation: Any, weight: Any, reason: str) -> None:
    _, rows = derive({aten.linear.default: q.weighted(activation, weight, activation)}, "nn.Linear", is_qat=is_qat)
    assert rows["nn.Linear"].reason == reason


def test_symmetric_activations_are_a_note() -> None:
    _, rows = derive({aten.linear.default: q.weighted(q.SYMMETRIC, output=q.SYMMETRIC)}, "nn.Linear")
    assert rows["nn.Linear"].notes == ("activations are symmetric: a claim is about any zero point",)


def test_what_torch_export_refuses_is_said() -> None:
    _, rows = derive({}, ".unsqueeze_", ".shape", ".hardsigmoid")
    assert rows[".unsqueeze_"].reason.startswith("torch.export refused it: ")
    assert rows[".shape"].reason.startswith("its result is no tensor")
    assert rows[".hardsigmoid"].reason.startswith("torch.Tensor has no method hardsigmoid")


@pytest.mark.slow
def test_training_claims_qat_modules() -> None:
    by_target = {aten.conv2d.default: q.weighted_with_relu(q.TRAINED_ACTIVATION, q.TRAINED_WEIGHT)}
    patterns = ("nn.Conv2d", "nn.Conv2d+nn.BatchNorm2d+nn.ReLU", "nni.ConvBnReLU2d")
    config, _ = derive(by_target, *patterns, "nnqat.Conv2d", "nniqat.ConvBnReLU2d", is_qat=True)
    dtypes = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float32)
    for pattern in (nn.Conv2d, (nn.Conv2d, nn.BatchNorm2d, nn.ReLU), nnqat.Conv2d, nniqat.ConvBnReLU2d):
        assert claim_of(config, pattern) == (DIFFERENT, [dtypes])
    assert entry_of(config, nn.Conv2d).qat_module is nnqat.Conv2d
    assert entry_of(config, nni.ConvBnReLU2d).qat_module is nniqat.ConvBnReLU2d
