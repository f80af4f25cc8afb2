"""Writing: a derived BackendConfig as a Python module that constructs it, and as a table.

The module has lines of up to 88 characters, or as many as asked for. It needs refimpl only, or what a vendor puts in
its place.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from tabulate import tabulate

from fx_quant_conformance.backends import onednn_fusers
from fx_quant_conformance.conformance.claims.kinds import kind_of
from fx_quant_conformance.conformance.pt2e.derive import ProbeRow
from fx_quant_conformance.conformance.reproducers import python_text
from fx_quant_conformance.refimpl import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    MatchAllNode,
    ObservationType,
    nnqr,
    qint8,
    qint32,
    quint4x2,
    quint8,
)
from fx_quant_conformance.refimpl.config.fusers import assemble, sequential
from fx_quant_conformance.refimpl.config.patterns import leaf_name

WIDTH = 88
"""The longest line that is written, unless another is asked for."""
_SHORT = {
    quint8: "U8",
    qint8: "S8",
    qint32: "S32",
    quint4x2: "U4",
    torch.float16: "F16",
    torch.float32: "F32",
    None: "",
}
_OBSERVE = {
    ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT: "DIFFERENT",
    ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT: "SHARE",
    ObservationType.INPUT_OUTPUT_NOT_OBSERVED: "NOT_OBSERVED",
}
_GETTERS = (onednn_fusers.root_node_getter, onednn_fusers.extra_inputs_getter)
_OF_REFIMPL = (BackendConfig, BackendPatternConfig, DTypeConfig, DTypeWithConstraints, MatchAllNode, ObservationType)
_HOMES = {
    **{kind.__name__: "fx_quant_conformance.refimpl" for kind in _OF_REFIMPL},
    **{maker.__name__: maker.__module__ for maker in (*_GETTERS, onednn_fusers.conv_add, sequential)},
    "Any": "typing",
    "partial": "functools",
}
"""The modules of the names that a written module may need, beside those of its ops."""
_PUBLIC = {
    **{id(getattr(nnqr, name)): f"nnqr.{name}" for name in dir(nnqr) if not name.startswith("_")},
    id(MatchAllNode): "MatchAllNode",
}
_FIELDS = (
    "quant_min_lower_bound",
    "quant_max_upper_bound",
    "scale_min_lower_bound",
    "scale_max_upper_bound",
    "scale_exact_match",
    "zero_point_exact_match",
)
_NOTHING_UNSAID = "without notes:"
_SCHEMES = '"""For Capabilities: a BackendConfig has no words for schemes of weights."""'
_PARTS = {
    "root_module": "root",
    "reference_quantized_module_for_root": "reference",
    "qat_module": "qat",
    "fused_module": "fused",
    "fuser_method": "fuser",
    "num_tensor_args_to_observation_type": "by_tensors",
    "input_type_to_index": "index",
}
"""What the written module calls the parts of an entry."""
_ENTRY = '''\
def _entry(
    pattern: Any, *dtype_configs: DTypeConfig, observe: ObservationType = DIFFERENT, **parts: Any
) -> BackendPatternConfig:
    """Return an entry; `parts`: by the names in PARTS, or of the dict form."""
    form = {"observation_type": observe, "dtype_configs": [*dtype_configs]}
    named = {PARTS.get(name, name): value for name, value in parts.items()}
    return BackendPatternConfig.from_dict({"pattern": pattern, **form, **named})
'''
_ENTRY_OF_TWO = '''\
def _entry_of_two(pattern: Any, *dtype_configs: DTypeConfig, **parts: Any) -> BackendPatternConfig:
    """Return an entry of a complex pattern, whose wildcard is a second input."""
    return _entry(
        None, *dtype_configs, pattern_complex_format=pattern, root_node_getter=root_node_getter(pattern),
        extra_inputs_getter=extra_inputs_getter(pattern), **parts
    )
'''
_GETTER = '''\
def backend_config() -> BackendConfig:
    """Return a new BackendConfig of these claims."""
    return BackendConfig(NAME).set_backend_pattern_configs(ENTRIES)
'''


def render_module(config: BackendConfig, rows: Sequence[ProbeRow], origin: Sequence[str], *, width: int = WIDTH) -> str:
    """Return the text of a module whose ``backend_config()`` constructs a derived config.

    ``rows``: those of `derive_config`, for the notes of the claims. ``origin``: lines that say what it is derived from.
    ``width``: of the longest line.
    """
    spelling, constants = _Spelling(), _name_dtype_configs(config)
    notes = [row.notes for row in rows if not row.reason]
    entries = [
        line
        for entry, said, last in zip(config.configs, notes, [(), *notes], strict=False)
        for line in (*([] if said == last else _comment(said, width)), _format_entry(entry, constants, spelling))
    ]
    schemes = tuple(sorted({scheme for row in rows for scheme in row.schemes}))
    observe = {
        ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT,
        *(entry.observation_type for entry in config.configs),
    }
    observe |= {each for entry in config.configs for each in entry._num_tensor_args_to_observation_type.values()}
    parts = {short: name for name, short in _PARTS.items()}
    body = [
        f"NAME = {config.name!r}",
        *([f"WEIGHT_SCHEMES = {spelling.spell(schemes)}", _SCHEMES] if schemes else []),
        "",
        *(f"{name} = ObservationType.{each.name}" for each, name in _OBSERVE.items() if each in observe),
        "",
        f"PARTS = {parts!r}",
        '"""The names of the parts of an entry below, and in BackendPatternConfig\'s dict form."""',
        "",
        *(f"{name} = {_format_dtypes(dtype_config, spelling)}" for dtype_config, name in constants.items()),
        _ENTRY,
        *([_ENTRY_OF_TWO] if any(line.startswith("_entry_of_two(") for line in entries) else []),
        "ENTRIES = [",
        *entries,
        "]",
        _GETTER,
    ]
    heading = "\n".join(_format_head(origin, width))
    return python_text.compose(heading, "\n".join(body), {**spelling.homes, **_HOMES}, width=width)


