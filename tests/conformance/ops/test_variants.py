"""Variation: which combinations of arguments are tried of an op, alone and within a larger pattern."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from torch import nn

from fx_quant_conformance.conformance.ops.table import RECORDS, WEIGHTED
from fx_quant_conformance.conformance.ops.variants import OpRecord
from tests.conformance.support.samples_budget import MOST_IN_PATTERNS

OPS = (nn.Conv2d, nn.MaxPool2d, nn.Linear, nn.ConvTranspose1d)


def away(samples: OpRecord) -> dict[str, tuple[Any, ...]]:
    """The values of each argument beside its base."""
    arguments = {name: values for name, values in samples.arguments.items() if isinstance(values, tuple)}
    return {name: values[1:] for name, values in arguments.items()}


@pytest.mark.parametrize("op", OPS)
def test_of_an_op_every_value_is_tried_alone_and_every_two_arguments_with_the_others_at_their_base(op: Any) -> None:
    samples = RECORDS[op]
    base, variants = samples.base(), [arguments for _, arguments in samples.variants()]
    assert variants[0] == base
    for name, values in away(samples).items():
        for value in values:
            alone = {**base, name: value}
            assert not samples.is_valid(alone) or alone in variants
    for a, b in itertools.combinations(away(samples), 2):
        two = [{**base, a: x, b: y} for x in away(samples)[a] for y in away(samples)[b]]
        possible = [each for each in two if samples.is_valid(each)]
        assert not possible or any(each in variants for each in possible)


def test_a_depthwise_convolution_meets_every_two_arguments_of_its_geometry() -> None:
    """Found so: oneDNN's kernel of height 1, padded in height alone, with channels in a multiple of 16."""
    samples = RECORDS[nn.Conv2d]
    ((kernel, names),) = samples.kernels
    base, variants = {**samples.base(), **kernel}, [arguments for _, arguments in samples.variants()]
    assert kernel["shape"].groups == kernel["shape"].c_in == 16
    assert {"kernel_size", "stride", "padding", "dilation"} <= set(names)
    for a, b in itertools.combinations([name for name in names if name in away(samples)], 2):
        assert any({**base, a: x, b: y} in variants for x in away(samples)[a] for y in away(samples)[b]), (a, b)
    assert {**base, "kernel_size": 1, "padding": (2, 0)} in variants


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("whole", (True, False))
def test_every_value_and_every_valid_pair_of_values_is_in_some_variant(op: Any, whole: bool) -> None:
    samples = RECORDS[op]
    base, variants = samples.base(), [arguments for _, arguments in samples.variants(whole=whole)]
    assert len(variants) == len({str(each) for each in variants})
    for name, values in away(samples).items():
        for value in values:
            if samples.is_valid({**base, name: value}):
                assert any(each[name] == value for each in variants), (name, value)
    for (a, xs), (b, ys) in itertools.combinations(away(samples).items(), 2):
        for x, y in itertools.product(xs, ys):
            if samples.is_valid({**base, a: x, b: y}):
                assert any(each[a] == x and each[b] == y for each in variants), (a, x, b, y)


def test_ops_within_patterns_are_cheap() -> None:
    for op, samples in RECORDS.items():
        if op in WEIGHTED:
            assert len(list(samples.variants(whole=False, known=False))) <= MOST_IN_PATTERNS, op


def test_an_op_within_a_pattern_has_fewer_variants_and_none_of_its_own() -> None:
    for op in OPS:
        every = [arguments for _, arguments in RECORDS[op].variants()]
        fewer = [arguments for _, arguments in RECORDS[op].variants(whole=False, known=False)]
        assert len(fewer) < len(every) and all(each in every for each in fewer)
