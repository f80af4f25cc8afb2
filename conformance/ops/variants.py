"""Variation: every argument of an op away from its default, one at a time and in pairs.

``OpRecord`` holds all that is known of one op. It says for each argument of its signature which values are tried, or
why it is not varied. A test holds the samples to the signatures. Pairs are covered greedily: every pair of values of
two arguments occurs in some variant, and a variant covers as many pairs as it can.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fx_quant_conformance.conformance.bounds.error_bounds import OpRule
from fx_quant_conformance.conformance.ops.op_model import Input, Step

Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """An argument that is not varied, and why."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRecord:
    """How an op is built, called and varied, what computes it exactly, and how far a right backend may be off."""

    arguments: Mapping[str, tuple[Any, ...] | Fixed]
    """Argument name → its values, the first one being the base (the default, where the op has one), or Fixed. In
    addition to the op's own there may be ``shape`` and others with a leading underscore, which only `inputs` and `step`
    read."""
    inputs: Callable[[Arguments], tuple[Input, ...]] = field(
        default=lambda arguments: (Input(shape=arguments["shape"]),)
    )
    """The model's inputs for these arguments: one activation of that shape, or others."""
    step: Callable[[Any, Arguments], Step]
    """The op with these arguments, as one step of a pattern."""
    is_valid: Callable[[Arguments], bool] = field(default=lambda arguments: True)
    """Whether arguments go together."""
    kernels: tuple[tuple[Arguments, tuple[str, ...]], ...] = ()
    """Arguments for which engines have kernels of their own, and the names of those that are tried two at a time with
    these too."""
    rule: OpRule | None = None
    """Its exact result and its bound (NUM-04). None: that of the function that a module holds the weight of, of its
    reference module, or of the primitives that torch writes it in; what reads a shape has none."""
    epilogue: Arguments | None = None
    """Where it follows a layer, and clamps or bends away from zero: its arguments, as far as they are not the base.
    None: it bends nothing; fused_modules.py has what follows with arguments of its own."""
    known: tuple[Arguments, ...] = ()
    """Changes of the base for ops as known networks have them, or for another size. They are tried only where the op is
    the whole pattern."""
    idle: Callable[[Arguments], Collection[str]] = field(default=lambda arguments: ())
    """Names of arguments that change nothing beside the others."""
    derived: Callable[[Arguments], Arguments] = field(default=lambda arguments: {})
    """Arguments of the op that follow from the others, such as groups from ``shape``."""

    def resolve(self, arguments: Arguments) -> dict[str, Any]:
        """Return the arguments as the op gets them, with those that follow from others."""
        return {**arguments, **self.derived(arguments)}

    def base(self) -> dict[str, Any]:
        """Return the first value of every argument."""
        return {name: values[0] for name, values in self._varied.items()}

    @property
    def _varied(self) -> dict[str, tuple[Any, ...]]:
        return {name: values for name, values in self.arguments.items() if not isinstance(values, Fixed)}

    def variants(self, *, whole: bool = True, known: bool = True) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
        """Yield (the arguments away from base, all arguments): the base, dense variants, one away, then two away.

        The dense variants cover all pairs that are valid; they come first, so that a few variants cover much. But they
        leave few arguments at their base, which a kernel may be chosen by. So the others have all but one or two there,
        or at values with kernels of their own. Not ``whole``: of these only the ones with a value that no dense variant
        has. Then, with ``known``, those that are named one by one.
        """
        base, seen = self.base(), list[dict[str, Any]]()
        dense, sparse = list(self._cover_pairs(base)), list(self._change_one(base))
        if whole:
            sparse += self._change_two(base, tuple(base))
            sparse += [each for kernel, names in self.kernels for each in self._change_two({**base, **kernel}, names)]
        else:
            sparse = [one for one in sparse if not any(one.items() - base.items() <= each.items() for each in dense)]
        named = [{**base, **changes} for changes in self.known if known]
        for arguments in [base, *dense, *sparse, *named]:
            if arguments not in seen:
                seen.append(arguments)
                yield tuple(name for name in base if arguments[name] != base[name]), arguments

    def _change_one(self, base: dict[str, Any]) -> Iterator[dict[str, Any]]:
        changed = ({**base, name: value} for name, values in self._varied.items() for value in values[1:])
        return filter(self.is_valid, changed)

    def _change_two(self, base: dict[str, Any], names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        """For every two arguments of these the first values away from their bases that are valid together."""
        away = {name: values[1:] for name, values in self._varied.items() if name in names}
        for a, b in itertools.combinations(away, 2):
            changed = ({**base, a: x, b: y} for x in away[a] for y in away[b])
            yield from itertools.islice(filter(self.is_valid, changed), 1)

    def _cover_pairs(self, base: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Cover every valid pair of values away from the base."""
        away = {name: values[1:] for name, values in self._varied.items()}
        pairs = [
            {a: x, b: y}
            for a, b in itertools.combinations(away, 2)
            for x in away[a]
            for y in away[b]
            if self.is_valid({**base, a: x, b: y})
        ]
        while pairs:
            arguments = {**base, **pairs[0]}
            for name in [name for name in away if name not in pairs[0]]:
                candidates = ({**arguments, name: value} for value in away[name])
                if valid := list(filter(self.is_valid, candidates)):
                    arguments = max(valid, key=lambda each: sum(pair.items() <= each.items() for pair in pairs))
            yield arguments
            pairs = [pair for pair in pairs if not pair.items() <= arguments.items()]
