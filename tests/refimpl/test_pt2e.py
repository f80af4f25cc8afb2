"""BackendConfigQuantizer: an exported program is annotated as prepare decides."""

# ruff: noqa: E402
from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node, symbolic_trace

from tests.support.torchao import require_torchao

require_torchao()

from torchao.quantization.pt2e import disable_fake_quant, disable_observer
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl.exported.calls import ANNOTATION, read_calls
from fx_quant_conformance.refimpl.exported.pt2e import BackendConfigQuantizer
from tests.refimpl.support.folded import Model

NATIVE = refimpl.default_backend_config()
X86 = refimpl.get_default_qconfig_mapping("x86")


class Net(nn.Module):
    """Modules, functions, methods and operators; sharing, fixed qparams, and a getitem in float."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.pool, self.head, self.sigmoid = nn.MaxPool2d(2), nn.Linear(36, 5), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.body(x))
        x = torch.cat([x, F.relu(x)], 1)[:, :4]
        x = (x + x) * x
        result: Tensor = self.sigmoid(self.head(torch.flatten(x, 1)))
        return result


def export(model: nn.Module, *inputs: Tensor) -> Any:
    return torch.export.export(model.eval(), inputs).module()


def annotated(model: nn.Module, *inputs: Tensor, mapping: Any = X86, config: Any = NATIVE) -> Any:
    quantizer = BackendConfigQuantizer(config, mapping)
    return prepare_pt2e(export(model, *inputs), quantizer), quantizer


def test_a_network_gives_the_same_bits_in_both_flows() -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(2, 1, 8, 8)
    prepared, quantizer = annotated(model, x)
    other = refimpl.prepare_fx(model, X86, (x,), backend_config=NATIVE)
    prepared(x), other(x)
    expected = refimpl.convert_to_reference_decomposed_fx(other)(x)
    assert torch.equal(convert_pt2e(prepared)(x), expected)
    assert len(torch.unique(expected)) > 3  # not the zeros of a model that is dead
    mine, theirs = quantizer.explain(), refimpl.explain(other)
    columns = ("pattern", "qconfig", "dtype config", "observation", "reason")
    assert [[row[c] for c in columns] for row in mine.rows()] == [[row[c] for c in columns] for row in theirs.rows()]


def patterns_of(model: nn.Module, *inputs: Tensor, config: Any = NATIVE) -> list[str]:
    _, quantizer = annotated(model, *inputs, config=config)
    return [row["pattern"] for row in quantizer.explain().rows()]


def test_a_weight_that_is_read_outside_of_its_layer_too() -> None:
    model = Model(lambda m, x: m.layer(x) + F.linear(x, m.layer.weight), layer=nn.Linear(4, 4))
    assert patterns_of(model, torch.randn(2, 4)) == ["nn.Linear", "F.linear", "operator.add"]


def test_a_module_called_twice_is_two_calls() -> None:
    model = Model(lambda m, x: m.layer(m.layer(x)), layer=nn.Linear(4, 4))
    calls = read_calls(export(model, torch.randn(2, 4)), NATIVE.configs)
    assert [node.target for node in calls.draft.graph.find_nodes(op="call_module", target="layer")] == ["layer"] * 2


def test_f_relu_is_found_where_only_its_pattern_is_larger() -> None:
    """Export writes torch.relu for F.relu: the config's pattern decides which of them it is."""
    model = Model(lambda m, x: F.relu(m.layer(x)), layer=nn.Conv1d(2, 3, 1))
    assert patterns_of(model, torch.randn(1, 2, 5)) == ["nni.ConvReLU1d"]


def test_a_number_of_a_function_is_given_by_name_so_that_a_chain_may_have_it() -> None:
    model = Model(lambda m, x: F.leaky_relu(m.layer(x), negative_slope=0.25), layer=nn.Linear(3, 3))
    dtypes = refimpl.DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float32)
    chain = refimpl.BackendPatternConfig((nn.Linear, F.leaky_relu)).add_dtype_config(dtypes)
    config = refimpl.BackendConfig("chain").set_backend_pattern_config(chain)
    assert patterns_of(model, torch.randn(2, 3), config=config) == ["nn.Linear+F.leaky_relu"]


