"""Lowered models as users keep them, narrow ranges, and where torch lowers to something else (LOW-01 to -03)."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.backends.torch_engines.engine import engine as set_engine
from fx_quant_conformance.refimpl.graph.tracing import NOT_LOWERED
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.lowering import Net, X, an_engine, float_ops, small, torch_lowered  # noqa: F401  (a fixture)


class Packs(nn.Module):
    """A function with a weight at the top and one in a submodule, beside a layer."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4)) if bias else None
        self.inner = nn.Sequential(nn.Linear(4, 4), Packs(False)) if bias else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return F.linear(self.inner(x), self.w, self.b)


ROWS = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def lowered_packs(seed: int = 0) -> Any:
    model = Packs().eval()
    nn.init.normal_(model.w, generator=torch.Generator().manual_seed(seed))
    return refimpl.convert_fx(small(model, [(ROWS,)])[0].prepared)


@pytest.mark.rule("LOW-02")
@pytest.mark.parametrize("copies", [copy.deepcopy, torch.jit.script, None], ids=["deepcopy", "script", "save"])
def test_a_lowered_model_survives(copies: Any, engine: str) -> None:
    model = lowered_packs()
    if copies is None:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        again = torch.load(buffer, weights_only=False)
        assert again.refimpl_notes[NOT_LOWERED] == model.meta[NOT_LOWERED]
    else:
        again = copies(model)
    with torch.no_grad():
        assert torch.equal(again(ROWS), model(ROWS))


@pytest.mark.rule("LOW-02")
def test_packed_weights_go_through_a_state_dict_also_of_a_submodule(engine: str) -> None:
    source, target = lowered_packs(), lowered_packs(seed=1)
    with torch.no_grad():
        assert not torch.equal(source(ROWS), target(ROWS))
        found = nn.Sequential(target).load_state_dict(nn.Sequential(source).state_dict())
        assert (found.missing_keys, found.unexpected_keys) == ([], [])
        assert torch.equal(source(ROWS), target(ROWS))
    state = source.state_dict()
    del state["_packed_weight_0"]
    with pytest.raises(RuntimeError, match=r"Missing key.*_packed_weight_0"):
        target.load_state_dict(state)
    copied = copy.deepcopy(source)
    assert copied.state_dict().keys() == source.state_dict().keys(), "a copy saves its packed weights too"


@pytest.mark.rule("LOW-02")
def test_original_weights_are_kept_on_request(engine: str) -> None:
    prepared = small(Packs().eval(), [(ROWS,)])[0].prepared
    kept: Any = refimpl.convert_fx(prepared, keep_original_weights=True).original_weights_lookup
    weight, *_ = kept["_packed_weight_0"]
    assert set(kept) == {"_packed_weight_0", "inner_1_packed_weight_0"} and torch.equal(weight, prepared.w)
    assert not hasattr(refimpl.convert_fx(prepared), "original_weights_lookup")


NARROW = flows.torch_qconfigs.QConfig(
    activation=flows.torchs.MinMaxObserver.with_args(dtype=torch.quint8, reduce_range=True),
    weight=flows.torchs.MinMaxObserver.with_args(**flows.SIGNED_WEIGHT, quant_min=-63, quant_max=63),
)


@pytest.mark.rule("CVT-09")
@pytest.mark.rule("LOW-01")
def test_a_narrow_range_is_in_the_qparams_alone_and_the_headroom_is_kept(engine: str) -> None:
    def run(net: Any, x: Tensor) -> Any:
        y = torch.add(net.conv(x), net.other(x))
        return F.max_pool2d(F.relu(y), 2).reshape(2, -1)

    model, mapping = Net(run).eval(), flows.global_mapping(NARROW)
    flow = flows.our_flow(model, mapping, [(X,)])
    lowered, torchs = refimpl.convert_fx(flow.prepared), torch_lowered(model, mapping, [(X,)])
    assert lowered.meta[NOT_LOWERED] == () and not float_ops(lowered)
    assert len(lowered.graph.nodes) == len(torchs.graph.nodes)
    with torch.no_grad():
        for factor in (1.0, 1.5, 30.0):  # inside of calibration, and beyond
            assert torch.equal(lowered(X * factor), torchs(X * factor))
        assert lowered(X * 1.5).max() > lowered(X).max(), "what lies beyond calibration is not cut off"


@pytest.mark.rule("LOW-03")
@pytest.mark.rule("QCM-03")
@pytest.mark.parametrize("part", [nn.MaxPool2d(2), nn.Hardswish()], ids=["pool", "hardswish"])
def test_an_op_whose_qconfig_is_none_stays_float_where_torch_lowers_it(part: nn.Module, engine: str) -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), part, nn.Conv2d(2, 2, 1)).eval()
    mapping = flows.global_mapping().set_module_name("1", None)
    assert not float_ops(torch_lowered(model, mapping, [(X,)])), "torch leaves it in float now: drop this deviation"
    lowered = refimpl.convert_fx(flows.our_flow(model, mapping, [(X,)]).prepared)
    assert float_ops(lowered) == ["_1"] and lowered.meta[NOT_LOWERED] == ()


@pytest.mark.rule("LOW-03")
def test_torch_drops_the_qparams_that_a_fixed_kernel_does_not_have(engine: str) -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Tanh(), nn.Conv2d(2, 2, 1)).eval()
    theirs = torch_lowered(model, flows.global_mapping(), [(X,)])  # DTY-05 leaves Tanh in float
    assert not float_ops(theirs), "torch leaves it in float now: drop this deviation"
    assert float_ops(refimpl.convert_fx(small(model, [(X,)])[0].prepared)) == ["_1"]


