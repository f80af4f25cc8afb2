"""What is checked of prepared and reference models that are not static: right ones pass, others are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.backends.torch_engines.tables import native_config
from fx_quant_conformance.conformance.claims.claim import Claim, enumerate_claims
from fx_quant_conformance.conformance.ops.embeddings_and_recurrent import RECORDS
from fx_quant_conformance.conformance.stages.dynamic_checks import check_prepared_dynamic, check_reference_dynamic
from fx_quant_conformance.refimpl import QConfigMapping, prepare_fx
from fx_quant_conformance.refimpl.observers.default_qconfigs import get_default_qconfig
from tests.conformance.support.dynamic_flows import BYTES, FLOAT16, NIBBLES, RECURRENT, dynamic, model_of, reference_of

DYNAMIC, HALF, BYTE, NIBBLE = "dynamic:in=quint8", "dynamic:in=float16", "static:in=float32,w=quint8", "w=quint4x2"
CLAIMS = enumerate_claims(native_config("qnnpack"), Capabilities())
QCONFIGS = {DYNAMIC: dynamic(), HALF: FLOAT16, BYTE: BYTES, NIBBLE: NIBBLES}


class Function(nn.Module):
    """A linear layer by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 9))

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return nn.functional.linear(x, self.weight)


def claim_of(pattern: str, dtypes: str) -> Claim:
    """The config's claim."""
    return next(each for each in CLAIMS if each.pattern == pattern and dtypes in each.dtype_config)


def samples_model(op: Any) -> nn.Module:
    """A model with all inputs of the op's samples."""
    arguments = RECORDS[op].base() | ({"hx": True} if op in RECURRENT else {})
    return model_of(op, arguments)


MODELS: dict[str, Any] = {
    "nn.Linear": lambda: nn.Sequential(nn.Linear(9, 5)),
    "F.linear": Function,
    **{f"nn.{op.__name__}": lambda op=op: samples_model(op) for op in (*RECURRENT, nn.Embedding, nn.EmbeddingBag)},
}
PAIRS = [(pattern, kind) for pattern in MODELS for kind in ((BYTE, NIBBLE) if "Emb" in pattern else (DYNAMIC, HALF))]


def prepared_of(model: nn.Module, qconfig: Any) -> GraphModule:
    """Prepare a model with one QConfig."""
    return prepare_fx(model.eval(), QConfigMapping().set_global(qconfig), None, backend_config=native_config("qnnpack"))


@pytest.mark.rule("OBS-05", "OBS-06", "CVT-11")
@pytest.mark.parametrize(("pattern", "kind"), PAIRS)
def test_what_refimpl_makes_of_a_claim_passes(pattern: str, kind: str) -> None:
    claim, qconfig = claim_of(pattern, kind), QCONFIGS[kind]
    assert list(check_prepared_dynamic(claim, prepared_of(MODELS[pattern](), qconfig))) == []
    reference = reference_of(MODELS[pattern]().eval(), qconfig)
    assert list(check_reference_dynamic(claim, reference)) == []


@pytest.mark.rule("OBS-05")
def test_observers_of_other_kinds_are_found() -> None:
    model = nn.Sequential(nn.Linear(9, 5))
    static = prepared_of(model, get_default_qconfig("qnnpack"))
    of_function = prepared_of(Function(), dynamic())
    for claim, prepared, text in (
        (claim_of("nn.Linear", DYNAMIC), static, "the output is observed"),
        (claim_of("nn.Embedding", BYTE), prepared_of(model, dynamic()), "observers on inputs ['input_1']"),
        (claim_of("nn.Linear", HALF), prepared_of(model, dynamic()), "asks for (dtype, dynamic) (torch.quint8, True)"),
        (claim_of("nn.Linear", DYNAMIC), unquantized(), "observers on inputs none"),
        (claim_of("F.linear", HALF), of_function, "asks for"),
    ):
        assert text in next(check_prepared_dynamic(claim, prepared)).message


def unquantized() -> GraphModule:
    """A model that was prepared with nothing to quantize."""
    return prepared_of(nn.Sequential(nn.Linear(9, 5)), None)


@pytest.mark.rule("CVT-03", "CVT-04")
def test_references_of_other_kinds_are_found() -> None:
    model = nn.Sequential(nn.Linear(9, 5)).eval()
    embedding = samples_model(nn.Embedding)
    right = claim_of("nn.Linear", DYNAMIC)
    for claim, reference, rule, text in (
        (right, reference_of(model, FLOAT16), "CVT-03", "quantized to torch.float16"),
        (right, reference_of(model, dynamic(0, 127)), "CVT-03", "(0, 127)"),
        (right, symbolic_trace(model), "CVT-03", "0 quantizations"),
        (claim_of("nn.Linear", HALF), reference_of(model, dynamic()), "CVT-04", "torch.uint8"),
        (claim_of("nn.Embedding", NIBBLE), reference_of(embedding, BYTES), "CVT-02", "quint8"),
        (claim_of("nn.Embedding", BYTE), symbolic_trace(embedding), "CVT-02", "float32"),
        (claim_of("nn.Embedding", BYTE), reference_of(model, dynamic()), "OBS-05", "is quantized"),
    ):
        fault = next(check_reference_dynamic(claim, reference))
        assert fault.rule == rule
        assert text in fault.message


@pytest.mark.rule("CVT-02")
def test_a_weight_left_in_float_and_a_quantized_output_are_found() -> None:
    claim = claim_of("nn.Linear", DYNAMIC)
    reference = reference_of(nn.Sequential(nn.Linear(9, 5)).eval(), dynamic())
    reference.add_module("0", nn.Linear(9, 5))
    assert next(check_reference_dynamic(claim, reference)).rule == "CVT-02"
    with reference.graph.inserting_before(reference.graph.output_node()):
        value = reference.graph.output_node().args[0]
        reference.graph.output_node().args = (reference.graph.call_method("dequantize", (value,)),)
    assert next(check_reference_dynamic(claim, reference)).rule == "DTY-07"


@pytest.mark.rule("OBS-05")
def test_a_state_that_is_quantized_is_found() -> None:
    model = samples_model(nn.GRUCell)
    reference = reference_of(model, dynamic())
    _, state = (node for node in reference.graph.nodes if node.op == "placeholder")
    with reference.graph.inserting_after(state):
        reference.graph.call_function(torch.quantize_per_tensor_dynamic, (state, torch.quint8, False))
    fault = next(check_reference_dynamic(claim_of("nn.GRUCell", DYNAMIC), reference))
    assert "only the first one" in fault.message
