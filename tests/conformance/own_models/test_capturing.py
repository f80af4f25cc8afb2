"""Models as torch.export captures them: their calls read back, decided about as by the Quantizer, run on a backend."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import symbolic_trace

from fx_quant_conformance.conformance.claims.inputs import draw_calibration_inputs
from fx_quant_conformance.conformance.own_models.capturing import capture, translate_mapping
from fx_quant_conformance.conformance.own_models.given import GivenModel, ModelSpecError
from fx_quant_conformance.conformance.whole_models.architectures import ARCHITECTURES
from fx_quant_conformance.refimpl import (
    convert_to_reference_decomposed_fx,
    default_backend_config,
    explain,
    get_default_qconfig_mapping,
    prepare_fx,
)
from fx_quant_conformance.reports.schema import ModelResult
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.own_models.test_own_models import PACKAGE, run_own
from tests.conformance.support.suite_runs import Ran, run
from tests.support.torchao import require_torchao

pytestmark = pytest.mark.slow

CONFIG = default_backend_config()
SETUP = "quint8/per_channel_affine"


class Model(nn.Module):
    """A module whose forward is a function of it and the inputs."""

    def __init__(self, compute: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.compute = compute
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x)


def captured(model: nn.Module, *batches: Tensor) -> Any:
    torch.manual_seed(0)
    return capture(
        GivenModel(model=model, example_inputs=batches[:1], calibration=[(each,) for each in batches]), CONFIG
    )


def called(model: Any) -> list[Any]:
    """What a graph calls: the classes of modules, functions, names of methods."""
    return [
        type(model.get_submodule(node.target)) if node.op == "call_module" else node.target
        for node in model.graph.nodes
        if node.op.startswith("call_")
    ]


@pytest.mark.parametrize(
    ("compute", "modules", "expected"),
    [
        (
            lambda m, x: F.relu(m.norm(m.conv(x))),
            {"conv": nn.Conv2d(2, 2, 1), "norm": nn.BatchNorm2d(2)},
            [nn.Conv2d, nn.BatchNorm2d, F.relu],
        ),
        (
            lambda m, x: m.relu(m.conv(x) + x),
            {"conv": nn.Conv2d(2, 2, 1), "relu": nn.ReLU(inplace=True)},
            [nn.Conv2d, operator.add, nn.ReLU],
        ),
        (lambda m, x: F.layer_norm(x, [3], None, None, 1e-3), {}, [F.layer_norm]),
        (lambda m, x: m.drop(torch.cat([x, x], 1)), {"drop": nn.Dropout()}, [torch.cat, nn.Dropout]),
        (lambda m, x: F.hardtanh(F.pad(x, (1, 1)), -0.5, 0.5), {}, [F.pad, F.hardtanh]),
    ],
)
def test_the_calls_of_a_program_are_those_of_its_model(compute: Any, modules: Any, expected: list[Any]) -> None:
    model, x = Model(compute, **modules).eval(), torch.randn(2, 2, 3, 3)
    found = captured(model, x)
    assert called(found) == expected
    assert torch.equal(found(x), model(x))


def test_names_of_modules_and_tensors_are_those_of_the_model() -> None:
    def compute(model: Any, x: Tensor) -> Any:
        return F.linear(model.body(x), model.head.weight)

    model = Model(compute, body=nn.Sequential(nn.Linear(4, 4), nn.ReLU()), head=nn.Linear(4, 3))
    found = captured(model, torch.randn(2, 4))
    assert [node.target for node in found.graph.find_nodes(op="call_module")] == ["body.0", "body.1"]
    assert {name for name, _ in found.named_parameters()} == {"body.0.weight", "body.0.bias", "head.weight"}


def test_values_within_what_a_module_returns_are_found() -> None:
    def compute(model: Any, x: Tensor) -> Any:
        states, (last, memory) = model.lstm(x)
        return {"states": states, "memory": (memory, last + 1)}

    model, x = Model(compute, lstm=nn.LSTM(3, 4, num_layers=2)).eval(), torch.randn(5, 2, 3)
    found = captured(model, x)
    assert called(found)[0] is nn.LSTM
    given, expected = found(x), model(x)
    assert given.keys() == expected.keys()
    assert torch.equal(given["states"], expected["states"])
    assert all(map(torch.equal, given["memory"], expected["memory"]))


def test_a_call_that_does_not_give_the_bits_of_its_ops_stays_as_they_are() -> None:
    """Attention by ops is no call of nn.MultiheadAttention with one argument."""

    def compute(model: Any, x: Tensor) -> Any:
        return model.attend(x, x, x, need_weights=False)[0]

    model, x = Model(compute, attend=nn.MultiheadAttention(4, 2, batch_first=True)).eval(), torch.randn(2, 3, 4)
    found = captured(model, x)
    assert torch.ops.aten.scaled_dot_product_attention.default in called(found)
    assert nn.MultiheadAttention not in called(found)


def test_what_fx_cannot_trace_is_captured_and_other_batch_sizes_run() -> None:
    def compute(model: Any, x: Tensor) -> Any:
        return model.conv(F.pad(x, (0, 1)) if max(x.shape[-1] % 2, 0) else x)

    model = Model(compute, conv=nn.Conv1d(2, 3, 2)).eval()
    with pytest.raises(Exception, match="control flow"):
        symbolic_trace(model)
    found = captured(model, torch.randn(1, 2, 5), torch.randn(4, 2, 5))
    x = torch.randn(7, 2, 5)
    assert torch.equal(found(x), model(x))


def test_a_size_that_no_tensor_can_be_made_with_while_tracing_is_that_of_the_examples() -> None:
    def compute(model: Any, x: Tensor) -> Any:
        return model.layer(x + torch.zeros(len(x), 3))

    model = Model(compute, layer=nn.Linear(3, 3)).eval()
    x = torch.randn(4, 3)
    found = captured(model, x)
    symbolic_trace(found)
    assert torch.equal(found(x), model(x))


@pytest.mark.parametrize(
    ("compute", "told"),
    [
        (lambda m, x: x if x.sum() > 0 else -x, "torch.export does not take the model: "),
        (lambda m, x: 2 * x if torch.compiler.is_exporting() else x, "the model gives other bits than it does itself"),
        (lambda m, x: x + 1 if len(x) < 3 else x - 1, "the model gives other bits than it does itself"),
        (lambda m, x: x + torch.zeros(len(x), 3), "what torch.export writes does not run on all batches: "),
        (lambda m, x: m.graph(x), "what torch.export writes of the model cannot be read back: "),
    ],
)
def test_a_model_that_a_program_cannot_stand_for_is_refused(compute: Any, told: str) -> None:
    with pytest.raises(ModelSpecError) as caught:
        captured(Model(compute, graph=nn.Linear(3, 3)), torch.randn(2, 3), torch.randn(4, 3))
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("compute", "modules", "expected"),
    [
        (lambda m, x: F.relu(m.layer(x), inplace=True), {}, [nn.Linear, F.relu]),
        (lambda m, x: m.layer(1 - x), {}, [operator.sub, nn.Linear]),
        (
            lambda m, x: m.layer(x) + m.layer(m.row),
            {"row": nn.Buffer(torch.randn(1, 3))},
            [nn.Linear, nn.Linear, operator.add],
        ),
        (lambda m, x: m.layer(x) + F.linear(x, m.layer.weight), {}, [nn.Linear, F.linear, operator.add]),
        (lambda m, x: m.layer(F.normalize(x, dim=1, eps=0.5)), {}, None),
    ],
)
def test_a_call_is_given_what_the_model_gives_it(compute: Any, modules: Any, expected: list[Any] | None) -> None:
    """Examples of ones do not tell 1 - x from x - 1, nor one eps from another."""
    model, x = Model(compute, layer=nn.Linear(3, 3)).eval(), torch.randn(2, 3)
    for name, buffer in modules.items():
        model.register_buffer(name, buffer)
    found = captured(model, torch.ones(2, 3))
    assert expected is None or called(found) == expected
    assert torch.equal(found(x), model(x))
    prepared = prepare_fx(copy.deepcopy(found), get_default_qconfig_mapping("x86"), (x,), backend_config=CONFIG)
    prepared(x)
    convert_to_reference_decomposed_fx(prepared)(x)


def _mask(model: Any, x: Tensor) -> Any:
    rows = model.layer(x)
    part = rows[:, :2]
    part *= (x[:, :2] < 0.5).float()
    return rows


def _clip(model: Any, x: Tensor) -> Any:
    rows = model.layer(x)
    part = rows[:, :2]
    F.relu(rows, inplace=True)
    return part * 2


@pytest.mark.parametrize("compute", [_mask, _clip, lambda m, x: m.layer(x.add_(1)) + x])
def test_what_an_op_does_in_place_is_kept_though_nobody_reads_its_result(compute: Any) -> None:
    model = Model(compute, layer=nn.Linear(3, 3)).eval()
    nn.init.constant_(model.layer.bias, 5.0)  # type: ignore[arg-type, union-attr]
    found = captured(model, torch.zeros(2, 3))
    x = 10 * torch.randn(4, 3)
    assert torch.equal(found(x.clone()), model(x.clone()))


def test_what_is_no_longer_in_place_is_called_without() -> None:
    """What else writes into a view makes torch decompose the program; ``2 += x`` was written, which is no Python."""

    def compute(model: Any, x: Tensor) -> Any:
        return (_mask(model, x) * x).add_(2)

    model, x = Model(compute, layer=nn.Linear(3, 3)).eval(), torch.randn(4, 3)
    found = captured(model, x)
    assert called(found)[-2:] == [operator.mul, operator.add]
    assert torch.equal(found(x), model(x))


def test_a_mask_that_vmap_makes_is_captured() -> None:
    """Hugging Face's masks of sliding windows are made so: its tensors could not be copied."""

    def compute(model: Any, x: Tensor) -> Any:
        places = torch.arange(x.shape[1])
        mask = torch.vmap(lambda row: torch.vmap(lambda column: (row >= column) & (row - column < 2))(places))(places)
        return F.scaled_dot_product_attention(model.layer(x), x, x, attn_mask=mask)

    model, x = Model(compute, layer=nn.Linear(3, 3)).eval(), torch.randn(2, 5, 3)
    found = captured(model, x)
    assert called(found)[-1] is F.scaled_dot_product_attention and nn.Linear in called(found)
    assert torch.equal(found(x), model(x))