def embedding_flow(model: nn.Module, batch: tuple[Any, ...], bits: int = 8) -> tuple[Any, Any, Any]:
    suffix = "" if bits == 8 else "_4bit"
    mapping = flows.global_mapping(getattr(flows.torch_qconfigs, f"float_qparams_weight_only_qconfig{suffix}"))
    flow = flows.our_flow(model, mapping, [batch], "fbgemm")
    return flow, refimpl.convert_fx(flow.prepared), torch_lowered(model, mapping, [batch])


def padded_bag() -> nn.Module:
    """A bag whose padding row is not zero, as after training from other weights."""
    rows = torch.randn(10, 12, generator=torch.Generator().manual_seed(0))
    return nn.EmbeddingBag.from_pretrained(rows, mode="sum", padding_idx=5)


@pytest.mark.rule("LOW-03")
@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (nn.EmbeddingBag(10, 12), "mode 'mean': the quantized module sums"),
        (nn.Embedding(10, 12, max_norm=1.0), "max_norm 1.0: the quantized module does not renormalize"),
        (padded_bag(), "padding_idx 5: the quantized module adds the padding's row, which is not zero"),
    ],
    ids=["mean", "norm", "padding"],
)
def test_torch_lowers_embeddings_to_modules_that_compute_something_else(part: Any, reason: str) -> None:
    batch = (torch.tensor([[1, 2], [3, 0]]),)
    with set_engine("fbgemm"):
        flow, ours, theirs = embedding_flow(nn.Sequential(part).eval(), batch)
    batch = (torch.tensor([[5, 6], [7, 8]]),)
    with torch.no_grad():
        assert (theirs(*batch) - flow(*batch)).abs().max() > 0.1, "torch is right now: drop this deviation"
        assert torch.equal(ours(*batch), flow(*batch))
    assert reason in str(ours.meta[NOT_LOWERED][0])


@pytest.mark.rule("LOW-03")
@pytest.mark.rule("LOW-02")
def test_a_padding_row_of_zeros_adds_nothing_and_the_bag_is_lowered() -> None:
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(10, 12, mode="sum", padding_idx=5)
    assert not bag.weight[5].any(), "so nn.EmbeddingBag itself makes it"
    batch = (torch.tensor([[5, 6], [7, 5]]),)
    with set_engine("fbgemm"):
        flow, ours, theirs = embedding_flow(nn.Sequential(bag).eval(), batch)
    with torch.no_grad():
        assert ours.meta[NOT_LOWERED] == ()
        assert torch.equal(ours(*batch), theirs(*batch)) and torch.allclose(ours(*batch), flow(*batch))


@pytest.mark.rule("LOW-03")
def test_torch_lowers_an_odd_row_of_4_bits_to_one_that_is_longer() -> None:
    batch = (torch.tensor([[1, 2], [3, 0]]),)
    with set_engine("fbgemm"):
        flow, ours, theirs = embedding_flow(nn.Sequential(nn.Embedding(10, 5)).eval(), batch, bits=4)
    with torch.no_grad():
        assert theirs(*batch).shape[-1] == 6, "torch is right now: drop this deviation"
        assert torch.equal(ours(*batch), flow(*batch)) and ours(*batch).shape[-1] == 5
    assert "embedding_dim 5: the quantized module packs two 4-bit columns" in str(ours.meta[NOT_LOWERED][0])


@pytest.mark.rule("LOW-02")
def test_padding_by_a_word_becomes_numbers_where_both_sides_agree(engine: str) -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding="same"), nn.Conv2d(2, 2, 3, padding="valid")).eval()
    flow, _ = small(model, [(X,)])
    lowered = refimpl.convert_fx(flow.prepared)
    assert not float_ops(lowered) and lowered.meta[NOT_LOWERED] == ()
    with torch.no_grad():
        assert (lowered(X) - flow(X)).abs().max() <= 1.01 * flows.qparams(flow.reference)[-1][1][0]


@pytest.mark.slow
@pytest.mark.rule("LOW-01")
def test_a_long_chain_is_lowered_without_recursion(engine: str) -> None:
    def run(net: Any, x: Tensor) -> Any:
        for _ in range(1500):
            x = F.relu(x)
        return net.conv(x)

    lowered = refimpl.convert_fx(small(Net(run).eval(), [(X,)])[0].prepared)
    assert lowered.meta[NOT_LOWERED] == ()


@pytest.mark.rule("STD-01")
@pytest.mark.rule("LOW-01")
@pytest.mark.parametrize("indexes", [[], [0]], ids=["float boundary", "quantized boundary"])
def test_a_standalone_module_is_lowered_by_itself(indexes: list[int], engine: str) -> None:
    inner = nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU())
    boundary = refimpl.PrepareCustomConfig().set_input_quantized_indexes(indexes).set_output_quantized_indexes(indexes)
    custom = refimpl.PrepareCustomConfig().set_standalone_module_name("1", None, (X,), boundary, None)
    model = nn.Sequential(nn.Conv2d(2, 2, 1), inner, nn.Conv2d(2, 2, 1)).eval()
    prepared: Any = refimpl.prepare_fx(
        model, flows.global_mapping(), (X,), prepare_custom_config=custom, backend_config=flows.our_config("qnnpack")
    )
    flows.calibrate(prepared, [(X,)])
    lowered = refimpl.convert_fx(prepared)
    child: Any = lowered.get_submodule("1")
    assert not float_ops(child) and child.meta[NOT_LOWERED] == lowered.meta[NOT_LOWERED] == ()
    between = [node.target for node in lowered.graph.nodes if node.target in ("dequantize", "1")]
    assert between == (["1", "dequantize"] if indexes else ["dequantize", "1", "dequantize"])
    with torch.no_grad():
        assert (lowered(X) - refimpl.convert_to_reference_fx(prepared)(X)).abs().max() < 0.05
