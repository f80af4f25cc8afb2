"""Guards: a marked function is itself, but for what a test puts in its place (tests/mutation/guards.py)."""

from __future__ import annotations

import inspect

import pytest

from fx_quant_conformance.conformance.machine import guard as module
from fx_quant_conformance.conformance.machine.guard import GUARDS, guard


@pytest.fixture(autouse=True)
def no_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guards of a test are not among those of the suite."""
    monkeypatch.setattr(module, "GUARDS", {})


def test_a_marked_function_works_as_before() -> None:
    @guard("sum")
    def add(one: int, *others: int, scale: int = 1) -> int:
        """Add numbers."""
        return scale * sum([one, *others])

    assert add(1) == 1 and add(1, 2, 3, scale=2) == 12
    assert (add.__name__, add.__doc__) == ("add", "Add numbers.")
    assert [*inspect.signature(add).parameters] == ["one", "others", "scale"]
    with pytest.raises(TypeError, match="add"):
        add()  # type: ignore[call-arg]
    assert module.GUARDS.keys() == {"sum"} and GUARDS is not module.GUARDS, "the suite's own are left alone"


def test_a_test_may_put_anything_in_the_place_of_a_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = guard("one")(lambda: 1), guard("other")(lambda: 2)
    with monkeypatch.context() as context:
        context.setitem(module.GUARDS, "one", lambda: 0)
        assert (one(), other()) == (0, 2)
    assert (one(), other()) == (1, 2)