def test_a_method_is_taken_for_the_operator_that_the_config_names() -> None:
    """In aten x.mul(y) is x * y; FX, which sees the method, matches no pattern. (docs/pt2e.md)"""
    assert patterns_of(Model(lambda m, x: x.mul(x)), torch.randn(2, 3)) == ["operator.mul"]


def test_a_refused_dtype_leaves_no_observer_and_names_the_rule() -> None:
    mapping = refimpl.QConfigMapping().set_global(
        refimpl.QConfig(
            activation=refimpl.MinMaxObserver.with_args(dtype=torch.qint8),
            weight=refimpl.MinMaxObserver.with_args(dtype=torch.qint8),
        )
    )
    prepared, quantizer = annotated(nn.Linear(4, 4), torch.randn(2, 4), mapping=mapping)
    assert not [node for node in prepared.graph.nodes if "post_process" in str(node.target)]
    (row,) = quantizer.explain().rows()
    assert row["dtype config"] == "float" and "DTY-01: input dtype is torch.qint8" in row["reason"]


def test_an_embedding_with_real_zero_points_stays_float_with_a_reason() -> None:
    weight = refimpl.PerChannelMinMaxObserver.with_args(
        dtype=torch.quint8, qscheme=torch.per_channel_affine_float_qparams, ch_axis=0
    )
    mapping = refimpl.QConfigMapping().set_global(
        refimpl.QConfig(activation=refimpl.PlaceholderObserver.with_args(dtype=torch.float32), weight=weight)
    )
    indices = torch.tensor([[0, 1, 2]])
    model = nn.Sequential(nn.Embedding(5, 4))
    prepared, quantizer = annotated(model, indices, mapping=mapping)
    assert torch.equal(prepared(indices), model(indices))
    assert "PT2E: quantize_per_channel drops the fraction" in quantizer.explain().rows()[0]["reason"]


def test_explain_before_the_first_program_says_what_to_do() -> None:
    with pytest.raises(refimpl.RefimplError, match=r"call prepare_pt2e\(program, quantizer\)"):
        BackendConfigQuantizer(NATIVE, X86).explain()


def test_a_model_that_was_not_exported_is_refused() -> None:
    with pytest.raises(refimpl.ModelError, match=r"body_0 calls body\.0.*torch\.export\.export"):
        BackendConfigQuantizer(NATIVE, X86).annotate(symbolic_trace(Net()))


def test_switching_a_fake_quantize_off_reaches_the_qconfigs_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).train()
    program = torch.export.export(model, (torch.randn(2, 4),)).module()
    quantizer = BackendConfigQuantizer(NATIVE, refimpl.get_default_qat_qconfig_mapping("x86"), is_qat=True)
    prepared, x = prepare_qat_pt2e(program, quantizer), torch.randn(3, 4)[:2]
    prepared(x)
    assert not torch.equal(prepared(x), model(x))
    prepared.apply(disable_fake_quant)
    assert torch.equal(prepared(x), model(x))
    prepared.apply(disable_observer)
    before = {name: value.clone() for name, value in prepared.named_buffers() if "min_val" in name}
    prepared(100 * x)
    assert before and all(torch.equal(dict(prepared.named_buffers())[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, bias=False), nn.BatchNorm2d(6, eps=1e-3), nn.ReLU()),
        (nn.Linear(4, 6), nn.BatchNorm1d(6)),
        (nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6, affine=False)),
    ],
)
def test_a_fuser_method_reads_of_layers_what_it_would_of_the_models_own(layers: tuple[nn.Module, ...]) -> None:
    model = nn.Sequential(*layers).train()
    shape = (3, 4) if isinstance(layers[0], nn.Linear) else (3, 4, 5, 5)
    program = torch.export.export(model, (torch.randn(*shape),)).module()
    root = read_calls(program, NATIVE.configs).draft
    names = (
        "stride",
        "padding",
        "groups",
        "bias",
        "in_channels",
        "out_channels",
        "in_features",
        "out_features",
        "num_features",
        "eps",
        "momentum",
        "affine",
        "track_running_stats",
    )
    for number, layer in enumerate(layers):
        stand_in = root.get_submodule(str(number))
        for name in (name for name in names if hasattr(layer, name)):
            found, expected = getattr(stand_in, name), getattr(layer, name)
            found = tuple(found) if isinstance(found, list) else found
            same = torch.equal(found, expected) if isinstance(found, Tensor) else found == expected
            assert same, (type(layer).__name__, name, found, expected)


