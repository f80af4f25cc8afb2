"""The oracle's primitives of linear algebra: systems, inverses, determinants, factors and singular values (NUM-04).

A backward stable algorithm gives the exact result of a matrix A + E, where |E| is what the operand is off and what the
algorithm rounds. Each bound is that of A + E against A. Of singular vectors and of other factors there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fx_quant_conformance.conformance.bounds.error_bounds import (
    ErrorBound,
    Errors,
    NoOracleError,
    OpCall,
    OpRule,
    Value,
    add_error,
    as_operand,
    error_of,
    gamma,
    make_aten_rule,
)
from fx_quant_conformance.conformance.oracle.unary import FUNCTION


def _round_elimination(a: Tensor) -> Tensor:
    """What elimination with partial pivoting rounds: γ₃ₙ·|L|·|U| (Higham 2002, Theorem 9.4), where |L| ≤ 1.

    So each element is at most n times the largest of U, of which twice that of the exact one is taken.
    """
    n = a.shape[-1]
    upper: Tensor = torch.linalg.lu_factor_ex(a)[0].triu().abs().amax((-2, -1), keepdim=True)
    return (2 * gamma(3 * n) * n * upper).expand_as(a)


def _invert(a: Tensor) -> Tensor:
    """Return |A⁻¹|. Raises NoOracleError for a singular matrix."""
    inverse, info = torch.linalg.inv_ex(a)
    if bool(info.any()):
        raise NoOracleError("a matrix is singular")
    known: Tensor = inverse.abs().nan_to_num(math.inf)
    return known


def _sum_rows(m: Tensor, e: Tensor) -> Tensor:
    """The row sums of |A⁻¹|·|E|, as a column."""
    return (m @ e.sum(-1, keepdim=True)).nan_to_num(math.inf)


def _bound_solution(a: Tensor, own: Tensor, e: Mapping[str, Tensor], b: Tensor, f: Mapping[str, Tensor]) -> Errors:
    """X of A·X = B: with M = |A⁻¹|, |D| ≤ M·(f + e·|X|) + M·e·|D|, where a row sum of M·e is less than 1.

    So of each cause g = M·(f + e·|X|), and once more the row sums of M·e times the largest of g's column / (1 − r).
    By way of the inverse |X| becomes M·|B|, which is no less, and γₙ₊₂ of it rounds.
    """
    m = _invert(a)
    reached = m @ b.abs()
    rows = _sum_rows(m, sum(e.values(), own))
    left = 1 - rows.amax(-2, keepdim=True)
    bounds = {"function": m @ (own @ reached) + gamma(a.shape[-1] + 2) * reached}
    for cause in dict.fromkeys((*e, *f)):
        moved = torch.zeros_like(b) if cause not in f else f[cause]
        moved = moved + e[cause] @ reached if cause in e else moved
        add_error(bounds, cause, m @ moved)
    return {
        cause: torch.where(left > 0, g + rows * g.amax(-2, keepdim=True) / left, math.inf).nan_to_num(math.inf)
        for cause, g in bounds.items()
    }


def _keep(each: Tensor) -> Tensor:
    return each


def _turn(each: Tensor) -> Tensor:
    return each.mT


def _errors_of(operand: Any, change: Callable[[Tensor], Tensor] = _keep) -> dict[str, Tensor]:
    value = as_operand(operand)
    return {cause: change(error_of(cause)(value)) for cause in value.errors}


def _bound_system(call: OpCall) -> Any:
    """A·X = B, or X·A = B, by elimination; besides X nothing has a bound."""
    a, b = (as_operand(each).real for each in call.args[:2])
    turn = _turn if not call.kwargs.get("left", True) else _keep
    is_vector = b.dim() == 1 or b.shape == a.shape[:-1]
    columns = partial(torch.unsqueeze, dim=-1) if is_vector else turn
    e = _errors_of(call.args[0], turn)
    own = torch.maximum(_round_elimination(turn(a)), _round_elimination(turn(a).mT))  # either may be factored
    errors = _bound_solution(turn(a), own, e, columns(b), _errors_of(call.args[1], columns))
    back = partial(torch.squeeze, dim=-1) if is_vector else turn
    return {cause: back(each) for cause, each in errors.items()}, *map(_leave, call.result[1:])


def _leave(result: Tensor) -> Errors:
    """Nothing is known of a result that is not read as a rule."""
    return {"function": torch.full(result.shape, math.inf, dtype=torch.float64)}


def _bound_inverse(call: OpCall) -> Any:
    """A⁻¹ is X of A·X = 1."""
    a = as_operand(call.args[0]).real
    one = torch.eye(a.shape[-1], dtype=a.dtype).expand_as(a)
    errors = _bound_solution(a, _round_elimination(a), _errors_of(call.args[0]), one, {})
    return errors, *map(_leave, call.result[1:])


def _bound_triangular(call: OpCall) -> Errors:
    """A triangular A: substitution rounds by γₙ of |A| (Higham 2002, Theorem 8.5)."""
    a, b = (as_operand(each).real for each in call.args[:2])
    part = torch.triu if call.kwargs["upper"] else torch.tril
    is_unit, turn = call.kwargs.get("unitriangular", False), _keep if call.kwargs.get("left", True) else _turn

    def read(each: Tensor, diagonal: float) -> Tensor:
        each = part(each)
        each = each - torch.diag_embed(each.diagonal(dim1=-2, dim2=-1) - diagonal) if is_unit else each
        return turn(each)

    own = gamma(a.shape[-1] + 2) * read(a, 1.0).abs()
    errors = _errors_of(call.args[0], partial(read, diagonal=0.0))
    bounds = _bound_solution(read(a, 1.0), own, errors, turn(b), _errors_of(call.args[1], turn))
    return {cause: turn(each) for cause, each in bounds.items()}


def _find_shares(a: Tensor, errors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Return ρ = ‖|A⁻¹|·|E|‖∞ by cause, and all of it: the eigenvalues of A⁻¹·E are no larger."""
    m = _invert(a)
    causes = {"function": _round_elimination(a)}
    for cause, each in errors.items():
        add_error(causes, cause, each)
    shares = {cause: _sum_rows(m, each).amax((-2, -1)) for cause, each in causes.items()}
    return shares, sum(shares.values(), torch.zeros(()))


