"""The primitives' bounds, against mpmath: random points, the ends of the errors, and a search for the worst ratio.

A bound that is beaten is a failed test. The ratio of the worst that was found to the bound says how loose it is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.bounds.error_bounds import NoOracleError, Value
from fx_quant_conformance.conformance.oracle.decompose import InPrimitives, describe, evaluate_opened, open_op
from fx_quant_conformance.conformance.oracle.marks import real_of
from fx_quant_conformance.conformance.oracle.primitives import PRIMITIVES
from fx_quant_conformance.conformance.oracle.unary import UNARY

CAPABILITIES = Capabilities(float_accumulation=True)
ERRORS = (0.0, 1e-6, 1e-2, 0.3)
Run = Callable[..., Any]


def values(tensor: Tensor, error: float, cause: str = "upstream") -> Value:
    errors = {cause: torch.full(tensor.shape, error, dtype=torch.float64)} if error else {}
    return Value(real=tensor.double(), errors=errors)


OPENED: dict[tuple[Run, str], InPrimitives] = {}


def evaluate(function: Run, *operands: Any) -> Any:
    key = function, describe(operands, {})
    if key not in OPENED:
        OPENED[key] = open_op(function, operands, {})
    return evaluate_opened(OPENED[key], operands, {}, CAPABILITIES)[0]


# -- functions of one operand -----------------------------------------------------------------------------------------

POINTS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("sqrt", "rsqrt", "log", "log2", "log10"), (0.35, 30.0)),
    **dict.fromkeys(("asin", "acos", "atanh"), (-0.65, 0.65)),
    **dict.fromkeys(("acosh",), (1.4, 9.0)),
    "log1p": (-0.6, 20.0),
    "erfinv": (-0.6, 0.6),
    **dict.fromkeys(("lgamma", "digamma"), (0.4, 12.0)),
    "ndtri": (0.35, 0.65),
    "reciprocal": (0.4, 20.0),
    "tan": (-1.2, 1.2),
}
"""Where a function is tried; else from −6 to 6."""
EXACT: dict[str, Callable[[Any], Any]] = {
    "abs": abs,
    "neg": lambda x: -x,
    "exp2": lambda x: mpmath.mpf(2) ** x,
    "log2": lambda x: mpmath.log(x, 2),
    "rsqrt": lambda x: 1 / mpmath.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "lgamma": mpmath.loggamma,
    "erfcx": lambda x: mpmath.exp(x * x) * mpmath.erfc(x),
    "ndtri": lambda x: mpmath.sqrt(2) * mpmath.erfinv(2 * x - 1),
    "bessel_i0": lambda x: mpmath.besseli(0, x),
    "bessel_i0e": lambda x: mpmath.exp(-abs(x)) * mpmath.besseli(0, x),
    "bessel_i1": lambda x: mpmath.besseli(1, x),
    "bessel_i1e": lambda x: mpmath.exp(-abs(x)) * mpmath.besseli(1, x),
    "relu": lambda x: max(x, mpmath.mpf(0)),
}
"""What mpmath has under another name."""
SPECIAL = {
    "erfcx": torch.special.erfcx,
    "ndtri": torch.special.ndtri,
    **{f"bessel_{name}": getattr(torch.special, name) for name in ("i0", "i0e", "i1", "i1e")},
}
"""What torch has under another name."""


def op_of(name: str) -> Run:
    return SPECIAL[name] if name in SPECIAL else getattr(torch.ops.aten, name).default  # type: ignore[no-any-return]


def exact(name: str, x: float) -> Any:
    with mpmath.workdps(40):
        function = EXACT.get(name) or getattr(mpmath, name)
        return function(mpmath.mpf(x))


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("name", sorted(UNARY))
def test_a_function_is_within_its_bound(name: str) -> None:
    draws = random.Random(name)
    low, high = POINTS.get(name, (-6.0, 6.0))
    points = torch.tensor([draws.uniform(low, high) for _ in range(40)], dtype=torch.float32)
    op = op_of(name)
    for error in ERRORS:
        result = evaluate(op, values(points, error))
        bound = result.error()
        for number, point in enumerate(points.tolist()):
            for way in (-1.0, -0.5, 0.0, draws.uniform(-1, 1), 1.0):
                moved = point + way * error
                off = abs(exact(name, moved) - mpmath.mpf(float(result.real[number])))
                assert off <= float(bound[number]) + 1e-14 * (1 + abs(float(result.real[number]))), (name, point, way)
        if not error:
            in_float32 = op(points).double()
            assert bool(((in_float32 - result.real).abs() <= bound).all()), name


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("name", sorted(UNARY))
def test_the_worst_that_a_search_finds_is_near_the_bound_and_within_it(name: str) -> None:
    """What the operand's error brings, by hill climbing: the chord is met at an end, or at a turn."""
    draws = random.Random(name)
    low, high = POINTS.get(name, (-6.0, 6.0))
    op = op_of(name)
    error, best = 0.05, 0.0
    place, way = draws.uniform(low, high), 1.0
    for _ in range(100):
        tried = min(high, max(low, place + draws.gauss(0, 0.3))), max(-1.0, min(1.0, way + draws.gauss(0, 0.5)))
        result = evaluate(op, values(torch.tensor([tried[0]]), error))
        reached = float(abs(exact(name, float(torch.tensor(tried[0])) + tried[1] * error) - float(result.real)))
        ratio = reached / float(result.error())
        assert ratio <= 1
        if ratio >= best:
            best, (place, way) = ratio, tried
    assert best > 0.4, f"{name}: the bound is {1 / best:.0f} times what was found"


