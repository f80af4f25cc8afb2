"""Linting claims: each fault of an entry or a config is named under its rule, and right configs have none."""

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

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.backends.discovery import find_backend
from fx_quant_conformance.backends.names import SHIPPED
from fx_quant_conformance.backends.reference import ReferenceBackend
from fx_quant_conformance.conformance.claims.claim import enumerate_claims
from fx_quant_conformance.conformance.machine.fault import Fault
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.config import lint, plan_claim
from fx_quant_conformance.refimpl import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    MatchAllNode,
)
from fx_quant_conformance.refimpl.config.backend_config import as_backend_config
from fx_quant_conformance.refimpl.config.fusers import fuse_bn, sequential

U8 = DTypeConfig(torch.quint8, torch.quint8)
U8_S8 = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)


def entry(pattern: Any, dtypes: DTypeConfig = U8) -> BackendPatternConfig:
    return BackendPatternConfig(pattern).add_dtype_config(dtypes)


def nested(pattern: Any) -> BackendPatternConfig:
    return BackendPatternConfig()._set_pattern_complex_format(pattern).add_dtype_config(U8)


def linted(*entries: BackendPatternConfig, at: int = 0, flow: str = "ptq") -> Fault | None:
    """Lint the first claim, in that flow, of one of the entries."""
    config = BackendConfig("c").set_backend_pattern_configs(list(entries))
    claims = enumerate_claims(config, Capabilities())
    claim = next(each for each in claims if each.entry is entries[at] and each.flow == flow)
    return next(lint(claim, config), None)


def said(*entries: BackendPatternConfig, at: int = 0, flow: str = "ptq") -> tuple[str, str]:
    fault = linted(*entries, at=at, flow=flow)
    assert fault is not None
    return fault.rule, fault.message


@pytest.mark.rule("DTY-04")
@pytest.mark.rule("OBS-14")
@pytest.mark.parametrize(
    ("end", "is_taken"),
    [
        (DTypeWithConstraints(torch.quint8), True),
        (DTypeWithConstraints(torch.quint8, scale_min_lower_bound=2.0**-12), True),
        (DTypeWithConstraints(torch.quint8, 0, 127), False),
    ],
    ids=["plain", "smallest scale", "7 bits"],
)
def test_an_identity_stands_before_fixed_qparams_where_the_config_takes_what_is_measured_there(
    end: DTypeWithConstraints, is_taken: bool
) -> None:
    exact = DTypeWithConstraints(torch.quint8, 0, 255, scale_exact_match=1 / 256, zero_point_exact_match=0)
    sigmoid, identity = entry(nn.Sigmoid, DTypeConfig(exact, exact)), entry(nn.Identity, DTypeConfig(end, end))

    class Claiming(ReferenceBackend):
        def backend_config(self) -> BackendConfig:
            return BackendConfig("c").set_backend_pattern_configs([sigmoid, identity])

    bench = Bench(Claiming(), seed=0, profile="full")
    claim = next(each for each in enumerate_claims(bench.config, Capabilities()) if each.entry is sigmoid)
    names = [case.name for case in plan_claim(bench, claim)]
    assert any("behind an identity" in name for name in names) == is_taken


def bounded(**bounds: Any) -> DTypeWithConstraints:
    return DTypeWithConstraints(dtype=torch.quint8, **bounds)


@pytest.mark.parametrize("name", SHIPPED)
def test_no_claim_of_a_shipped_config_has_a_fault(name: str) -> None:
    backend = find_backend(name)
    config = as_backend_config(backend.backend_config())
    claims = enumerate_claims(config, backend.capabilities())
    assert claims
    assert [(claim.id, fault) for claim in claims for fault in lint(claim, config)] == []


@pytest.mark.rule("CFG-02")
@pytest.mark.parametrize(
    ("bounds", "fault"),
    (
        ({"quant_min_lower_bound": 9, "quant_max_upper_bound": 9}, "no range fits between 9 and 9"),
        ({"quant_min_lower_bound": -1}, "-1 is outside of 0..255 of torch.quint8"),
        ({"quant_max_upper_bound": 256}, "256 is outside of 0..255 of torch.quint8"),
        ({"scale_min_lower_bound": 0.5, "scale_max_upper_bound": 0.25}, "no scale fits between 0.5 and 0.25"),
        ({"scale_max_upper_bound": 0.0}, "no scale fits between 0.0 and 0.0"),
        ({"scale_exact_match": 0.5, "scale_max_upper_bound": 0.25}, "fixed scale 0.5 is outside of 0.0..0.25"),
        ({"scale_exact_match": -1.0}, "fixed scale -1.0 is outside of 0.0..inf, or not positive"),
        ({"zero_point_exact_match": 300}, "300 is outside of 0..255"),
        (
            {"zero_point_exact_match": 3, "quant_min_lower_bound": 4, "quant_max_upper_bound": 9},
            "zero point 3 is outside of 4..9",
        ),
        (
            {"scale_exact_match": 0.5, "zero_point_exact_match": 0, "scale_min_lower_bound": 0.25},
            "a smallest scale is asked of an observer of fixed qparams, which has none",
        ),
    ),
)
@pytest.mark.parametrize("role", ("input", "weight", "output"))
def test_constraints_that_nothing_keeps(bounds: dict[str, Any], fault: str, role: str) -> None:
    ends: list[Any] = [bounded(**bounds) if each == role else torch.quint8 for each in ("input", "output", "weight")]
    rule, message = said(entry(nn.ReLU, DTypeConfig(*ends)))
    assert rule == "CFG-02"
    assert message.startswith(f"{role} dtype: ")
    assert fault in message