def test_training_a_network_with_batch_norm_is_annotated_as_prepare_fuses_it() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 4)).train()
    x, mapping = torch.randn(3, 1, 5, 5), refimpl.get_default_qat_qconfig_mapping("x86")
    quantizer = BackendConfigQuantizer(NATIVE, mapping, is_qat=True)
    quantizer.annotate(torch.export.export(model, (x,)).module())
    other = refimpl.explain(refimpl.prepare_qat_fx(model, mapping, (x,), backend_config=NATIVE))
    columns = ("pattern", "qconfig", "dtype config", "observation", "reason")
    mine = [[row[c] for c in columns] for row in quantizer.explain().rows()]
    assert mine == [[row[c] for c in columns] for row in other.rows()]
    assert mine[0][0] == "nniqat.ConvBnReLU2d"


@pytest.mark.parametrize("engine", ["x86", "qnnpack"])  # weights per channel, and per tensor
def test_a_derived_bias_is_int32_on_the_grid_of_input_and_weight(engine: str) -> None:
    torch.manual_seed(0)
    conv, linear, x = nn.Conv2d(1, 4, 3), nn.Linear(36, 5), torch.randn(3, 1, 5, 5)
    quantizer = BackendConfigQuantizer(NATIVE, refimpl.get_default_qconfig_mapping(engine), derives_bias=True)
    prepared = prepare_pt2e(export(nn.Sequential(conv, nn.ReLU(), nn.Flatten(), linear), x), quantizer)
    prepared(x)
    converted = convert_pt2e(prepared)
    ops = [node for node in converted.graph.nodes if str(node.target).startswith(("aten.conv2d", "aten.linear"))]
    for node, bias in zip(ops, (conv.bias, linear.bias), strict=True):
        x_scale, weight_scale, scale = (_value(converted, argument.args[1]) for argument in node.args[:3])
        integers, zero_point = (_value(converted, node.args[2].args[place]) for place in (0, 2))
        assert integers.dtype is torch.int32 and not torch.as_tensor(zero_point).any()
        assert torch.equal(torch.as_tensor(scale), torch.as_tensor(x_scale * weight_scale).float())
        assert bias is not None
        exact = bias.detach() / scale
        assert (integers - exact).abs().max() <= 0.5 + 2**-22 * exact.abs().max()  # float32 rounds the quotient
        assert integers.abs().max() > 100


def _value(model: Any, argument: Any) -> Any:
    return getattr(model, str(argument.target)) if isinstance(argument, Node) else argument


def test_the_groups_of_a_transposed_convolution_share_the_scales_of_a_derived_bias() -> None:
    torch.manual_seed(0)
    layer, x = nn.ConvTranspose2d(4, 6, 3, groups=2), torch.randn(2, 4, 5, 5)
    weight = refimpl.PerChannelMinMaxObserver.with_args(
        dtype=torch.qint8, qscheme=torch.per_channel_symmetric, ch_axis=1
    )
    qconfig = refimpl.QConfig(refimpl.MinMaxObserver.with_args(dtype=torch.quint8), weight)
    quantizer = BackendConfigQuantizer(NATIVE, refimpl.QConfigMapping().set_global(qconfig), derives_bias=True)
    prepared = prepare_pt2e(export(nn.Sequential(layer), x), quantizer)
    prepared(x)
    converted = convert_pt2e(prepared)
    node = next(node for node in converted.graph.nodes if str(node.target).startswith("aten.conv_transpose2d"))
    weight_scale, scale = (_value(converted, node.args[place].args[1]) for place in (1, 2))
    assert (len(weight_scale), len(scale)) == (3, 6) and torch.equal(scale[:3], scale[3:])
    assert (converted(x) - layer(x)).abs().max() < 0.1


