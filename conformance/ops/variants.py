"""Variation: every argument of an op away from its default, alone and in pairs.

``OpSamples`` says of one op, for each argument of its signature, which values are tried, or why it is not varied. A
test holds the samples to the signatures. Pairs are covered greedily: every pair of
values of two arguments occurs in some variant, and a variant covers as many pairs as it can.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.ops.op_model import Input, Step

Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """An argument that is not varied, and why."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSamples:
    """How an op is built, called and varied.

    ``arguments``: argument name → its values, the first one being the base (the default, where the op has one), or
    Fixed. Beside the op's own there may be ``shape`` and others with a leading underscore, which only `inputs` and
    `step` read. ``inputs``: the model's inputs for these arguments. ``step``: the op with them, as one step of a
    pattern. ``is_valid`` says whether arguments go together. ``kernels``: arguments for which engines have kernels of
    their own, and the names of those that are tried two at a time with these too. ``known``: what to change of the
    base for ops as known networks have them, or for another size; tried of an op by itself.
    """

    arguments: Mapping[str, tuple[Any, ...] | Fixed]
    inputs: Callable[[Arguments], tuple[Input, ...]]
    step: Callable[[Any, Arguments], Step]
    is_valid: Callable[[Arguments], bool] = field(default=lambda arguments: True)
    kernels: tuple[tuple[Arguments, tuple[str, ...]], ...] = ()
    known: tuple[Arguments, ...] = ()

    def base(self) -> dict[str, Any]:
        """Return the first value of every argument."""
        return {name: values[0] for name, values in self._varied().items()}

    def _varied(self) -> dict[str, tuple[Any, ...]]:
        return {name: values for name, values in self.arguments.items() if not isinstance(values, Fixed)}

    def variants(self, *, whole: bool = True, known: bool = True) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
        """Yield (the arguments away from base, all arguments): the base, dense variants, each alone, two at a time.

        The dense variants cover all pairs that are valid; they come first, so that a few variants cover much. But they
        leave few arguments at their base, which may be what a kernel is chosen by: hence the others, which have all but
        one or two there, or at what has kernels of its own. Not ``whole``: of these only what brings a value that no
        dense variant has. Then, with ``known``, those that are named one by one.
        """
        base, seen = self.base(), list[dict[str, Any]]()
        dense = list(self._dense(base))
        around = [*self._alone(base), *self._two(base, tuple(base))]
        around += [each for other, names in self.kernels for each in self._two({**base, **other}, names)]
        sparse = around if whole else self._unmet(base, dense)
        named = [{**base, **changes} for changes in self.known if known]
        for arguments in itertools.chain([base], dense, sparse, named):
            if arguments not in seen:
                seen.append(arguments)
                yield tuple(name for name in base if arguments[name] != base[name]), arguments

    def _unmet(self, base: dict[str, Any], dense: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for arguments in self._alone(base):
            if not any(all(each[name] == arguments[name] for name in base if arguments[name] != base[name])
                       for each in dense):  # fmt: skip
                yield arguments

    def _alone(self, base: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for name, values in self._varied().items():
            for value in values[1:]:
                arguments = {**base, name: value}
                if self.is_valid(arguments):
                    yield arguments

    def _two(self, base: dict[str, Any], names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        """For every two arguments of these the first values away from their bases that are valid together."""
        away = {name: values[1:] for name, values in self._varied().items() if name in names}
        for a, b in itertools.combinations(away, 2):
            tried = ({**base, a: x, b: y} for x in away[a] for y in away[b])
            yield from itertools.islice(filter(self.is_valid, tried), 1)

    def _dense(self, base: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Cover every valid pair of values away from the base."""
        away = {name: values[1:] for name, values in self._varied().items()}
        wanted = [
            ((a, x), (b, y))
            for a, b in itertools.combinations(away, 2) for x in away[a] for y in away[b]
            if self.is_valid({**base, a: x, b: y})
        ]  # fmt: skip
        while wanted:
            arguments = {**base, **dict(wanted[0])}
            for name, values in away.items():
                if name in dict(wanted[0]):
                    continue
                tried = [{**arguments, name: value} for value in values]
                found = [each for each in tried if self.is_valid(each)]
                if found:
                    arguments = max(found, key=lambda each: _covered(each, wanted))
            yield arguments
            wanted = [pair for pair in wanted if not _holds(arguments, pair)]


def _holds(arguments: Arguments, pair: Any) -> bool:
    return all(arguments[name] == value for name, value in pair)


def _covered(arguments: Arguments, wanted: list[Any]) -> int:
    return sum(_holds(arguments, pair) for pair in wanted)