@pytest.mark.parametrize(
    ("name", "point"), [("log", 0.1), ("reciprocal", -0.1), ("rsqrt", 0.1), ("tan", math.pi / 2 - 0.1), ("lgamma", 0.1)]
)
def test_beyond_a_pole_nothing_is_known(name: str, point: float) -> None:
    result = evaluate(getattr(torch.ops.aten, name).default, values(torch.tensor([point]), 0.2))
    assert result.error().tolist() == [math.inf]


def test_every_function_is_tried() -> None:
    assert all(name in EXACT or hasattr(mpmath, name) for name in UNARY)
    assert set(UNARY) <= set(PRIMITIVES)


# -- of several operands ----------------------------------------------------------------------------------------------


def corners(draws: random.Random, tensors: Sequence[Tensor], error: float) -> list[Tensor]:
    """Operands moved by the whole error, each element in a direction of its own."""
    return [
        each.double()
        + error * torch.tensor([draws.choice((-1.0, 1.0)) for _ in range(each.numel())]).reshape(each.shape)
        for each in tensors
    ]


TWO: dict[str, tuple[Run, tuple[float, float], tuple[float, float]]] = {
    "add": (lambda x, y: x + y, (-5, 5), (-5, 5)),
    "add by a factor": (lambda x, y: torch.add(x, y, alpha=3), (-5, 5), (-5, 5)),
    "sub": (lambda x, y: x - y, (-5, 5), (-5, 5)),
    "mul": (lambda x, y: x * y, (-5, 5), (-5, 5)),
    "div": (lambda x, y: x / y, (-5, 5), (0.5, 5)),
    "pow": (lambda x, y: x**y, (0.5, 4), (-3, 3)),
    "square": (lambda x, y: x**2, (-4, 4), (0, 1)),
    "cube": (lambda x, y: x**3, (-4, 4), (0, 1)),
    "root": (lambda x, y: x**0.5, (0.5, 4), (0, 1)),
    "inverse square": (lambda x, y: x**-2, (0.5, 4), (0, 1)),
    "atan2": (torch.atan2, (-4, 4), (-4, 4)),
    "maximum": (torch.maximum, (-5, 5), (-5, 5)),
    "minimum": (torch.minimum, (-5, 5), (-5, 5)),
    "where": (lambda x, y: torch.where(x > y, x, y * 2), (-5, 5), (-5, 5)),
    "remainder": (lambda x, y: torch.remainder(x, y), (-5, 5), (1, 3)),
    "remainder of a number": (lambda x, y: torch.remainder(x, 1.5), (-5, 5), (1, 3)),
    "floor": (lambda x, y: torch.floor(x * 2) + y, (-5, 5), (1, 3)),
    "quotient rounded down": (lambda x, y: torch.div(x, y, rounding_mode="floor"), (-5, 5), (1, 3)),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.3), (-5, 5), (-5, 5)),
    "hypot": (torch.hypot, (-5, 5), (-5, 5)),
}
"""Functions of two operands, and where these lie."""


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("name", TWO)
def test_a_function_of_two_is_within_its_bound(name: str) -> None:
    function, *ranges = TWO[name]
    draws = random.Random(name)
    operands = [torch.tensor([draws.uniform(*each) for _ in range(400)]) for each in ranges]
    for error in ERRORS[:3]:
        given = [values(each, error, cause) for each, cause in zip(operands, ("upstream", "rescale"), strict=True)]
        result = evaluate(function, *given)
        for _ in range(20):
            found = function(*corners(draws, operands, error))
            assert bool(((found - result.real).abs() <= result.error() * (1 + 1e-12) + 1e-13).all()), name
        if not error:
            assert bool(((function(*operands).double() - result.real).abs() <= result.error()).all())