@pytest.mark.rule("CFG-02")
@pytest.mark.parametrize(
    ("first", "second", "fault"),
    (
        (torch.quint8, torch.qint8, "torch.qint8 and torch.quint8 exclude each other"),
        (
            bounded(quant_min_lower_bound=0, quant_max_upper_bound=9),
            bounded(quant_min_lower_bound=9, quant_max_upper_bound=20),
            "no range fits between 9 and 9",
        ),
        (bounded(scale_exact_match=0.5), bounded(scale_exact_match=0.25), "scales 0.25 and 0.5 exclude each other"),
        (bounded(zero_point_exact_match=1), bounded(zero_point_exact_match=2), "zero points 1 and 2 exclude"),
    ),
)
def test_a_static_input_and_output_share_an_observer(first: Any, second: Any, fault: str) -> None:
    rule, message = said(entry(nn.ReLU, DTypeConfig(first, second)))
    assert (rule, message.startswith("input and output dtype: ")) == ("CFG-02", True)
    assert fault in message
    assert linted(entry(nn.ReLU, DTypeConfig(first, second, is_dynamic=True))) is None


@pytest.mark.rule("DTY-01")
def test_bounds_without_a_dtype_bound_nothing_and_half_bounds_leave_room() -> None:
    assert linted(entry(nn.ReLU, DTypeConfig(DTypeWithConstraints(quant_min_lower_bound=9)))) is None
    full = bounded(quant_min_lower_bound=0, quant_max_upper_bound=255, scale_min_lower_bound=2.0**-12)
    assert linted(entry(nn.ReLU, DTypeConfig(full, full))) is None
    halves = bounded(scale_exact_match=1 / 256, zero_point_exact_match=0), bounded(quant_min_lower_bound=3)
    assert linted(entry(nn.Sigmoid, DTypeConfig(*halves))) is None


@pytest.mark.rule("CFG-02")
def test_floats_have_no_integers_to_bound() -> None:
    half = DTypeWithConstraints(dtype=torch.float16, quant_min_lower_bound=0)
    assert said(entry(nn.ReLU, DTypeConfig(half, torch.float16)))[1].endswith(
        "no integers to bound and no scale to fix"
    )


def weighted(**settings: Any) -> BackendPatternConfig:
    made = entry(nn.Linear, U8_S8)
    for name, value in settings.items():
        getattr(made, f"set_{name}")(value)
    return made


RIGHT = {"root_module": nn.Linear, "reference_quantized_module": nnqr.Linear}


@pytest.mark.rule("CFG-11")
def test_a_root_and_its_reference_act_together_only() -> None:
    text = "no entry gives a reference module for root_module Linear"
    assert said(weighted(root_module=nn.Linear)) == ("CFG-11", text)
    assert said(weighted(reference_quantized_module=nnqr.Linear))[0] == "CFG-11"
    assert linted(weighted(root_module=nn.Linear).set_dtype_configs([U8])) is None, "no weight to quantize"
    elsewhere = BackendPatternConfig(nn.LazyLinear).set_root_module(nn.Linear)
    elsewhere.set_reference_quantized_module(nnqr.Linear)
    assert linted(weighted(root_module=nn.Linear), elsewhere) is None


@pytest.mark.rule("QAT-01")
def test_a_qat_module_that_cannot_be_made_or_is_not_quantized() -> None:
    trained = weighted(**RIGHT, qat_module=nn.Bilinear)
    assert said(trained, flow="qat") == ("QAT-01", "QAT module Bilinear has no from_float")
    assert linted(trained) is None, "PTQ does without"
    trained = weighted(**RIGHT, qat_module=nnqat.Linear)
    assert said(trained, flow="qat")[1] == "nn.Linear becomes Linear for training, and no entry quantizes that"
    assert linted(trained, entry(nnqat.Linear, U8_S8), flow="qat") is None


@pytest.mark.rule("FUS-08")
def test_a_fused_class_that_no_entry_quantizes() -> None:
    fused = entry((nn.Linear, nn.ReLU), U8_S8).set_fuser_method(sequential(nni.LinearReLU))
    fused.set_fused_module(nni.LinearReLU)
    rule, message = said(fused, weighted(**RIGHT))
    assert (rule, "is fused to LinearReLU, and no entry quantizes that" in message) == ("FUS-08", True)
    assert linted(fused, entry(nni.LinearReLU, U8_S8)) is None


