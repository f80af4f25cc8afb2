"""Pattern formats and their normal form, beside torch's (rules PAT-01, PAT-02)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx  # torch's configs need it loaded before them
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import backend_config as theirs

from fx_quant_conformance.refimpl.config import backend_config as ours
from fx_quant_conformance.refimpl.config.patterns import (
    MatchAllNode,
    is_chain,
    is_match_all,
    leaves,
    normal_form,
    pattern_name,
)
from fx_quant_conformance.refimpl.errors import ConfigError

PATTERNS = (nn.Linear, F.linear, "view", (nn.Conv2d, nn.ReLU), (nn.Conv2d, nn.BatchNorm2d, F.relu))


@pytest.mark.rule("PAT-01")
@pytest.mark.parametrize("bad", [(nn.Linear,), (nn.Linear,) * 4, ()])
def test_a_tuple_has_two_or_three_items(bad: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match=f"2 or 3 items in forward order, found {len(bad)}"):
        normal_form(bad)
    with pytest.raises(ValueError, match="2 or 3 elements"):
        theirs.BackendConfig().set_backend_pattern_config(theirs.BackendPatternConfig(bad))


@pytest.mark.rule("PAT-01")
@pytest.mark.parametrize("bad", [3, (nn.Linear, 3), (nn.Linear, (nn.ReLU, nn.ReLU)), [nn.Linear]])
def test_items_are_classes_functions_or_method_names(bad: Any) -> None:
    with pytest.raises(ConfigError, match="expected a module class, a function or a method name"):
        normal_form(bad)


@pytest.mark.rule("PAT-01")
def test_items_of_a_complex_format_are_checked_too() -> None:
    entry = ours.BackendPatternConfig()._set_pattern_complex_format((nn.ReLU, (torch.add, 3, nn.Linear)))
    with pytest.raises(ConfigError, match="found int"):
        ours.BackendConfig().set_backend_pattern_config(entry)


@pytest.mark.rule("PAT-02")
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern_name(normal_form(pattern)))
def test_normal_form_is_torchs(pattern: Any) -> None:
    torchs = theirs.BackendConfig().set_backend_pattern_config(theirs.BackendPatternConfig(pattern))
    expected = next(iter(torchs._pattern_complex_format_to_config))
    assert normal_form(pattern) == expected and is_chain(expected)
    assert ours.BackendPatternConfig(pattern).normal_pattern == expected


@pytest.mark.rule("PAT-02")
@pytest.mark.parametrize("pattern", [(), ((nn.Linear, nn.ReLU), torch.add), (nn.ReLU, ())])
def test_a_complex_tuple_without_an_op_is_refused_when_it_is_added(pattern: Any) -> None:
    """Torch takes it, and fails to unpack it in prepare, or matches nothing with it."""
    made = ours.BackendPatternConfig()._set_pattern_complex_format(pattern)
    with pytest.raises(ConfigError, match=r"complex pattern .*: expected \(op, argument, …\)"):
        ours.BackendConfig().set_backend_pattern_config(made)


@pytest.mark.rule("CFG-14")
def test_torchs_wildcard_is_ours_in_both_formats() -> None:
    theirs_node = torch.ao.quantization.utils.MatchAllNode
    assert normal_form((theirs_node, torch.add)) == (torch.add, MatchAllNode)
    entry = ours.BackendPatternConfig()._set_pattern_complex_format((torch.add, theirs_node, nn.Linear))
    assert entry.normal_pattern == (torch.add, MatchAllNode, nn.Linear)


@pytest.mark.rule("PAT-02")
def test_a_complex_format_is_taken_as_it_is() -> None:
    pattern = (nn.ReLU, (torch.add, MatchAllNode, (nn.BatchNorm2d, nn.Conv2d)))
    entry = ours.BackendPatternConfig()._set_pattern_complex_format(pattern)
    assert entry.normal_pattern == pattern
    assert not is_chain(pattern)
    assert [is_match_all(leaf) for leaf in leaves(pattern)] == [True, False, False, False, False]
    assert pattern_name(pattern) == "torch.add(*,nn.Conv2d+nn.BatchNorm2d)+nn.ReLU"
