"""What the front doors take: forms of values, in words and as a check; one error for all that is none (CFG-14).

A table of forms stands beside what has them: the attributes of each class of config, the arguments of the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

from torch import nn

from refimpl.errors import ConfigError, ModelError, RefimplError


class Form(NamedTuple):
    """What a value must be: `words` say it, `take` returns what is kept of it and raises for anything else."""

    words: str
    take: Callable[[Any], Any]


def taken(kind: type[RefimplError], where: str, form: Form, value: object) -> Any:
    """Return a value as its form takes it; an error of that kind says where, what was expected and what was found."""
    try:
        return form.take(value)  # rule: CFG-14
    except RefimplError as error:
        raise type(error)(f"{where}: {error}") from None
    except Exception:
        raise kind(f"{where}: expected {form.words}, found {shown(value)}") from None


def shown(value: object, width: int = 200) -> str:
    """Return how a value is shown in an error: on one line, and not too long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # of what was not made to the end
        text = object.__repr__(value)
    return text if len(text) <= width else f"{text[:width]}… ({type(value).__name__})"


def _is(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError
    return value


def _items(value: Any) -> Iterator[Any]:
    """Return a value to be iterated over, which a string or a dict in the place of a list is not."""
    if isinstance(value, str | bytes | Mapping):
        raise TypeError
    yield from value


def instance(kind: Any, words: str) -> Form:
    """Return the form of the instances of a class, or of several."""
    return Form(words, lambda value: _is(kind, value))


ANYTHING = Form("anything", lambda value: value)
STRING = instance(str, "a string")
CLASS = instance(type, "a class")
MODULE = instance(nn.Module, "a torch.nn.Module")
INTEGER = instance(Integral, "an integer")
NUMBER = instance(Real, "a number")
CALLABLE = instance(Callable, "something that can be called")
HASHABLE = Form("something that can be a key of a dict", lambda value: next(iter({value})))
FLAG = Form("True or False", bool)


def optional(form: Form) -> Form:
    """Return the form that takes None as well."""
    return Form(f"{form.words} or None", lambda value: value if value is None else form.take(value))


def list_of(words: str, take: Callable[[Any], Any] = lambda item: item) -> Form:
    """Return the form of what has items, any iterable but a string or dict; it is copied into a list."""
    return Form(f"a list of {words}", lambda value: [take(each) for each in _items(value)])


def dict_of(key: Form, value: Form) -> Form:
    """Return the form of a dict, which is copied."""
    words = f"a dict of {key.words} to {value.words}"
    return Form(words, lambda found: {key.take(k): value.take(v) for k, v in _is(Mapping, found).items()})


def row_of(*forms: Form) -> Form:
    """Return the form of a tuple or list of so many items, each of its form; it is copied into a tuple."""
    words = f"a tuple ({', '.join(form.words for form in forms)})"
    return Form(words, lambda row: tuple(f.take(each) for f, each in zip(forms, _is((tuple, list), row), strict=True)))


def check_model(where: str, value: object) -> None:
    """Raise ModelError for what is given in the place of a model and is none."""
    taken(ModelError, where, MODULE, value)


def flag(where: str, value: object) -> bool:
    """Return what `value` is as a condition. Raises ConfigError for what is neither true nor false."""
    return bool(taken(ConfigError, where, FLAG, value))