PLACES = (torch.arange(60) * 7 % 4).reshape(3, 4, 5)
EYE = 8 * torch.eye(4)
RAMP = torch.arange(5.0)

SEVERAL: dict[str, Run] = {
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean((0, 1)),
    "prod": lambda x: x.prod(-1),
    "cumsum": lambda x: x.cumsum(1),
    "largest": lambda x: x.amax(-1),
    "smallest": lambda x: x.min(-1).values,
    "variance": lambda x: x.var(-1),
    "deviation": lambda x: x.std(1, correction=0),
    "norm": lambda x: torch.nn.functional.normalize(x, dim=-1),
    "root of squares": lambda x: torch.nn.functional.rms_norm(x, (5,)),
    "layer norm": lambda x: torch.ops.aten.native_layer_norm(x, [5], None, None, 1e-3)[0],
    "softmax": lambda x: x.softmax(1),
    "log softmax": lambda x: x.log_softmax(-1),
    "log of a sum": lambda x: x.logsumexp(1),
    "products": lambda x: x @ x.transpose(1, 2),
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "affine": lambda x: torch.baddbmm(x[:, :, :3], x[:, :, :4], x[:, :4, :3], beta=0.5, alpha=2.0),
    "convolution": lambda x: torch.nn.functional.conv1d(x, x[:2, :, :3], x[0, 0, :2], padding=1),
    "transposed": lambda x: torch.nn.functional.conv_transpose1d(x, x[0, :4, :4].reshape(4, 2, 2), stride=2),
    "average": lambda x: torch.nn.functional.avg_pool1d(x, 2),
    "interpolated": lambda x: torch.nn.functional.interpolate(x, scale_factor=1.7, mode="linear"),
    "largest of windows": lambda x: torch.nn.functional.max_pool1d(x, 3, 2),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.4),
    "sorted": lambda x: x.sort(-1).values,
    "the two largest": lambda x: x.topk(2, -1).values,
    "largest so far": lambda x: x.cummax(1).values,
    "largest of parts": lambda x: torch.nn.functional.adaptive_max_pool1d(x, 3),
    "running log of a sum": lambda x: x.logcumsumexp(1),
    "distances": lambda x: torch.cdist(x, x[:, :2] + 5),
    "of two layers": lambda x: torch.nn.functional.bilinear(x, x.flip(1), 0.1 * x[:2, :4].mT @ x[:2]),
    "Fourier": lambda x: torch.fft.fft2(x).imag,
    "Fourier and back": lambda x: torch.fft.irfft(torch.fft.rfft(x) * (2 + 1j), n=5, norm="ortho"),
    "turned": lambda x: torch.view_as_real(torch.complex(x, x.flip(0)) * torch.polar(x, x.flip(1))),
    "pairs turned": lambda x: torch.view_as_complex(x[..., :4].clone().unflatten(-1, (2, 2))).conj().real,
    "length": lambda x: (torch.complex(x, x.flip(0)) / torch.complex(x + 9, x)).abs(),
    "rolled": lambda x: x.roll(1, 2),
    "padded": lambda x: torch.nn.functional.pad(x, (1, 2), value=3.0),
    "folded": lambda x: torch.nn.functional.fold(x.reshape(3, 4, 5).repeat(1, 1, 5)[:, :, :25], (6, 6), 2),
    "added by places": lambda x: torch.zeros(3, 2, 5, dtype=x.dtype).index_add(1, torch.tensor([0, 1, 1, 0]), x),
    "largest by places": lambda x: x.scatter_reduce(1, PLACES, x.flip(1), "amax"),
    "mean by places": lambda x: x.scatter_reduce(1, PLACES, x.flip(1), "mean", include_self=False),
    "smallest by index": lambda x: x.index_reduce(1, torch.tensor([0, 1, 1]), x[:, :3].cos(), "amin"),
    "distances by sums": lambda x: torch.cdist(x, x[:, :2] + 5, p=1),
    "distances by cubes": lambda x: torch.cdist(x, x[:, :2] + 5, p=3),
    "distances by the largest": lambda x: torch.cdist(x, x[:, :2] + 5, p=math.inf),
    "of each two": lambda x: torch.pdist(x[0] + 3 * torch.arange(4)[:, None]),
    "solution": lambda x: torch.linalg.solve(x[:, :, :4] + EYE, x),
    "solution of a row": lambda x: torch.linalg.solve(x[:, :, :4] + EYE, x[:, :, 1]),
    "solution of rows and of a batch": lambda x: torch.linalg.solve(x[:1, :, :4] + EYE, x[0, :, :4]),
    "distances of many": lambda x: torch.cdist(x.reshape(12, 5).repeat(3, 1), x[0].repeat(7, 1) + 5),
    "solution from the right": lambda x: torch.linalg.solve(x[:, :, :4] + EYE, x.mT, left=False),
    "inverse": lambda x: torch.linalg.inv(x[:, :, :4] + EYE),
    "determinant": lambda x: torch.linalg.det(x[:, :, :4] / 8 + EYE / 8),
    "log of a determinant": lambda x: torch.logdet(x[:, :, :4] + EYE),
    "triangular": lambda x: torch.linalg.solve_triangular(x[:, :, :4] + EYE, x, upper=False),
    "unit triangular": lambda x: torch.linalg.solve_triangular(
        x[:, :, :4] / 4, x.mT, upper=True, left=False, unitriangular=True
    ),
    "Cholesky": lambda x: torch.linalg.cholesky(x[:, :, :4].tril() + x[:, :, :4].tril().mT + 2 * EYE),
    "by Cholesky": lambda x: torch.cholesky_solve(x, torch.linalg.cholesky(2 * EYE + x[:, :, :4].cos())),
    "singular values": lambda x: torch.linalg.svdvals(x),
    "eigenvalues": lambda x: torch.linalg.eigvalsh(x[:, :, :4]),
    "by mask": lambda x: x.masked_scatter(x.detach().abs() > 1000, x.flip(0)) + x.masked_select(PLACES[0] >= 0)[0],
    "some by mask": lambda x: x.masked_scatter(PLACES > 0, x.flip(0)),
    "put": lambda x: x.put(torch.tensor([3, 7]), x[0, 0, :2] * 2),
    "diagonal filled": lambda x: x[0].clone().fill_diagonal_(0.5),
    "middle": lambda x: x.median(),
    "slope": lambda x: torch.nn.functional.rrelu(x, 0.1, 0.5),
    "on a grid": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.25, 3, 0, 31),
    "sum of complex numbers": lambda x: torch.view_as_real(torch.fft.rfft(x).sum(1)),
    "products of complex numbers": lambda x: torch.view_as_real(torch.fft.rfft(x) @ torch.fft.rfft(x / 2).mT),
    "angles": lambda x: torch.complex(x.abs() + 1, x).angle(),
    "bins": lambda x: torch.histc(x, 6, -3.0, 3.0),
    "bins between the ends": lambda x: torch.histc(x, 6),
    "unpooled": lambda x: torch.nn.functional.max_unpool1d(
        *torch.nn.functional.max_pool1d(x.abs() * 0.1 + RAMP, 2, return_indices=True), [2]
    ),
    "written": lambda x: (lambda y: (y.__setitem__((slice(None), 0), 2.0), y)[1])(x.clone()),
}


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("name", SEVERAL)
def test_a_function_of_many_is_within_its_bound(name: str) -> None:
    draws = random.Random(name)
    function = SEVERAL[name]
    x = torch.tensor([draws.uniform(-3, 3) for _ in range(60)]).reshape(3, 4, 5)
    for error in ERRORS[:3]:
        result = evaluate(function, values(x, error))
        for _ in range(40):
            found = function(*corners(draws, [x], error))
            assert bool(((found - result.real).abs() <= result.error() * (1 + 1e-12) + 1e-13).all()), (name, error)
        if not error:
            assert bool(((function(x).double() - result.real).abs() <= result.error() + 1e-15).all())
            assert float(result.error().max()) < 3e-4


