"""Claims: every pair of a config is listed once, under a name that says what it is (rules CFG-02, CFG-09, DTY-01)."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.ao.nn import qat as nnqat

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.backends.torch_engines.tables import TABLES, native_config
from fx_quant_conformance.conformance.claims.claim import (
    NO_WEIGHT,
    Claim,
    config_digest,
    constraint_text,
    dtype_config_text,
    enumerate_claims,
    has_weight,
)
from fx_quant_conformance.conformance.whole_models.setups import EXTENTS, setups_of
from fx_quant_conformance.refimpl import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    ObservationType,
)
from tests.conformance.support.flows import PROPERTY

PAIRS = {"native": 227, "qnnpack": 404, "fbgemm": 225, "x86": 225, "onednn": 244}
BOTH = Capabilities(weight_schemes=("per_tensor_symmetric", "per_channel_symmetric"))
U8 = DTypeConfig(torch.quint8, torch.quint8)
U8_S8 = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)


def claims_of(*entries: BackendPatternConfig) -> tuple[Claim, ...]:
    return enumerate_claims(BackendConfig("c").set_backend_pattern_configs(list(entries)), BOTH)


@cache
def native(name: Any) -> tuple[Claim, ...]:
    return enumerate_claims(native_config(name), BOTH)


@pytest.mark.rule("CFG-09")
@pytest.mark.parametrize("name", TABLES)
def test_every_pair_of_a_native_config_is_claimed(name: str) -> None:
    claims = native(name)
    pairs = [(entry.normal_pattern, dtypes) for entry in native_config(name).configs for dtypes in entry.dtype_configs]  # type: ignore[arg-type]
    assert len({(claim.pattern, claim.dtype_config) for claim in claims}) == PAIRS[name] == len(pairs)
    assert len({claim.id for claim in claims}) == len(claims)
    assert all(claim.id == f"{claim.pattern}/{claim.dtype_config}/{claim.flow}/{claim.scheme}" for claim in claims)


_PRINT_CLAIMS = """
from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.backends.torch_engines.tables import native_config
from fx_quant_conformance.conformance.claims.claim import config_digest, enumerate_claims

both = Capabilities(weight_schemes=("per_tensor_symmetric", "per_channel_symmetric"))
claims = enumerate_claims(native_config("qnnpack"), both)
print(config_digest(claims), *(claim.id for claim in claims), sep="\\n")
"""


@pytest.mark.slow
def test_ids_and_digest_are_the_same_in_another_process() -> None:
    told = subprocess.run([sys.executable, "-c", _PRINT_CLAIMS], capture_output=True, text=True, check=True).stdout
    claims = native("qnnpack")
    assert told.splitlines() == [config_digest(claims), *(claim.id for claim in claims)]


_BOUND = st.none() | st.integers(-128, 255)
_SCALE = st.none() | st.floats(2.0**-40, 2.0**20, allow_nan=False) | st.integers(-40, -1).map(lambda e: 2.0**e)
CONSTRAINTS = st.builds(
    DTypeWithConstraints,
    dtype=st.sampled_from((None, torch.quint8, torch.qint8)),
    quant_min_lower_bound=_BOUND,
    quant_max_upper_bound=_BOUND,
    scale_min_lower_bound=_SCALE,
    scale_max_upper_bound=_SCALE,
    scale_exact_match=_SCALE,
    zero_point_exact_match=_BOUND,
)


def parsed(text: str) -> dict[str, Any]:
    """Read a constraint's name back."""
    name, _, inside = text.removesuffix("]").partition("[")
    found: dict[str, Any] = {"dtype": None if name == "*" else getattr(torch, name)}
    keys = {
        "s>=": "scale_min_lower_bound",
        "s<=": "scale_max_upper_bound",
        "s=": "scale_exact_match",
        "z=": "zero_point_exact_match",
    }
    for part in inside.split(",") if inside else []:
        key = next((key for key in keys if part.startswith(key)), None)
        if key is None:
            low, _, high = part.partition("..")
            found |= {"quant_min_lower_bound": int(low) if low else None}
            found |= {"quant_max_upper_bound": int(high) if high else None}
        else:
            number = part.removeprefix(key)
            found[keys[key]] = 2.0 ** int(number[2:]) if number.startswith("2^") else float(number)
    return found


