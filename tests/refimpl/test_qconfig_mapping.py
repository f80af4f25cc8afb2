"""QConfigMapping: precedence, dict forms, and torch's resolution node by node (rules QCM-01 to QCM-07)."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import ConfigError, QConfig, QConfigError, QConfigMapping
from fx_quant_conformance.refimpl.config.qconfig import QConfigResolver, as_qconfig, as_qconfig_mapping
from fx_quant_conformance.refimpl.observers.observers import MinMaxObserver
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.both_flows import PER_CHANNEL, QCONFIG
from tests.refimpl.support.qconfigs import minmax_qconfig

TorchQConfig: Any = flows.torch_qconfigs.QConfig
TorchMapping = flows.torch_mappings.QConfigMapping
A = minmax_qconfig(torch.quint8, torch.qint8, per_channel=False)
B = minmax_qconfig(torch.quint8, torch.qint8, per_channel=True)


def resolved(mapping: QConfigMapping, *place: Any) -> tuple[Any, str]:
    found = QConfigResolver(mapping).resolve(*place)
    return found.qconfig, found.source


PLACE = ((nn.Linear,), "block.0.fc", ("block.0", nn.Linear, 1))
SETTINGS: tuple[tuple[str, tuple[Any, ...]], ...] = (  # lowest first
    ("set_global", ()),
    ("set_object_type", (nn.Linear,)),
    ("set_module_name_regex", (r"block\..*fc",)),
    ("set_module_name", ("block",)),
    ("set_module_name", ("block.0",)),
    ("set_module_name", ("block.0.fc",)),
    ("set_module_name_object_type_order", ("block.0", nn.Linear, 1)),
)


@pytest.mark.rule("QCM-02")
@pytest.mark.rule("QCM-03")
@pytest.mark.parametrize("high", range(1, len(SETTINGS)))
@pytest.mark.parametrize("winner", [B, None])
def test_a_later_kind_of_key_overrides_all_earlier_ones(high: int, winner: Any) -> None:
    mapping = QConfigMapping()
    setter, key = SETTINGS[high]
    getattr(mapping, setter)(*key, winner)
    for setter, key in SETTINGS[:high]:
        getattr(mapping, setter)(*key, A)
    assert resolved(mapping, *PLACE)[0] is winner, f"{SETTINGS[high]} does not override what is below it"


@pytest.mark.rule("QCM-02")
def test_the_first_regex_set_wins_and_is_anchored_at_the_start() -> None:
    mapping = QConfigMapping().set_module_name_regex("lock", None).set_module_name_regex("blo", A)
    mapping.set_module_name_regex("block", B)
    assert resolved(mapping, *PLACE) == (A, "module_name_regex 'blo'")
    assert resolved(mapping, (nn.Linear,), "other") == (None, "global")


@pytest.mark.rule("QCM-02")
def test_the_index_counts_calls_of_one_type_in_one_module() -> None:
    mapping = QConfigMapping().set_global(A).set_module_name_object_type_order("block", nn.Linear, 1, None)
    found = [resolved(mapping, (nn.Linear,), "block.fc", ("block", nn.Linear, index))[0] for index in range(3)]
    assert found == [A, None, A]
    assert resolved(mapping, (nn.Conv2d,), "block.c", ("block", nn.Conv2d, 1))[0] is A, "another type"
    assert resolved(mapping, (nn.Linear,), "fc", ("", nn.Linear, 1))[0] is A, "another module"


@pytest.mark.rule("QCM-01")
def test_a_qconfig_is_two_constructors() -> None:
    assert as_qconfig(QCONFIG) == QConfig(QCONFIG.activation, QCONFIG.weight)
    assert as_qconfig(None) is None
    with pytest.raises(QConfigError, match="constructors 'activation' and 'weight', found 3"):
        as_qconfig(3)


SOURCES: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("set_global", (), "global"),
    ("set_object_type", (nn.Linear,), "object_type Linear"),
    ("set_module_name_regex", ("0",), "module_name_regex '0'"),
    ("set_module_name", ("0",), "module_name '0'"),
)
BAD: tuple[tuple[Any, str], ...] = (
    (
        QConfig(MinMaxObserver(dtype=torch.quint8), QCONFIG.weight),
        "the instance activation, of class MinMaxObserver; pass",
    ),
    (QConfig(QCONFIG.activation, flows.torchs.MinMaxObserver()), "the instance weight, of class MinMaxObserver; pass"),
    (QConfig(None, QCONFIG.weight), r"found QConfig\(activation=None"),  # type: ignore[arg-type]
    (TorchQConfig(activation=None, weight=QCONFIG.weight), r"found QConfig\(activation=None"),
    (torch.quint8, "found torch.quint8"),
)


@pytest.mark.rule("QCM-01")
@pytest.mark.parametrize(("bad", "message"), BAD)
def test_a_qconfig_without_constructors_is_named_by_its_key(bad: Any, message: str) -> None:
    for setter, key, source in SOURCES:
        mapping = getattr(QConfigMapping(), setter)(*key, bad)
        expected = re.escape(f"QConfig of {source}: expected constructors")
        with pytest.raises(QConfigError, match=f"{expected}.*{message}"):
            refimpl.prepare_fx(nn.Sequential(nn.Linear(2, 2)).eval(), mapping, (torch.zeros(1, 2),))


@pytest.mark.rule("QCM-01")
def test_a_constructor_that_makes_no_module_is_named_by_its_key() -> None:
    mapping = QConfigMapping().set_global(QConfig(lambda: 3, QCONFIG.weight))  # type: ignore[arg-type,return-value]
    with pytest.raises(QConfigError, match=r"QConfig \(global\): .* made 3; expected an observer"):
        refimpl.prepare_fx(nn.Sequential(nn.Linear(2, 2)).eval(), mapping, (torch.zeros(1, 2),))


def full(kind: Any, q: Any) -> Any:
    """A mapping of either class with every kind of key."""
    mapping = kind().set_global(q).set_object_type(nn.Linear, q).set_object_type("add", None)
    mapping.set_module_name_regex("a.*", q).set_module_name("a.b", None)
    return mapping.set_module_name_object_type_order("a", F.relu, 2, q)


@pytest.mark.rule("QCM-04")
def test_dict_forms_go_both_ways_and_are_torchs() -> None:
    mapping = full(QConfigMapping, QCONFIG)
    assert mapping.to_dict() == full(TorchMapping, QCONFIG).to_dict()
    assert vars(QConfigMapping.from_dict(mapping.to_dict())) == vars(mapping)
    assert vars(QConfigMapping.from_dict({})) == vars(QConfigMapping())
    with pytest.warns(FutureWarning, match="a dict in the place of a QConfigMapping is deprecated"):
        assert as_qconfig_mapping(mapping.to_dict()) == mapping
    assert mapping != QConfigMapping()


@pytest.mark.rule("CFG-14")
def test_torchs_mapping_is_read_by_attributes_and_left_alone() -> None:
    theirs = full(TorchMapping, QCONFIG)
    ours = as_qconfig_mapping(theirs)
    assert vars(ours) == vars(full(QConfigMapping, QCONFIG))
    ours.set_module_name("new", None)
    assert "new" not in theirs.module_name_qconfigs


@pytest.mark.rule("CFG-13")
@pytest.mark.rule("QCM-04")
def test_unknown_keys_and_values_are_named() -> None:
    with pytest.raises(ConfigError, match="unknown key 'object_typ'; did you mean 'object_type'"):
        QConfigMapping.from_dict({"object_typ": []})
    with pytest.raises(QConfigError, match="expected a QConfigMapping, found 3"):
        as_qconfig_mapping(3)
    for kind, row in (("object_type", (nn.Linear,)), ("module_name", "a"), ("module_name_object_type_order", ("a", A))):
        with pytest.raises(QConfigError, match=f"{kind} has the row .*; expected"):
            QConfigMapping.from_dict({kind: [row]})
        with pytest.raises(QConfigError, match=f"{kind} is 3; expected a list of rows"):
            QConfigMapping.from_dict({kind: 3})


@pytest.mark.rule("QCM-02")
def test_a_regex_that_does_not_compile_is_refused_when_it_is_set() -> None:
    with pytest.raises(QConfigError, match=r"module_name_regex '\(' does not compile"):
        QConfigMapping().set_module_name_regex("(", A)
    with pytest.raises(QConfigError, match=r"module_name_regex '\(' does not compile"):
        QConfigMapping.from_dict({"module_name_regex": [("(", A)]})
    with pytest.raises(QConfigError, match=r"module_name_regex '\(' does not compile"):
        as_qconfig_mapping(TorchMapping().set_module_name_regex("(", QCONFIG))


# ---- torch's resolution, on a nested model ----------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.relu, self.fc2 = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return torch.add(self.fc2(self.relu(self.fc1(x))), x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), nn.Sequential(Block(), nn.Linear(4, 4))
        self.conv = nn.Conv1d(1, 1, 1)

    def forward(self, x: Tensor) -> Any:
        y = torch.add(self.b(self.a(x)), x)
        return self.conv(y.unsqueeze(1)).reshape(-1, 4)


TYPES = [(nn.Linear,), (Block,), (torch.add,), (nn.Conv1d,), ("reshape",)]
NAMES = [("a",), ("b",), ("b.0",), ("b.0.fc1",), ("a.fc2",), ("conv",), ("nowhere",)]
REGEXES = [("a",), (r"b\.\d",), (r".*fc2",), ("zz",)]
ORDERS = [("a", nn.Linear, 0), ("a", nn.Linear, 1), ("b", nn.Linear, 0), ("b.0", torch.add, 0), ("", torch.add, 0)]
KEYS = [
    *[("set_object_type", key) for key in TYPES],
    *[("set_module_name_regex", key) for key in REGEXES],
    *[("set_module_name", key) for key in NAMES],
    *[("set_module_name_object_type_order", key) for key in ORDERS],
]
CHOICES = st.sampled_from([QCONFIG, PER_CHANNEL, None])


def torch_mapping(default: Any, chosen: list[tuple[tuple[str, Any], Any]]) -> Any:
    mapping = TorchMapping().set_global(default)
    for (setter, key), qconfig in chosen:
        getattr(mapping, setter)(*key, qconfig)
    return mapping


def weights(model: nn.Module) -> dict[str, str]:
    """Each module that became a reference module, with the scheme of its weight: which QConfig it got."""
    return {
        name: str(module.weight_qscheme) for name, module in model.named_modules() if hasattr(module, "weight_qscheme")
    }


@pytest.mark.slow
@pytest.mark.rule("QCM-02")
@pytest.mark.rule("QCM-03")
@pytest.mark.rule("QCM-06")
@settings(max_examples=30, derandomize=True, deadline=None)
@given(default=CHOICES, chosen=st.lists(st.tuples(st.sampled_from(KEYS), CHOICES), max_size=6))
def test_every_node_gets_the_qconfig_that_torch_gives_it(default: Any, chosen: Any) -> None:
    if any(key == (nn.Linear,) for (_, key), _ in chosen):  # else torch raises: nn.ReLU, fused with it, has no setting
        chosen = [*chosen, *((("set_object_type", (nn.ReLU,)), q) for (_, key), q in chosen if key == (nn.Linear,))]
    torch.manual_seed(0)
    model, batches = Net().eval(), [(torch.randn(3, 4),)]
    mapping = torch_mapping(default, chosen)
    torchs, ours = flows.torch_flow(model, mapping, batches), flows.our_flow(model, mapping, batches)
    log = refimpl.explain(ours.prepared)
    if "QCM-07" in str(log):
        return  # a setting of None on a fused ReLU: the next tests
    assert weights(ours.reference) == weights(torchs.reference), f"QConfigs differ for {mapping}\n{log}"
    flows.assert_same_flow(torchs, ours, batches)


def fused_net() -> tuple[nn.Module, list[tuple[Tensor, ...]]]:
    torch.manual_seed(0)
    parts = [nn.Conv2d(2, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1)]
    return nn.Sequential(*parts).eval(), [(torch.randn(1, 2, 3, 3),)]


@pytest.mark.rule("QCM-05")
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_fused_module_counts_as_its_root_in_the_order(index: int) -> None:
    model, batches = fused_net()
    mapping = flows.global_mapping().set_module_name_object_type_order("", nn.Conv2d, index, None)
    torchs, ours = flows.torch_flow(model, mapping, batches), flows.our_flow(model, mapping, batches)
    found = weights(ours.reference)
    assert len(found) == 2
    assert found == weights(torchs.reference)


@pytest.mark.rule("QCM-05")
def test_a_setting_of_the_float_class_holds_for_its_fused_class() -> None:
    model, batches = fused_net()
    mapping = TorchMapping().set_object_type(nn.Conv2d, QCONFIG).set_object_type(nn.ReLU, QCONFIG)
    torchs, ours = flows.torch_flow(model, mapping, batches), flows.our_flow(model, mapping, batches)
    assert sorted(weights(ours.reference)) == ["0.0", "2", "4"] == sorted(weights(torchs.reference))


@pytest.mark.rule("QCM-05")
def test_a_setting_of_the_fused_class_itself_is_the_stronger_one() -> None:
    model, batches = fused_net()
    mapping = QConfigMapping().set_object_type(nn.Conv2d, B).set_object_type(torch.ao.nn.intrinsic.ConvReLU2d, None)
    assert sorted(weights(flows.our_flow(model, mapping, batches).reference)) == ["2", "4"]


@pytest.mark.rule("QCM-06")
def test_where_the_parts_disagree_the_root_decides_and_torch_raises() -> None:
    model, batches = fused_net()
    conv_only, relu_only = (TorchMapping().set_object_type(kind, QCONFIG) for kind in (nn.Conv2d, nn.ReLU))
    assert sorted(weights(flows.our_flow(model, conv_only, batches).reference)) == ["0.0", "2", "4"]
    assert weights(flows.our_flow(model, relu_only, batches).reference) == {}
    for mapping in (conv_only, relu_only):
        with pytest.raises(LookupError, match="same qconfigs for all module types"):
            flows.torch_flow(model, mapping, batches)


@pytest.mark.rule("QCM-07")
@pytest.mark.parametrize(("setter", "key"), [("set_object_type", nn.ReLU), ("set_module_name", "1")])
def test_an_inner_part_that_is_none_stops_the_whole_pattern(setter: str, key: Any) -> None:
    model, batches = fused_net()
    mapping = getattr(flows.global_mapping(), setter)(key, None)
    ours = flows.our_flow(model, mapping, batches)
    assert sorted(weights(ours.reference)) == ["2", "4"]
    reasons = [decision.reason for decision in refimpl.explain(ours.prepared).plan.decisions]
    assert reasons[0].startswith("QCM-07: no QConfig for ReLU fused into"), reasons
    if setter == "set_module_name":  # torch does not look at the parts' names
        assert sorted(weights(flows.torch_flow(model, mapping, batches).reference)) == ["0.0", "2", "4"]


@pytest.mark.rule("QCM-06")
@pytest.mark.rule("QCM-07")
def test_in_a_pattern_of_functions_the_last_node_decides() -> None:
    class Functional(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(torch.add(x, x))

    batches = [(torch.randn(2, 2),)]
    for kind, rule in ((F.relu, "QCM-03"), (torch.add, "QCM-07")):
        mapping = flows.global_mapping().set_object_type(kind, None)
        ours = flows.our_flow(Functional().eval(), mapping, batches)
        (decision,) = refimpl.explain(ours.prepared).plan.decisions
        assert decision.dtype_config is None
        assert decision.reason.startswith(rule), decision.reason
