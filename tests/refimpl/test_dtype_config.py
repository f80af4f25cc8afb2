"""DTypeWithConstraints and DTypeConfig, beside torch's classes of the same names (rules CFG-02 to CFG-04)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx  # torch's configs need it loaded before them
from hypothesis import given
from torch.ao.quantization import backend_config as theirs

from fx_quant_conformance.refimpl.config.dtype_config import DTypeConfig, DTypeWithConstraints
from tests.refimpl.support.both_configs import as_theirs, dtype_configs


@pytest.mark.rule("CFG-02")
def test_constraints_have_torchs_fields_all_optional() -> None:
    names = [field.name for field in dataclasses.fields(DTypeWithConstraints)]
    assert names == [field.name for field in dataclasses.fields(theirs.DTypeWithConstraints)]
    assert all(getattr(DTypeWithConstraints(), name) is None for name in names)


@pytest.mark.rule("CFG-03")
@pytest.mark.parametrize("name", ["input_dtype", "output_dtype", "weight_dtype"])
def test_dtype_config_gives_the_bare_dtype_and_the_object(name: str) -> None:
    bound = DTypeWithConstraints(dtype=torch.qint8, quant_min_lower_bound=-127)
    for given_dtype, expected in ((bound, bound), (torch.qint8, DTypeWithConstraints(dtype=torch.qint8))):
        parts: dict[str, Any] = {name: given_dtype}
        config = DTypeConfig(**parts)
        torchs = theirs.DTypeConfig(**{name: as_theirs(given_dtype)})
        assert getattr(config, name) is getattr(torchs, name) is torch.qint8
        assert getattr(config, f"{name}_with_constraints") == expected
        assert as_theirs(expected) == getattr(torchs, f"{name}_with_constraints")


@pytest.mark.rule("CFG-04")
@given(dtype_configs)
def test_dtype_config_dict_forms_agree_with_torchs_both_ways(config: DTypeConfig) -> None:
    found = config.to_dict()
    assert DTypeConfig.from_dict(found) == config
    torchs = theirs.DTypeConfig.from_dict(as_theirs(found))
    assert torchs.to_dict() == as_theirs(found)
    assert DTypeConfig.from_dict(torchs.to_dict()) == config
    assert DTypeConfig.of(torchs) == config, "read by attribute"


@pytest.mark.rule("CFG-04")
def test_to_dict_leaves_out_what_is_none() -> None:
    assert DTypeConfig().to_dict() == theirs.DTypeConfig().to_dict() == {}
    assert set(DTypeConfig(torch.quint8, is_dynamic=False).to_dict()) == {"input_dtype", "is_dynamic"}


@pytest.mark.rule("CFG-04")
@pytest.mark.parametrize("key", ["input_dtype", "output_dtype", "weight_dtype"])
@pytest.mark.parametrize("value", ["quint8", torch.per_tensor_affine])
def test_from_dict_rejects_what_is_no_dtype(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key) as raised:
        DTypeConfig.from_dict({key: value})
    assert repr(value) in str(raised.value)
    with pytest.raises(ValueError, match=key):
        theirs.DTypeConfig.from_dict({key: value})