@pytest.mark.rule("CFG-02")
@PROPERTY
@given(CONSTRAINTS)
@example(DTypeWithConstraints(dtype=None, quant_min_lower_bound=0))
@example(DTypeWithConstraints(dtype=torch.qint8, scale_min_lower_bound=0.1 + 0.2))
def test_the_name_of_a_constraint_says_all_of_it_exactly(constraints: DTypeWithConstraints) -> None:
    assert DTypeWithConstraints(**parsed(constraint_text(constraints))) == constraints


@pytest.mark.slow
@pytest.mark.rule("CFG-03")
@PROPERTY
@given(CONSTRAINTS, CONSTRAINTS, st.booleans(), st.booleans())
def test_distinct_dtype_configs_have_distinct_names(
    first: DTypeWithConstraints, second: DTypeWithConstraints, dynamic: bool, swapped: bool
) -> None:
    one = DTypeConfig(first, second, first, torch.float, is_dynamic=dynamic)
    other = DTypeConfig(*((second, first, first) if swapped else (first, second, first)), torch.float, is_dynamic=False)
    assert (dtype_config_text(one) == dtype_config_text(other)) == (one == other)


@pytest.mark.rule("CFG-09")
def test_duplicates_are_numbered_and_none_is_lost() -> None:
    doubled = BackendPatternConfig(nn.ReLU).set_dtype_configs([U8, U8_S8, U8, U8])
    namesakes = [BackendPatternConfig(kind).add_dtype_config(U8) for kind in (made(), made())]
    claims = [claim for claim in claims_of(doubled, *namesakes) if claim.flow == "ptq"]
    assert [claim.dtype_config.partition("#")[2] for claim in claims] == ["", "", "2", "3", "", ""]
    assert len({claim.id for claim in claims}) == len(claims) == 6
    assert claims[5].pattern == f"{claims[4].pattern}#2"
    assert [claim.entry for claim in claims[4:]] == namesakes


def made() -> type[nn.Module]:
    class Custom(nn.Module):
        pass

    return Custom


def test_flows_by_qat_module() -> None:
    linear = BackendPatternConfig(nn.Linear).add_dtype_config(U8_S8).set_qat_module(nnqat.Linear)
    trained = BackendPatternConfig(nnqat.Linear).add_dtype_config(U8_S8)
    relu = BackendPatternConfig(nn.ReLU).add_dtype_config(U8)
    conv = BackendPatternConfig(F.conv2d).add_dtype_config(U8_S8)
    claims = claims_of(linear, trained, relu, conv)
    flows = {claim.entry.pattern: {c.flow for c in claims if c.entry is claim.entry} for claim in claims}
    assert flows == {nn.Linear: {"ptq", "qat"}, nnqat.Linear: {"qat"}, nn.ReLU: {"ptq", "qat"}, F.conv2d: {"ptq"}}


def test_a_backend_that_takes_no_trained_models_is_asked_for_none() -> None:
    """Its claims of training could not hold, and nothing said so."""
    linear = BackendPatternConfig(nn.Linear).add_dtype_config(U8_S8).set_qat_module(nnqat.Linear)
    trained = BackendPatternConfig(nnqat.Linear).add_dtype_config(U8_S8)
    config = BackendConfig("c").set_backend_pattern_configs([linear, trained])
    claims = enumerate_claims(config, Capabilities(flows=("ptq",)))
    assert [(claim.pattern, claim.flow) for claim in claims] == [("nn.Linear", "ptq")]
    setups = setups_of(claims, Capabilities(flows=("ptq",)), EXTENTS["full"])
    assert [setup.flow for setup in setups] == ["ptq"]


@pytest.mark.rule("CVT-04")
def test_half_precision_is_not_trained_for_and_its_weight_has_one_scheme() -> None:
    half = DTypeConfig(torch.float16, torch.float16, torch.float16, torch.float16)
    linear = BackendPatternConfig(nn.Linear).set_dtype_configs([half, U8_S8]).set_qat_module(nnqat.Linear)
    relu = BackendPatternConfig(nn.ReLU).add_dtype_config(half)
    found = [(claim.dtypes is half, claim.flow, claim.scheme) for claim in claims_of(linear, relu)]
    schemes = [(False, flow, scheme) for flow in ("ptq", "qat") for scheme in BOTH.weight_schemes]
    assert found == [(True, "ptq", "float16"), *schemes, (True, "ptq", NO_WEIGHT)]