@pytest.mark.rule("NUM-04")
def test_elimination_that_grows_on_one_side_has_its_bound() -> None:
    """Wilkinson's matrix: U doubles from row to row if A is factored, and does not if its transpose is."""
    a = torch.eye(20) - torch.ones(20, 20).tril(-1)
    a[:, -1] = 1
    b = torch.linspace(-1, 1, 40).reshape(2, 20)
    result = evaluate(lambda a, b: torch.linalg.solve(a, b, left=False), values(a, 0.0), values(b, 0.0))
    found = torch.linalg.solve(a, b, left=False).double()
    assert bool(((found - result.real).abs() <= result.error()).all())


def test_of_many_roundings_there_is_no_bound() -> None:
    result = evaluate(torch.linalg.svdvals, values(torch.eye(1000), 0.0))
    assert result.error().tolist() == [math.inf] * 1000


@pytest.mark.parametrize(
    "compute", [lambda a: torch.linalg.inv_ex(a)[0], lambda a: torch.linalg.slogdet(a)[1]], ids=["inverse", "logarithm"]
)
def test_a_singular_matrix_has_no_oracle(compute: Run) -> None:
    with pytest.raises(NoOracleError, match="a matrix is singular"):
        evaluate(compute, values(torch.tensor([[1.0, 2.0], [2.0, 4.0]]), 1e-3))


