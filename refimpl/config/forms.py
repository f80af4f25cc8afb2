"""What the front doors take: forms of values, each with words and a check; any other value is one error (CFG-14).

A table of forms stands next to what has them: the attributes of each class of config, the arguments of the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

from torch import nn

from fx_quant_conformance.refimpl.errors import ConfigError, ModelError, RefimplError


class Form(NamedTuple):
    """What a value must be: `words` say it, `take` returns the value to be kept and raises for anything else."""

    words: str
    take: Callable[[Any], Any]


def coerce(kind: type[RefimplError], where: str, form: Form, value: object) -> Any:
    """Return a value as its form takes it; an error of that kind says where, what was expected and what was found."""
    try:
        return form.take(value)  # rule: CFG-14
    except RefimplError as error:
        raise type(error)(f"{where}: {error}") from None
    except Exception:
        raise kind(f"{where}: expected {form.words}, found {show(value)}") from None


def show(value: object, width: int = 200) -> str:
    """Return a value's text for an error: on one line, cut at `width` characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # of an object whose constructor did not end
        text = object.__repr__(value)
    return text if len(text) <= width else f"{text[:width]}… ({type(value).__name__})"


def _expect(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError
    return value


def _iterate(value: Any) -> Iterator[Any]:
    """Iterate over a value, but not over a string or a dict in the place of a list."""
    if isinstance(value, str | bytes | Mapping):
        raise TypeError
    yield from value


def instance_of(kind: Any, words: str) -> Form:
    """Return the form of the instances of a class, or of several."""
    return Form(words, lambda value: _expect(kind, value))


ANYTHING = Form("anything", lambda value: value)
STRING = instance_of(str, "a string")
CLASS = instance_of(type, "a class")
INTEGER = instance_of(Integral, "an integer")
NUMBER = instance_of(Real, "a number")
CALLABLE = instance_of(Callable, "something that can be called")
HASHABLE = Form("something that can be a key of a dict", lambda value: next(iter({value})))


def _take_whole(value: Any) -> int:
    whole = int(_expect(Real, value))
    if isinstance(value, bool) or whole != value:
        raise TypeError
    return whole


WHOLE = Form("a whole number", _take_whole)


def optional(form: Form) -> Form:
    """Return the form that takes None as well."""
    return Form(f"{form.words} or None", lambda value: value if value is None else form.take(value))


def list_of(words: str, take: Callable[[Any], Any] = lambda item: item) -> Form:
    """Return the form of what has items, any iterable but a string or dict; it is copied into a list."""
    return Form(f"a list of {words}", lambda value: [take(item) for item in _iterate(value)])


def dict_of(key: Form, value: Form) -> Form:
    """Return the form of a dict, which is copied."""
    words = f"a dict of {key.words} to {value.words}"
    return Form(words, lambda items: {key.take(k): value.take(v) for k, v in _expect(Mapping, items).items()})


def row_of(*forms: Form) -> Form:
    """Return the form of a tuple or list with one item per form; it is copied into a tuple."""
    words = f"a tuple ({', '.join(form.words for form in forms)})"
    return Form(words, lambda row: tuple(f.take(v) for f, v in zip(forms, _expect((tuple, list), row), strict=True)))


def check_model(where: str, value: object) -> None:
    """Raise ModelError for a value in the place of a model that is no nn.Module."""
    coerce(ModelError, where, instance_of(nn.Module, "a torch.nn.Module"), value)


def read_flag(where: str, value: object) -> bool:
    """Return what `value` is as a condition. Raises ConfigError for what is neither true nor false."""
    return bool(coerce(ConfigError, where, Form("True or False", bool), value))