def _comment(notes: Sequence[str], width: int) -> Iterator[str]:
    """Yield the lines of the comment that stands before all entries with these notes."""
    for note in notes or [_NOTHING_UNSAID]:
        yield from textwrap.wrap(note, width, initial_indent="    # ", subsequent_indent="    #   ")


def _format_head(origin: Sequence[str], width: int) -> Iterator[str]:
    yield "The BackendConfig that a Quantizer amounts to, to be read before it is claimed."
    yield ""
    for line in origin:
        yield from textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    yield ""


# -- dtype configs ----------------------------------------------------------------------------------------------------


def _name_dtype_configs(config: BackendConfig) -> dict[DTypeConfig, str]:
    """Name each dtype config by its kind and dtypes: ``STATIC_U8_S8``; those of one name are numbered."""
    names = dict[DTypeConfig, str]()
    for entry in config.configs:
        for dtypes in entry.dtype_configs:
            if dtypes not in names:
                kind = kind_of(dtypes).value.upper().replace(" ", "_")
                name = "_".join(filter(None, ["" if kind == "STATIC" else kind, *_abbreviate(dtypes)]))
                same = sum(1 for other in names.values() if other == name or other.startswith(f"{name}_NO"))
                names[dtypes] = f"{name}_NO{same + 1}" if same else name
    return names


def _abbreviate(dtypes: DTypeConfig) -> list[str]:
    ends = [dtypes.input_dtype, dtypes.weight_dtype]
    if dtypes.output_dtype not in (dtypes.input_dtype, torch.float32):
        ends.append(dtypes.output_dtype)
    return [_SHORT.get(dtype, str(dtype).removeprefix("torch.").upper()) for dtype in ends]


def _format_dtypes(dtypes: DTypeConfig, spelling: _Spelling) -> str:
    parts = {
        "input_dtype": _format_constraints(dtypes.input_dtype_with_constraints, spelling),
        "output_dtype": _format_constraints(dtypes.output_dtype_with_constraints, spelling),
        "weight_dtype": _format_constraints(dtypes.weight_dtype_with_constraints, spelling),
        "bias_dtype": None if dtypes.bias_dtype is None else spelling.spell(dtypes.bias_dtype),
        "is_dynamic": "True" if dtypes.is_dynamic else None,
    }
    return f"DTypeConfig({', '.join(f'{key}={text}' for key, text in parts.items() if text is not None)})"