def test_a_matrix_that_is_not_definite_has_no_oracle() -> None:
    with pytest.raises(NoOracleError, match="a matrix is not positive definite"):
        evaluate(lambda a: torch.linalg.cholesky_ex(a)[0], values(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), 1e-3))


@pytest.mark.parametrize("compute", [torch.linalg.inv, torch.linalg.det, lambda a: torch.linalg.solve(a, a)])
def test_matrices_without_elements_are_exact(compute: Run) -> None:
    result = evaluate(compute, values(torch.zeros(2, 0, 0), 0.1))
    assert not bool(result.error().any())


def test_small_forms_of_ops_that_put_and_search() -> None:
    x = torch.tensor([3.0, 1.0, 2.0])
    order = torch.tensor([1, 2, 0])
    assert (
        int(real_of(evaluate(lambda x: torch.searchsorted(x, torch.tensor([2.5]), sorter=order), values(x, 0.1)))) == 2
    )
    assert int(real_of(evaluate(lambda x: torch.bucketize(2.5, x.sort().values), values(x, 0.1)))) == 2
    assert evaluate(torch.angle, values(torch.tensor([-0.0, -1.0, 2.0]), 0.0)).real.tolist() == pytest.approx(
        [0, math.pi, 0]
    )
    for shape, wrap in (((3, 3, 3), False), ((4, 3), True), ((7, 2), True), ((2, 4), False)):
        given = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
        filled = evaluate(lambda x, wrap=wrap: x.clone().fill_diagonal_(-1.0, wrap), values(given, 0.0))
        assert torch.equal(filled.real, given.clone().fill_diagonal_(-1.0, wrap).double())


# -- jumps ------------------------------------------------------------------------------------------------------------


@pytest.mark.rule("NUM-04")
def test_what_a_comparison_leaves_undecided_is_marked() -> None:
    x = torch.tensor([0.5, 0.1, -0.05, -0.4])
    mask = evaluate(lambda x: x > 0, values(x, 0.2))
    assert mask.real.tolist() == [True, True, False, False]
    assert (mask.error() > 0).tolist() == [False, True, True, False]
    assert isinstance(evaluate(lambda x: x > 0, values(x, 0.01)), Tensor)  # nothing is undecided


