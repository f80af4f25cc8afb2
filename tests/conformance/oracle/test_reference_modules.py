"""The oracle's rules of ops with a weight: against integers by hand, the float model, and float32 evaluations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized.reference as nnqr
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.bounds.error_bounds import Value, map_values
from fx_quant_conformance.conformance.ops.op_model import MODEL_OF
from fx_quant_conformance.conformance.ops.weighted import RECORDS
from fx_quant_conformance.conformance.oracle.evaluate import Walk
from fx_quant_conformance.conformance.oracle.reference_modules import REFERENCE_MODULES
from fx_quant_conformance.conformance.oracle.table import OP_RULES
from tests.conformance.support.by_hand import SX, ZX, X
from tests.conformance.support.flows import activation_range, converted, drawn_integers, input_grids, on_grid

MODULES = {op: getattr(nnqr, op.__name__) for op in RECORDS if isinstance(op, type)}
FUNCTIONS = [op for op in RECORDS if not isinstance(op, type)]
PLANAR = (F.linear, F.conv2d, F.conv_transpose2d)
"""Functions of which all variants are tried: in one or three dimensions they are the same."""


# -- functions: by hand -----------------------------------------------------------------------------------------------


def scattered(q: Tensor, w: Tensor, options: dict[str, Any]) -> dict[tuple[int, ...], int]:
    """A transposed convolution in two dimensions: each centred input integer, times each weight, where it lands."""
    batch, c_in, height, width = q.shape
    within, k_h, k_w = w.shape[1:]
    stride, padding, dilation = (
        options.get(name, (0, 0) if name == "padding" else (1, 1)) for name in ("stride", "padding", "dilation")
    )
    per_group = c_in // options.get("groups", 1)
    sums: dict[tuple[int, ...], int] = {}
    spots = itertools.product(range(batch), range(c_in), range(height), range(width))
    for (n, i, y, x), (o, a, b) in itertools.product(spots, itertools.product(range(within), range(k_h), range(k_w))):
        row, column = (
            at * stride[axis] - padding[axis] + tap * dilation[axis] for axis, (at, tap) in enumerate(((y, a), (x, b)))
        )
        key = (n, i // per_group * within + o, row, column)
        sums[key] = sums.get(key, 0) + (int(q[n, i, y, x]) - ZX) * int(w[i, o, a, b])
    return sums


TRANSPOSED: tuple[dict[str, Any], ...] = (
    {},
    {"stride": (2, 1), "output_padding": (1, 0)},
    {"padding": (1, 2), "dilation": (1, 2)},
    {"groups": 2, "stride": (2, 3), "padding": (1, 1), "output_padding": (1, 2)},
    {"groups": 4, "dilation": (2, 1)},
)


@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize("options", TRANSPOSED, ids=str)
def test_a_transposed_convolution_adds_what_lands_on_a_pixel(options: dict[str, Any]) -> None:
    groups = options.get("groups", 1)
    w = drawn_integers(4, 8 // groups, 3, 2, seed=2, low=-127, high=127)
    bias = torch.arange(8) / 4 - 1

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(w * 2.0**-7), nn.Parameter(bias)

        def forward(self, x: Tensor) -> Any:
            return F.conv_transpose2d(x, self.weight, self.bias, **options)

    q = drawn_integers(2, 4, 3, 4, seed=1)
    x = on_grid(q, **X)  # type: ignore[arg-type]
    ranges = [activation_range(**X)]  # type: ignore[arg-type]
    model = converted(Model(), ranges, output=[[x]])
    exact = Walk(model).exact((x,))[0]
    sums = scattered(q, w, options)
    shape = exact.real.shape
    for at in itertools.product(*map(range, shape)):
        expected = sums.get(at, 0) * SX / 128 + Fraction(float(bias[at[1]]))
        assert float(exact.real[at]) == pytest.approx(float(expected), rel=0, abs=1e-12)
    assert len({key for key in sums if all(0 <= i < n for i, n in zip(key, shape, strict=True))}) > 50


# -- functions: the reference model in float32 stays within the bound --------------------------------------------------


@pytest.mark.slow
@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda op: op.__name__)
def test_float32_is_within_the_slack_for_every_variant(function: Any) -> None:
    samples, capabilities, largest = RECORDS[function], Capabilities(float_accumulation=True), 0.0
    every = list(samples.variants())
    for number, (varied, arguments) in enumerate(every if function in PLANAR else every[:6]):
        torch.manual_seed(number)
        model = MODEL_OF[1]([samples.step(function, arguments)])
        low, high = ((-1.0, 1.0), (0.0, 2.0), (-3.0, 0.0))[number % 3]
        shape = samples.inputs(arguments)[0].shape
        calibration = torch.linspace(low, high, int(torch.Size(shape).numel())).reshape(shape)
        reference = converted(model, [(low, high)], output=[[calibration]])
        grid = input_grids(reference)[0]
        x = grid.values(torch.randint(grid.low, grid.high + 1, shape))
        exact = Walk(reference, capabilities).exact((x,))[0]
        assert exact.grid is not None
        with torch.no_grad():
            distance = (exact.grid.integers(reference(x)).round() - exact.integers).abs()
        assert bool((distance <= 0.5 + exact.slack).all()), varied
        assert float(exact.slack.max()) < 0.5  # a result that is wrong by one step is not excused
        largest = max(largest, float(distance.max()))
    assert largest > 0.49


# -- reference modules: what the float model computes ------------------------------------------------------------------


def referenced(module: Any) -> Any:
    """The reference module of a float one, its weight per tensor."""
    qparams = {"qscheme": torch.per_tensor_affine, "dtype": torch.qint8, "scale": 2.0**-6, "zero_point": 0}
    return MODULES[type(module)].from_float(module, qparams)


def computed(reference: Any, x: Value, **forward: Any) -> Tensor:
    weight = Value(real=reference.get_weight().double())
    function, args = REFERENCE_MODULES[type(reference)](reference, weight, x, **forward)
    assert function in OP_RULES
    result: Tensor = function(*map_values(args, lambda value: value.real, lambda tensor: tensor.double()))
    return result


def variants(kind: Any) -> Iterator[tuple[Any, Tensor]]:
    for number, (_, arguments) in enumerate(RECORDS[kind].variants()):
        torch.manual_seed(number)
        module = RECORDS[kind].step(kind, arguments).op
        yield module, torch.randn(RECORDS[kind].inputs(arguments)[0].shape).double()


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_a_reference_module_is_the_float_module_with_its_rounded_weight(kind: Any) -> None:
    with torch.no_grad():
        for module, x in variants(kind):
            reference = referenced(module)
            found = computed(reference, Value(real=x))
            module.weight.copy_(reference.get_weight())
            torch.testing.assert_close(found, module.double()(x), rtol=1e-13, atol=1e-13)


@pytest.mark.rule("NUM-03")
def test_a_padding_mode_pads_with_the_inputs_own_values() -> None:
    """By hand, in one dimension: x = 1 2 3 4, weight 1 1 1, one value of padding on each side."""
    expected = {"zeros": [3, 6, 9, 7], "reflect": [5, 6, 9, 10], "replicate": [4, 6, 9, 11], "circular": [7, 6, 9, 8]}
    x = Value(real=torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]).double())
    with torch.no_grad():
        for mode, sums in expected.items():
            module: Any = nn.Conv1d(1, 1, 3, padding=1, padding_mode=mode, bias=False)  # type: ignore[arg-type]
            module.weight.fill_(1.0)
            assert computed(referenced(module), x).flatten().tolist() == sums


def test_errors_are_padded_as_their_values_are() -> None:
    real = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]).double()
    module: Any = nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular")
    reference = referenced(module)
    x = Value(real=real, errors={"upstream": real / 8, "half": torch.tensor(0.5)}, step=torch.tensor(2.0))
    _, args = REFERENCE_MODULES[nnqr.Conv1d](reference, Value(real=reference.get_weight()), x)
    assert args[0].real.flatten().tolist() == [4, 1, 2, 3, 4, 1]
    assert args[0].errors["upstream"].flatten().tolist() == [0.5, 0.125, 0.25, 0.375, 0.5, 0.125]
    assert args[0].errors["half"].flatten().tolist() == [0.5] * 6
    assert args[0].step == 2.0


@pytest.mark.parametrize("kind", (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))
def test_a_transposed_module_is_given_its_output_size(kind: Any) -> None:
    torch.manual_seed(0)
    module = kind(2, 3, 3, stride=2)
    rank = module.weight.dim() - 2
    x, size = torch.randn(1, 2, *(4, 3, 5)[:rank]).double(), [10, 8, 11][:rank]
    with torch.no_grad():
        reference = referenced(module)
        found = computed(reference, Value(real=x), output_size=size)
        assert list(found.shape[2:]) == size
        module.weight.copy_(reference.get_weight())
        torch.testing.assert_close(found, module.double()(x, output_size=size), rtol=1e-13, atol=1e-13)
