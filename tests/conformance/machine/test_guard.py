"""Guards: a marked function is itself, but for what hooks put in its place while their context lasts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest

from conformance.machine import guard as module
from conformance.machine.guard import GUARDS, Finds, Hook, guard, replace_guards
from conformance.machine.isolation import Ending, Forked
from reports.schema import Measurement


@pytest.fixture(autouse=True)
def no_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guards of a test are not among those of the suite."""
    monkeypatch.setattr(module, "GUARDS", {})


def noting(calls: list[str], text: str) -> Hook:
    """A hook that notes each call of a guard, with a text of its own, before and after it."""

    def hook(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls.append(f"{text} before {name}")
            result = function(*arguments, **keywords)
            calls.append(f"{text} after {name}")
            return result

        return call

    return hook


def test_a_marked_function_works_as_before_without_hooks() -> None:
    @guard("sum")
    def add(one: int, *others: int, scale: int = 1) -> int:
        """Add numbers."""
        return scale * sum([one, *others])

    assert add(1) == 1 and add(1, 2, 3, scale=2) == 12
    assert (add.__name__, add.__doc__) == ("add", "Add numbers.")
    assert [*inspect.signature(add).parameters] == ["one", "others", "scale"]
    with pytest.raises(TypeError, match="add"):
        add()  # type: ignore[call-arg]


def test_what_a_marked_function_raises_or_yields_goes_through() -> None:
    @guard("stream", Finds.PROBLEMS)
    def stream(count: int) -> Iterator[int]:
        yield from range(count)
        raise LookupError("no more")

    found = stream(2)
    assert (next(found), next(found)) == (0, 1)
    with pytest.raises(LookupError, match="no more"):
        next(found)


def test_a_method_may_be_marked() -> None:
    class Scale:
        factor = 3

        @guard("scale")
        def scaled(self, value: int) -> int:
            return self.factor * value

    calls: list[str] = []
    with replace_guards(noting(calls, "it")):
        assert Scale().scaled(2) == 6
    assert calls == ["it before scale", "it after scale"]


def test_a_mark_is_kept_by_its_name_and_what_it_finds() -> None:
    guard("a")(len)
    guard("b", Finds.ERROR)(len)
    assert module.GUARDS == {"a": Finds.PROBLEM, "b": Finds.ERROR}
    assert GUARDS is not module.GUARDS, "the suite's own are left alone"


def test_hooks_apply_in_order_and_end_with_their_context() -> None:
    calls: list[str] = []

    @guard("body")
    def body() -> None:
        calls.append("body")

    with replace_guards(noting(calls, "outer")):
        with replace_guards(noting(calls, "inner")):
            body()
        inside = ["outer before body", "body", "outer after body"]
        assert calls == ["inner before body", *inside, "inner after body"], "a later hook gets what an earlier one made"
        calls.clear()
        body()
        assert calls == inside
        calls.clear()
    body()
    assert calls == ["body"]


def test_a_hook_ends_with_its_context_whatever_ends_that() -> None:
    calls: list[str] = []
    with pytest.raises(KeyboardInterrupt), replace_guards(noting(calls, "it")):
        raise KeyboardInterrupt
    guard("body")(calls.clear)()
    assert calls == []


def test_of_equal_hooks_one_ends_with_each_context() -> None:
    calls: list[str] = []
    hook = noting(calls, "it")
    marked = guard("body")(calls.copy)
    with replace_guards(hook):
        with replace_guards(hook):
            marked()
        assert len(calls) == 4
        marked()
    marked()
    assert len(calls) == 6


def test_a_hook_may_put_anything_in_the_place_of_a_guard() -> None:
    one, other = guard("one")(lambda: 1), guard("other")(lambda: 2)
    with replace_guards(lambda name, function: (lambda: 0) if name == "one" else function):
        assert (one(), other()) == (0, 2)
    assert (one(), other()) == (1, 2)


def test_a_function_that_is_marked_or_called_within_a_context_is_hooked_too() -> None:
    calls: list[str] = []
    with replace_guards(noting(calls, "it")):
        inner = guard("inner")(lambda: 3)
        outer = guard("outer")(lambda: inner() + 1)
        assert outer() == 4
    assert calls == ["it before outer", "it before inner", "it after inner", "it after outer"]


def test_a_name_that_another_guard_has_is_refused() -> None:
    guard("both", Finds.TEXT)(len)
    with pytest.raises(ValueError, match="two guards are named 'both'"):
        guard("both", Finds.TEXT)(len)
    assert module.GUARDS == {"both": Finds.TEXT}


def test_hooks_hold_in_processes_that_are_forked_from_this_one() -> None:
    marked = guard("value")(lambda: "found")

    def serve(name: str) -> Iterator[Measurement]:
        yield Measurement(topic="guard", subject=name, values={"value": marked()})

    with replace_guards(lambda name, function: lambda: f"{function()} by {name}"):
        isolation = Forked(serve, limit=60, share=1)
        result = isolation.run("x")
        isolation.close()
    assert result.ending is Ending.DONE
    assert result.messages == (Measurement(topic="guard", subject="x", values={"value": "found by value"}),)