@pytest.mark.rule("NUM-04")
def test_an_undecided_choice_is_an_interval() -> None:
    x = torch.tensor([0.5, 0.1, -0.4])
    chosen = evaluate(lambda x: torch.where(x > 0, x, x - 3.0), values(x, 0.2))
    assert chosen.error()[1] >= 3.0 and float(chosen.error()[0]) < 0.21
    stepped = evaluate(lambda x: torch.floor(x * 10), values(torch.tensor([0.55, 0.21]), 0.02))
    assert stepped.real.tolist() == [5.0, 2.0] and stepped.error().tolist() == [0.0, 1.0]


@pytest.mark.rule("NUM-04")
def test_places_are_decided_where_nothing_is_near() -> None:
    x = torch.tensor([[0.1, 0.9, 0.5], [0.7, 0.75, 0.1]])
    place = evaluate(lambda x: x.argmax(1), values(x, 0.1))
    assert place.real.tolist() == [1, 1] and (place.error() > 0).tolist() == [False, True]
    top, order = evaluate(lambda x: x.topk(2, 1), values(x, 0.1))
    assert torch.allclose(top.error(), torch.full((2, 2), 0.1, dtype=torch.float64))
    assert (order.error() > 0).tolist() == [[False, False], [True, True]]
    picked = evaluate(lambda x: x.gather(1, x.argmax(1, keepdim=True)), values(x, 0.1))
    assert float(picked.error()[0]) == pytest.approx(0.1) and float(picked.error()[1]) >= 0.6


def test_integers_do_not_round() -> None:
    x = torch.tensor([[0.1, 0.9, 0.5], [0.7, 0.3, 0.1]])
    for place in (
        evaluate(lambda x: (x.argmax(1) + 1) % 2, values(x, 0.01)),
        evaluate(lambda x: torch.floor(x[:, 0] * 0 + x.argmax(1)).long() + 1 - x.argmax(1), values(x, 0.01)),
        evaluate(lambda x: (x.argmax(1) * 3) // 2, values(x, 0.01)),
    ):
        assert not isinstance(place, Value) or not bool(place.error().any())


def test_what_an_undecided_index_picks_is_undecided_and_nothing_else() -> None:
    x = torch.tensor([[0.1, 0.9, 0.5], [0.7, 0.75, 0.1]])
    codes = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for picked in (
        evaluate(lambda x: codes[x.argmax(1)], values(x, 0.1)),
        evaluate(lambda x: codes.index_select(0, x.argmax(1)), values(x, 0.1)),
        evaluate(lambda x: codes.t()[:, x.argmax(1)].t(), values(x, 0.1)),
        evaluate(lambda x: torch.nn.functional.embedding(x.argmax(1), codes), values(x, 0.1)),
    ):
        assert torch.equal(picked.real, codes[1].expand(2, 4).double())
        assert bool((picked.error()[0] == 0).all()) and bool((picked.error()[1] > 0).all())


def test_a_decided_index_picks_rows_of_any_size() -> None:
    x = values(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), 0.1)
    picked = evaluate(lambda x: x[torch.tensor([2, 0, 0, 1, 2])], x)
    assert torch.equal(picked.real, x.real[[2, 0, 0, 1, 2]]) and bool((picked.error() == 0.1).all())


def test_equal_values_without_an_error_have_their_first_place() -> None:
    x = torch.tensor([[2.0, 2.0, 1.0]])
    place = evaluate(lambda x: x.argmax(1), values(x, 0.0))
    assert isinstance(place, Tensor) and place.tolist() == [0]
    _, order = evaluate(lambda x: x.topk(2, 1), values(x, 0.0))
    assert (order.error() > 0).any()  # torch promises no order


def test_logic_is_decided_by_what_is_certain() -> None:
    x = torch.tensor([0.5, 0.05])
    either = evaluate(lambda x: (x > 0) | (x > -9), values(x, 0.1))
    assert isinstance(either, Tensor) and either.tolist() == [True, True]
    both = evaluate(lambda x: (x > 0) & (x > -9), values(x, 0.1))
    assert (both.error() > 0).tolist() == [False, True]