@pytest.mark.rule("CVT-11")
def test_a_weight_that_alone_is_quantized_has_one_scheme() -> None:
    alone = DTypeConfig(torch.float32, torch.float32, torch.quint8)
    bag = BackendPatternConfig(nn.EmbeddingBag).add_dtype_config(alone).set_qat_module(nnqat.EmbeddingBag)
    assert {claim.scheme for claim in claims_of(bag)} == {"per_channel_affine_float_qparams"}
    relu = BackendPatternConfig(nn.ReLU).add_dtype_config(DTypeConfig(torch.float32, torch.float32))
    assert {claim.scheme for claim in claims_of(relu)} == {NO_WEIGHT}


@pytest.mark.parametrize("name", TABLES)
def test_weight_schemes_multiply_the_claims_with_a_weight_alone(name: str) -> None:
    for claim in native(name):
        assert (claim.scheme == NO_WEIGHT) == (not has_weight(claim.entry))
    schemes: dict[str, set[str]] = {}
    for claim in native(name):
        schemes.setdefault(claim.pattern, set()).add(claim.scheme)
    assert schemes["nn.Linear"] - {"float16"} == schemes["torch.conv2d+nn.ReLU"] == set(BOTH.weight_schemes)
    assert schemes["torch.cat"] == {NO_WEIGHT}
    assert schemes["nn.Embedding"] == {"per_channel_affine_float_qparams"}


def base() -> BackendPatternConfig:
    entry = BackendPatternConfig((nn.Linear, nn.ReLU)).add_dtype_config(U8_S8).set_fuser_method(partial(fuse, 1))
    return entry.set_fused_module(nn.Sequential)


def fuse(*_: Any) -> nn.Module:
    return nn.Sequential()


def other_fuse(*_: Any) -> nn.Module:
    return nn.Sequential()


CHANGES: dict[str, Callable[[BackendPatternConfig], Any]] = {
    "observation type": lambda e: e.set_observation_type(ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT),
    "dtype config more": lambda e: e.add_dtype_config(U8),
    "dtype config changed": lambda e: e.set_dtype_configs([U8]),
    "dtype configs in another order": lambda e: e.set_dtype_configs([U8, U8_S8]),
    "root module": lambda e: e.set_root_module(nn.Linear),
    "qat module": lambda e: e.set_qat_module(nnqat.Linear),
    "reference module": lambda e: e.set_reference_quantized_module(nn.Linear),
    "fused module": lambda e: e.set_fused_module(nn.Linear),
    "fuser method": lambda e: e.set_fuser_method(other_fuse),
    "fuser method's arguments": lambda e: e.set_fuser_method(partial(fuse, 2)),
    "root node getter": lambda e: e._set_root_node_getter(fuse),
    "extra inputs getter": lambda e: e._set_extra_inputs_getter(fuse),
    "weight's position": lambda e: e._set_input_type_to_index({"weight": 1}),
    "type by tensor arguments": lambda e: e._set_num_tensor_args_to_observation_type(
        {1: ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT}
    ),
}


def test_the_digest_changes_with_every_setting_of_an_entry() -> None:
    digests = {"none": config_digest(claims_of(base()))}
    for name, change in CHANGES.items():
        entry = base()
        change(entry)
        digests[name] = config_digest(claims_of(entry))
    equal = [(one, other) for one, other in itertools.combinations(digests, 2) if digests[one] == digests[other]]
    assert equal == []
    assert digests["none"] == config_digest(claims_of(base()))


def test_the_digest_changes_with_the_patterns_and_the_schemes() -> None:
    relu, sigmoid = (BackendPatternConfig(kind).add_dtype_config(U8) for kind in (nn.ReLU, nn.Sigmoid))
    config = BackendConfig("c").set_backend_pattern_configs([base()])
    sets = [
        claims_of(),
        claims_of(relu),
        claims_of(relu, sigmoid),
        claims_of(sigmoid, relu),
        claims_of(base()),
        enumerate_claims(config, Capabilities()),
    ]
    assert len(set(map(config_digest, sets))) == len(sets)