def _format_constraints(constraints: DTypeWithConstraints, spelling: _Spelling) -> str | None:
    if constraints.dtype is None:
        return None
    values = {field: getattr(constraints, field) for field in _FIELDS}
    bounds = [f"{field}={_format_number(value)}" for field, value in values.items() if value is not None]
    dtype = spelling.spell(constraints.dtype)
    return f"DTypeWithConstraints({', '.join([dtype, *bounds])})" if bounds else dtype


def _format_number(value: float) -> str:
    """Spell a number exactly: a power of two below 1/2 as such."""
    mantissa, exponent = math.frexp(value)
    return f"2**{exponent - 1}" if mantissa == 0.5 and exponent < 0 else repr(value)


# -- entries ----------------------------------------------------------------------------------------------------------


def _format_entry(entry: BackendPatternConfig, constants: dict[DTypeConfig, str], spelling: _Spelling) -> str:
    form = entry.to_dict()
    observe = _OBSERVE[form.pop("observation_type")]
    own = [] if observe == "DIFFERENT" else [f"observe={observe}"]
    dtype_configs = [constants[dtypes] for dtypes in entry.dtype_configs]
    del form["dtype_configs"]
    head, pattern = "_entry", form.pop("pattern", None)
    if _has_usual_getters(entry):
        head, pattern = "_entry_of_two", form.pop("pattern_complex_format")
        for maker in _GETTERS:
            del form[maker.__name__]
    rest = [f"{_PARTS.get(key, key)}={spelling.spell(value)}" for key, value in form.items()]
    return f"{head}({', '.join([spelling.spell(pattern), *dtype_configs, *own, *rest])}),"


def _has_usual_getters(entry: BackendPatternConfig) -> bool:
    """Tell whether an entry's getters are those that the suite makes of its complex pattern."""
    pattern = entry._pattern_complex_format
    if pattern is None:
        return False
    given = (entry._root_node_getter, entry._extra_inputs_getter)
    return all(_are_same(maker(pattern), getter) for maker, getter in zip(_GETTERS, given, strict=True))


class _Spelling:
    """Spells the parts of entries; ``homes``: the modules that the written module takes names of ops from."""

    def __init__(self) -> None:
        self.homes = dict[str, str]()

    def spell(self, value: Any) -> str:
        """Spell a class, a function, a dtype, a fuser or plain data."""
        return python_text.spell(value, self._spell_other)

    def _spell_other(self, value: Any) -> str:
        if isinstance(value, ObservationType):
            return _OBSERVE[value]
        if isinstance(value, partial):
            return self._format_partial(value)
        name = _PUBLIC.get(id(value)) or leaf_name(value)
        home, _, own = name.rpartition(".")
        if home in python_text.MODULES or home in python_text.HOMES or name in _HOMES:
            return name
        self.homes[own] = home
        return own

    def _format_partial(self, value: partial[Any]) -> str:
        """Spell a fuser by the function that makes it, if that is one of the suite's."""
        if value.func is assemble and len(value.args) == 1:
            return f"{sequential.__name__}({self.spell(value.args[0])})"
        for side, relu in product((0, 1), (False, True)):
            if _are_same(onednn_fusers.conv_add(conv_side=side, relu=relu), value):
                return f"conv_add(conv_side={side}, relu={relu})"
        words = [self.spell(value.func), *map(self.spell, value.args)]
        words += [f"{key}={self.spell(each)}" for key, each in value.keywords.items()]
        return f"partial({', '.join(words)})"


def _are_same(made: Any, value: Any) -> bool:
    """Tell whether two partials call the same function with the same arguments."""
    if not (isinstance(made, partial) and isinstance(value, partial)):
        return False
    return (made.func, made.args, made.keywords) == (value.func, value.args, value.keywords)


def render_table(rows: Sequence[ProbeRow]) -> str:
    """Return the rows as a table: each pattern, with its dtypes and what the config leaves unsaid, or the reason."""
    lines = [(row.pattern, row.dtypes or "—", "; ".join((*row.schemes, *row.notes)) or row.reason) for row in rows]
    return tabulate(lines, headers=("pattern", "dtypes", "unsaid, or why there is no claim"), tablefmt="simple")