@pytest.mark.parametrize(
    ("function", "sign"),
    [
        (lambda x: x.amax(-1), 1),
        (lambda x: x.max(-1).values, 1),
        (lambda x: x.max(), 1),
        (lambda x: torch.maximum(x[:, :2], x[:, 2:]), 1),
        (lambda x: x.amin(-1), -1),
        (lambda x: x.min(-1, keepdim=True).values, -1),
        (lambda x: torch.fmin(x[:, :2], x[:, 2:]), -1),
        (lambda x: x.logsumexp(-1), 1),
    ],
)
def test_the_error_of_what_is_not_the_largest_does_not_count(function: Run, sign: int) -> None:
    """A masked element is off by 1e31. The others are off by so much that each may lead; the bound holds for all."""
    generator = torch.Generator().manual_seed(0)
    real = torch.rand(6, 4, dtype=torch.float64, generator=generator)
    error = torch.rand(6, 4, dtype=torch.float64, generator=generator) / 2
    real[:, 1], error[:, 1] = -sign * 3.4e38, 4e31
    found = evaluate(function, Value(real=real, errors={"upstream": error}))
    assert 0.05 < float(found.errors["upstream"].max()) <= 0.5
    for _ in range(2000):
        way = torch.rand(6, 4, dtype=torch.float64, generator=generator).mul(6).sub(3).clamp(-1, 1)
        off = (function(real + way * error) - found.real).abs()
        assert bool((off <= found.error() + 1e-12).all())


def test_masks_of_minus_infinity_leave_no_error_where_they_stand() -> None:
    x = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.full((4, 4), -math.inf).triu(1)
    weights = evaluate(lambda x: (x + mask).softmax(-1), values(x, 1e-3))
    assert bool((weights.error() < 1e-2).all())
    assert torch.equal(weights.real == 0, (mask == -math.inf).expand(2, 4, 4))


# -- what else there is -----------------------------------------------------------------------------------------------


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_casts_and_what_is_computed_with_fewer_bits_round_more(dtype: torch.dtype) -> None:
    x = torch.randn(200, generator=torch.Generator().manual_seed(0)) * 3

    def function(x: Tensor) -> Tensor:
        return (x.to(dtype) * 2.5 + 1).float()

    result = evaluate(function, values(x, 0.0))
    assert bool(((function(x).double() - result.real).abs() <= result.error()).all())
    assert torch.allclose(result.real, x.double() * 2.5 + 1)  # the exact result is not rounded


def test_a_number_is_exact_and_has_the_error_of_float32() -> None:
    result = evaluate(lambda x: x * 0.1, values(torch.tensor([1.0]), 0.0))
    rounded = abs(float(torch.tensor(0.1)) - 0.1)  # of the number itself; then the product rounds
    assert float(result.real) == 0.1 and float(result.error()) == pytest.approx(rounded + 2.0**-24 * 0.1, rel=1e-9)
    turned = evaluate(lambda x: torch.view_as_real(torch.complex(x, x) * 0.1j), values(torch.tensor([1.0]), 0.0))
    assert turned.real.flatten().tolist() == [-0.1, 0.1]


def test_an_op_of_which_no_bound_is_known_leaves_everything_open() -> None:
    result = evaluate(torch.special.bessel_j0, values(torch.tensor([1.0, 2.0]), 0.0))
    assert result.error().tolist() == [math.inf, math.inf]
    assert torch.allclose(result.real, torch.special.bessel_j0(torch.tensor([1.0, 2.0], dtype=torch.float64)))


def test_an_op_in_place_changes_its_operand() -> None:
    x = values(torch.tensor([1.0, 2.0]), 0.0)
    opened = open_op(lambda x: x.mul_(3), (x,), {})
    _, changed = evaluate_opened(opened, (x,), {}, CAPABILITIES)
    assert [each.real.tolist() for each in changed.values()] == [[3.0, 6.0]]


def test_a_trace_is_of_shapes_and_constants() -> None:
    one, other = values(torch.zeros(2, 3), 0.0), values(torch.ones(2, 3), 0.5)
    assert describe((one, 2), {}) == describe((other, 2), {})
    assert len({describe((one, 2), {}), describe((one, 3), {}), describe((values(torch.zeros(3, 2), 0.0), 2), {})}) == 3


def test_results_have_the_structure_of_the_op() -> None:
    whole, [part, number] = evaluate(lambda x: (x + 1, [x[:1], 3]), values(torch.zeros(2), 0.0))
    assert whole.real.tolist() == [1.0, 1.0] and part.real.tolist() == [0.0] and number == 3
    assert len(tree_leaves([whole, part], is_leaf=lambda each: isinstance(each, Value))) == 2