def _bound_determinant(call: OpCall) -> Any:
    """det(A + E) = det A·det(1 + A⁻¹·E): off by (1 + ρ)ⁿ − 1 of itself; n factors round by γₙ."""
    a, result = as_operand(call.args[0]).real, call.result[0]
    n = a.shape[-1]
    shares, total = _find_shares(a, _errors_of(call.args[0]))
    slope = torch.where(total > 0, torch.expm1(n * torch.log1p(total)) / total, 0.0) * result.abs()
    errors = {cause: (share * slope).nan_to_num(math.inf, math.inf) for cause, share in shares.items()}
    return add_error(errors, "function", gamma(n) * result.abs()), *map(_leave, call.result[1:])


def _bound_logarithm(call: OpCall) -> Any:
    """The logarithm of |det(A + E)|: off by −n·log(1 − ρ); n logarithms and their sum round.

    The sign is kept where ρ is below 1.
    """
    a = as_operand(call.args[0]).real
    sign, _, factors, *_ = call.result
    n = a.shape[-1]
    shares, total = _find_shares(a, _errors_of(call.args[0]))
    slope = torch.where(total < 1, -n * torch.log1p(-total.clamp(max=1.0)) / total, math.inf)
    errors = {cause: (share * slope).nan_to_num(math.inf, math.inf) for cause, share in shares.items()}
    logarithms = factors.diagonal(dim1=-2, dim2=-1).abs().log().abs().sum(-1)
    add_error(errors, "function", (2 * FUNCTION + gamma(n)) * logarithms + n * FUNCTION)
    turned = {"function": torch.where(total < 1, 0.0, 2.0).expand_as(sign)}
    return turned, errors, *map(_leave, call.result[2:])