class TrainedLayers(nn.Module):
    """A layer that has no class for training, and a convolution whose input is observed where it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.conv, self.norm = nn.ConvTranspose2d(1, 2, 2), nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.conv(self.up(x)))


def _annotate_training(mapping: Any) -> dict[str, Any]:
    """Return the annotations of a program that is to be trained, by the op's name, with the node."""
    program = torch.export.export(TrainedLayers().train(), (torch.randn(3, 1, 5, 5),)).module()
    BackendConfigQuantizer(NATIVE, mapping, is_qat=True).annotate(program)
    return {node.name: node for node in program.graph.nodes if ANNOTATION in node.meta}


def test_a_weight_that_is_not_trained_is_seen_and_stays_float() -> None:
    nodes = _annotate_training(refimpl.get_default_qat_qconfig_mapping("x86"))
    is_fake = {}
    for name in ("conv_transpose2d", "conv2d"):
        spec = nodes[name].meta[ANNOTATION].input_qspec_map[nodes[name].args[1]]
        observer, weight = spec.observer_or_fake_quant_ctr(), torch.randn(nodes[name].args[1].meta["val"].shape)
        is_fake[name] = not torch.equal(observer(weight), weight)
        assert (observer.calculate_qparams()[0] != 1).all(), name
    assert is_fake == {"conv_transpose2d": False, "conv2d": True}


@pytest.mark.parametrize("is_left", [False, True])
def test_training_names_input_and_weight_of_a_convolution_first(is_left: bool) -> None:
    """Also where nothing is observed on the way: torchao's prepare_qat_pt2e takes the first two of the map."""
    mapping = refimpl.get_default_qat_qconfig_mapping("x86")
    mapping.set_module_name("up", None) if is_left else None
    node = _annotate_training(mapping)["conv2d"]
    named = node.meta[ANNOTATION].input_qspec_map
    assert list(named)[:2] == list(node.args[:2])
    assert named[node.args[1]] is not None


class Early(nn.Module):
    """The input of a convolution goes into an op that stands before what reads the convolution's batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.other = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(1, 2, 3)

    def forward(self, x: Tensor) -> Any:
        first = self.norm(self.conv(x))
        return first + self.other(x * 2)


@pytest.mark.slow
def test_ops_of_one_input_share_its_observer_wherever_torchao_writes_the_convolution_again() -> None:
    program = torch.export.export(Early().train(), (torch.randn(3, 1, 5, 5),)).module()
    mapping = refimpl.get_default_qat_qconfig_mapping("x86")
    prepared = prepare_qat_pt2e(program, BackendConfigQuantizer(NATIVE, mapping, is_qat=True))
    (x,) = prepared.graph.find_nodes(op="placeholder")
    observers = [node for node in x.users if node.op == "call_module" and node.users]
    readers = [user.name for node in observers for user in node.users]
    assert sorted(readers) == ["conv2d_2", "mul"]
    assert len({id(prepared.get_submodule(str(node.target))) for node in observers}) == 1


def test_a_bad_mapping_is_refused_at_once() -> None:
    with pytest.raises(refimpl.QConfigError, match="QConfigMapping"):
        BackendConfigQuantizer(NATIVE, 3)


@pytest.mark.slow
def test_without_torchao_the_rest_works_and_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['torchao'] = None\n"
        "import torch, fx_quant_conformance.refimpl, fx_quant_conformance.conformance.run.hooks\n"
        "from torch import nn\n"
        "from fx_quant_conformance.refimpl.exported.pt2e_changes import find_changes\n"
        "model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.BatchNorm2d(1)).eval()\n"
        "print(find_changes(torch.export.export(model, (torch.ones(1, 1, 2, 2),)).module())[0].kind)\n"
        "try:\n    import fx_quant_conformance.refimpl.exported.pt2e\n"
        "except ImportError as error:\n    print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert run.stdout.startswith("ChangeKind.NORM_DROPPED\n"), run.stderr
    assert "needs torchao" in run.stdout and "'fx-quant-conformance[pt2e]'" in run.stdout, run.stderr


@pytest.mark.slow
def test_the_commands_of_the_document_run() -> None:
    text = (Path(__file__).parents[2] / "docs" / "pt2e.md").read_text(encoding="utf-8")
    blocks = [part.partition("```")[0] for part in text.split("```python\n")[1:]]
    assert len(blocks) == 6
    exec("\n".join(blocks), {})