@pytest.mark.rule("FUS-06")
def test_a_folded_batch_norm_leaves_no_fused_class_but_trains_as_one() -> None:
    folded = entry((nn.Conv2d, nn.BatchNorm2d), U8_S8).set_fuser_method(fuse_bn).set_fused_module(nni.ConvBn2d)
    folded.set_qat_module(nniqat.ConvBn2d)
    assert linted(folded) is None
    assert said(folded, flow="qat")[0] == "FUS-08"
    assert linted(folded, entry(nni.ConvBn2d, U8_S8), flow="qat") is None


@pytest.mark.rule("FUS-08")
@pytest.mark.parametrize(
    "wrong",
    (
        entry((nn.Linear, nn.ReLU), U8_S8).set_fused_module(nni.LinearReLU),
        entry((nn.Linear, nn.ReLU), U8_S8).set_fuser_method(sequential(nni.LinearReLU)),
    ),
)
def test_fuser_and_fused_module_go_together(wrong: BackendPatternConfig) -> None:
    assert said(wrong)[0] == "FUS-08"


def takes_one(is_qat: bool, module: nn.Module) -> nn.Module:
    return module


def takes_two(is_qat: bool, first: nn.Module, second: nn.Module) -> nn.Module:
    return first


def takes_any(is_qat: bool, *modules: nn.Module) -> nn.Module:
    return modules[0]


@pytest.mark.rule("FUS-02")
def test_a_fuser_method_takes_a_module_for_each_leaf_or_the_nested_form() -> None:
    def fused(made: BackendPatternConfig, method: Any) -> BackendPatternConfig:
        made._set_root_node_getter(lambda nested: nested)
        return made.set_fuser_method(method).set_fused_module(nn.Linear)

    def chain(method: Any) -> BackendPatternConfig:
        return fused(entry((nn.Linear, nn.ReLU, nn.Tanh), U8_S8), method)

    plain = entry(nn.Linear, U8_S8)
    for method in (takes_one, takes_two):
        rule, message = said(chain(method), plain)
        assert (rule, "is called with is_qat and 3 more" in message) == ("FUS-02", True)
    assert linted(chain(takes_any), plain) is None
    complex_form = fused(nested((nn.ReLU, (torch.add, nn.Linear, MatchAllNode))), takes_two)
    assert linted(complex_form, plain) is None, "the relu, and one tuple"
    assert said(fused(nested((nn.ReLU, (torch.add, nn.Linear, MatchAllNode))), takes_one), plain)[0] == "FUS-02"


@pytest.mark.rule("PAT-07")
def test_an_entry_whose_matches_an_earlier_one_takes() -> None:
    wide, narrow = nested((torch.add, MatchAllNode, nn.ReLU)), nested((torch.add, nn.Tanh, nn.ReLU))
    rule, message = said(wide, narrow, at=1)
    assert rule == "PAT-07"
    assert message == (
        "torch.add(nn.Tanh,nn.ReLU) can never match: torch.add(*,nn.ReLU), registered earlier, takes all that it would"
    )
    assert linted(wide, narrow, at=0) is None
    assert linted(narrow, wide, at=1) is None, "the wider one comes second, and gets what is left"


@pytest.mark.rule("PAT-07")
def test_what_may_still_match_is_no_fault() -> None:
    wide = nested((torch.add, MatchAllNode, nn.ReLU))
    longer = nested((torch.add, (nn.Tanh, nn.ReLU), nn.ReLU))
    assert linted(wide, longer, at=1) is None, "more leaves are tried first"
    assert linted(entry(torch.add), nested((torch.add, nn.ReLU, nn.ReLU)), at=1) is None
    assert linted(wide, nested((torch.add, nn.ReLU, nn.Tanh)), at=1) is None, "other arguments"
    assert linted(wide, nested((torch.sub, nn.Tanh, nn.ReLU)), at=1) is None, "another op"
    assert linted(entry((nn.Linear, F.relu)), entry((nn.Linear, nn.ReLU)), at=1) is None


@pytest.mark.rule("PAT-07")
def test_fuser_entries_are_matched_among_themselves() -> None:
    def narrow() -> BackendPatternConfig:
        made = nested((torch.add, nn.Linear, nn.ReLU)).set_fuser_method(takes_any).set_fused_module(nn.Linear)
        return made._set_root_node_getter(lambda found: found[1])

    wide, plain = nested((torch.add, MatchAllNode, nn.ReLU)), entry(nn.Linear)
    assert linted(wide, narrow(), plain, at=1) is None, "fuse does not see the wide one"
    wide.set_fuser_method(takes_any).set_fused_module(nn.Linear)._set_root_node_getter(lambda found: found[2])
    assert said(wide, narrow(), plain, at=1)[0] == "PAT-07"


@pytest.mark.rule("PAT-05")
@pytest.mark.parametrize("pattern", (MatchAllNode, (nn.ReLU, (MatchAllNode, nn.Linear))))
def test_a_wildcard_is_no_op(pattern: Any) -> None:
    assert said(nested(pattern))[0] == "PAT-05"