def test_the_state_of_the_model_is_not_changed() -> None:
    def compute(model: Any, x: Tensor) -> Any:
        rows = model.layer(x)
        model.last.copy_(rows.mean(0))
        return rows + model.last

    model = Model(compute, layer=nn.Linear(3, 3)).eval()
    model.register_buffer("last", torch.zeros(3))
    found = captured(model, torch.randn(2, 3))
    assert not model.last.any() and not any(value.any() for name, value in found.named_buffers())  # type: ignore[operator]


def test_a_model_that_is_a_module_of_torch_is_called() -> None:
    assert called(captured(nn.Linear(3, 3), torch.randn(2, 3))) == [nn.Linear]
    assert called(captured(nn.LSTM(3, 4), torch.randn(1, 2, 3)))[0] is nn.LSTM


class Block(nn.Module):
    """A layer, a sum and a relu."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        return F.relu(x + self.layer(x))


@pytest.mark.parametrize(
    "key",
    [
        ("module_name", "second", None),
        ("module_name_regex", "sec.*", None),
        ("object_type", Block, None),
        ("module_name_object_type_order", "second", operator.add, 0, None),
        ("module_name_object_type_order", "first", operator.add, 0, None),
    ],
)
def test_keys_of_a_mapping_hold_for_functions_in_the_modules_that_call_them(key: tuple[Any, ...]) -> None:
    model = Model(lambda m, x: m.second(m.first(x)), first=Block(), second=Block()).eval()
    x = torch.randn(2, 3)
    mapping = get_default_qconfig_mapping("x86")
    getattr(mapping, f"set_{key[0]}")(*key[1:])
    found = captured(model, x)
    own = prepare_fx(copy.deepcopy(model), mapping, (x,), backend_config=CONFIG)
    other = prepare_fx(found, translate_mapping(found, mapping), (x,), backend_config=CONFIG)
    expected, decided = (
        [(each.pattern, each.is_quantized) for each in explain(prepared).plan.decisions] for prepared in (own, other)
    )
    assert decided == expected and {is_quantized for _, is_quantized in expected} == {True, False}


VARIED = ("residual", "chunked", "two_outputs", "functional", "transformer", "lstm_tagger", "dlrm")


@pytest.mark.parametrize(
    "architecture", [each for each in ARCHITECTURES if each.name in VARIED], ids=lambda each: str(each.name)
)
def test_decisions_are_those_of_the_quantizer(architecture: Any) -> None:
    """The Quantizer of the config decides on the same program as prepare does on the captured model."""
    require_torchao()
    from fx_quant_conformance.refimpl.exported.exported import export_open
    from fx_quant_conformance.refimpl.exported.pt2e import BackendConfigQuantizer

    torch.manual_seed(0)
    case = architecture.case()
    model = case.build().eval()
    inputs = draw_calibration_inputs(case)[0]
    mapping = get_default_qconfig_mapping("x86")
    found = capture(GivenModel(model=copy.deepcopy(model), example_inputs=inputs), CONFIG)
    quantizer = BackendConfigQuantizer(CONFIG, mapping)
    quantizer.annotate(export_open(model, inputs, dynamic_batch=True).module())
    mine, theirs = (
        [(each.pattern, each.dtype_config, each.reason, each.refusals) for each in log.plan.decisions]
        for log in (explain(prepare_fx(found, mapping, inputs, backend_config=CONFIG)), quantizer.explain())
    )
    assert mine == theirs
    assert any(dtypes is not None for _, dtypes, _, _ in theirs)


# -- on a backend -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("faulty")
    return run_own(folder, "device:FaultyPrograms", "nets:small", "nets:padding", "nets:attending")


OTHERWISE = {
    "prepared_otherwise/ptq": (
        "OBS-15",
        "prepare changed what the model computes: the first node that differs is second, as output reads it: ",
    ),
    "converted_otherwise/pt2e": (
        "CVT-01",
        "convert changed what the model computes, beside rounding it: the first node that differs is second, "
        "as output reads it: ",
    ),
    "weighted_otherwise/pt2e": (
        "CVT-02",
        "second's weight is not that of the float model, rounded by half a step at most",
    ),
}
"""Models with which a step of a flow changes what they compute, the rule, and what is said of them."""


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    chosen = [f"--claim=model/own/nets:{name}/*" for name in ("attending", *OTHERWISE)]
    models = ["--model=nets:attending", *(f"--model=nets:{name.partition('/')[0]}" for name in OTHERWISE)]
    return run(tmp_path_factory.mktemp("honest"), "device:Programs", *models, *chosen, cwd=PACKAGE)


def find(ran: Ran, model: str) -> tuple[ModelResult, ModelResult]:
    """Return the rows of a model: through the FX flow, and through PT2E."""
    rows = {row.model: row for row in ran.results.models}
    return rows[f"model/own/nets:{model}/ptq/{SETUP}"], rows[f"model/own/nets:{model}/pt2e/{SETUP}"]


def test_a_model_that_fx_cannot_trace_is_captured_for_both_flows(faulty: Ran) -> None:
    for row in find(faulty, "padding"):
        assert row.verdict is Verdict.VERIFIED, row.reason
        assert row.deployment is not None and len(row.deployment.quantized) == 2


def test_ops_that_nothing_calls_are_judged_end_to_end(faulty: Ran, honest: Ran) -> None:
    fx, pt2e = find(honest, "attending")
    assert (fx.verdict, pt2e.verdict) == (Verdict.VERIFIED, Verdict.VERIFIED), (fx.reason, pt2e.reason)
    assert pt2e.deployment is not None
    patterns = [part.pattern for part in pt2e.deployment.parts]
    assert patterns.count("F.linear") == 2 and "aten.scaled_dot_product_attention.default" in patterns
    assert all(part.verdict is Verdict.VERIFIED for part in pt2e.deployment.quantized)
    _, wrong = find(faulty, "attending")
    assert wrong.verdict is Verdict.REFUTED and "batch 0: distance " in wrong.reason, wrong.reason
    assert "the first to differ is reshape_default (20 float ops): batch 0: distance " in wrong.reason


def test_a_fault_is_named_in_both_flows(faulty: Ran) -> None:
    for row in find(faulty, "small"):
        assert row.verdict is Verdict.REFUTED
        assert "the first to differ is down (nn.Conv2d): batch 0: distance " in row.reason, row.reason
        assert row.deployment is not None
        assert [part.node for part in row.deployment.parts if part.verdict is Verdict.REFUTED] == ["down"]
        assert [metric.name for metric in row.deployment.metrics] == ["top-1", "sum"]


def test_a_model_that_the_flow_changes_is_unexercised_and_the_first_node_named(honest: Ran) -> None:
    """The backend agrees with the reference model, which is nobody's."""
    rows = {row.model: row for row in honest.results.models}
    for name, (rule, told) in OTHERWISE.items():
        row = rows[f"model/own/nets:{name}/{SETUP}"]
        assert row.verdict is Verdict.UNEXERCISED and row.evidence["node"] == "second"  # type: ignore[typeddict-item]
        assert row.rule == rule and told in row.reason, row.reason