def _bound_cholesky(call: OpCall) -> Any:
    """L of A = L·Lᵀ: with η = ‖L⁻¹·E·L⁻ᵀ‖ below 1/2, L⁻¹·ΔL is at most √2·η / (1 + √(1 − 2η)), by Frobenius' norm.

    (Drmač, Omladič and Veselić 1994.) Its own evaluation rounds by γₙ₊₁·|L|·|Lᵀ| (Higham 2002, Theorem 10.3).
    """
    if bool(call.result[1].any()):
        raise NoOracleError("a matrix is not positive definite")
    is_upper = bool(call.args[1]) if len(call.args) > 1 else bool(call.kwargs.get("upper", False))
    lower = call.result[0].mT if is_upper else call.result[0]
    errors = _errors_of(call.args[0], lambda each: _mirror(each, is_upper))
    add_error(errors, "function", 2 * gamma(lower.shape[-1] + 1) * lower.abs() @ lower.abs().mT)
    m = _invert(lower)
    shares = {cause: torch.linalg.matrix_norm(m @ each @ m.mT)[..., None, None] for cause, each in errors.items()}
    total = sum(shares.values(), torch.zeros(()))
    slope = torch.where(total < 0.5, 2**0.5 / (1 + (1 - 2 * total.clamp(max=0.5)).sqrt()), math.inf)
    rows = lower.norm(dim=-1, keepdim=True).expand_as(lower).tril()
    bounds = {cause: torch.where(rows == 0, 0.0, rows * share * slope) for cause, share in shares.items()}
    moved = {cause: (each.mT if is_upper else each).nan_to_num(math.inf) for cause, each in bounds.items()}
    return moved, *map(_leave, call.result[1:])


def _mirror(each: Tensor, is_upper: bool) -> Tensor:
    """A symmetric matrix of the half that is read."""
    half = each.triu() if is_upper else each.tril()
    return half + (half - torch.diag_embed(half.diagonal(dim1=-2, dim2=-1))).mT


def _bound_spectrum(place: int, a: Tensor, errors: Mapping[str, Tensor], results: tuple[Tensor, ...]) -> Any:
    """Singular values, and eigenvalues of a symmetric matrix, are off by at most ‖E‖ (Weyl), of any unitary norm.

    Householder's reflections from both sides round by 20·m·n·u of ‖A‖ at most (Higham 2002, Theorem 19.4).
    """
    own = gamma(20 * a.shape[-2] * a.shape[-1]) * torch.linalg.matrix_norm(a)[..., None]
    bounds = {cause: torch.linalg.matrix_norm(each)[..., None] for cause, each in errors.items()}
    add_error(bounds, "function", own)
    known = {cause: each.expand_as(results[place]) for cause, each in bounds.items()}
    return tuple(known if number == place else _leave(each) for number, each in enumerate(results))


def _bound_singular_values(call: OpCall) -> Any:
    return _bound_spectrum(1, as_operand(call.args[0]).real, _errors_of(call.args[0]), call.result)


def _bound_eigenvalues(call: OpCall) -> Any:
    is_upper = (call.args[1] if len(call.args) > 1 else call.kwargs.get("UPLO", "L")).upper() == "U"
    errors = _errors_of(call.args[0], lambda each: _mirror(each, is_upper))
    return _bound_spectrum(0, _mirror(as_operand(call.args[0]).real, is_upper), errors, call.result)


def _bound_any(bound: ErrorBound, call: OpCall) -> Any:
    """As the bound says; of matrices without elements all is exact."""
    if all(as_operand(each).real.numel() for each in call.args if isinstance(each, (Tensor, Value))):
        return bound(call)
    return ({},) * len(call.result) if isinstance(call.result, tuple) else {}


LINEAR_ALGEBRA: Mapping[str, OpRule] = {
    name: make_aten_rule(partial(_bound_any, bound))
    for name, bound in {
        "_linalg_solve_ex": _bound_system,
        "linalg_inv_ex": _bound_inverse,
        "linalg_solve_triangular": _bound_triangular,
        "_linalg_det": _bound_determinant,
        "_linalg_slogdet": _bound_logarithm,
        "linalg_cholesky_ex": _bound_cholesky,
        "_linalg_svd": _bound_singular_values,
        "_linalg_eigh": _bound_eigenvalues,
    }.items()
}
"""By the name of the aten op."""
