"""Pattern formats and their normal form, beside torch's (rules PAT-01, PAT-02)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx  # torch's configs need it loaded before them
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import backend_config as theirs

from refimpl import backend_config as ours
from refimpl.errors import ConfigError
from refimpl.patterns import MatchAllNode, is_chain, is_match_all, leaves, normal_form, pattern_name

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
    assert normal_form(pattern) == expected
    assert ours.BackendPatternConfig(pattern).normal_pattern == expected


@pytest.mark.rule("PAT-02")
def test_normal_form_is_reversed_and_nested() -> None:
    a, b, c = nn.Conv2d, nn.BatchNorm2d, nn.ReLU
    assert normal_form((a, b)) == (b, a)
    assert normal_form((a, b, c)) == (c, (b, a))
    assert is_chain(normal_form((a, b, c)))
    assert tuple(leaves(normal_form((a, b, c)))) == (a, b, c)


@pytest.mark.rule("PAT-02")
def test_a_complex_format_is_taken_as_it_is() -> None:
    pattern = (nn.ReLU, (torch.add, MatchAllNode, (nn.BatchNorm2d, nn.Conv2d)))
    entry = ours.BackendPatternConfig()._set_pattern_complex_format(pattern)
    assert entry.normal_pattern == pattern
    assert not is_chain(pattern)
    assert [is_match_all(leaf) for leaf in leaves(pattern)] == [True, False, False, False, False]
    assert pattern_name(pattern) == "torch.add(*,nn.Conv2d+nn.BatchNorm2d)+nn.ReLU"
