"""A backend's config as plain data, and back: how the judge gets it without importing the vendor's code.

Classes and functions travel by name. The judge looks a name up in a table of torch's ops and of what it may call as a
fuser method or getter: no name has it import anything. In place of any other one it gets a stand-in of the same name,
which matches nothing and cannot be run.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache, partial
from pkgutil import resolve_name
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn

from fx_quant_conformance.refimpl import BackendConfig, DTypeWithConstraints, ObservationType
from fx_quant_conformance.refimpl.config.patterns import MatchAllNode, is_match_all, leaf_name
from fx_quant_conformance.refimpl.legacy import QUANTIZATION, find_dtype, is_dtype, nni, nniqat, nnqat, nnqatd, nnqr

_HOMES = (torch, F, operator, nn, nni, nnqat, nnqatd, nniqat, nnqr)
"""Where the module classes and functions are that a config may name."""
_ONEDNN = f"{QUANTIZATION}.backend_config.onednn"
CALLED = (
    "fx_quant_conformance.refimpl.config.fusers.assemble",
    "fx_quant_conformance.refimpl.config.fusers.fuse_bn",
    *(
        f"fx_quant_conformance.backends.onednn_fusers.{name}"
        for name in ("_fuse_add", "_fuse_add_relu", "_at", "_all_at")
    ),
    *(
        f"{QUANTIZATION}.fuser_method_mappings.fuse_{parts}"
        for parts in ("conv_bn", "conv_bn_relu", "convtranspose_bn", "linear_bn")
    ),
    f"{_ONEDNN}._fuse_linear_bn_leaky_relu",
    *(
        f"{_ONEDNN}._{name.format(parts)}_{side}"
        for name in ("fuse_{}", "{}_root_node_getter", "{}_extra_inputs_getter")
        for parts in ("conv_add", "conv_bn_add", "conv_add_relu", "conv_bn_add_relu")
        for side in ("left", "right")
    ),
)
"""The fuser methods and getters that the judge calls, with arguments from the config: data and module classes."""
_CALLS = ("fuser_method", "root_node_getter", "extra_inputs_getter")
"""The keys of an entry whose values the judge calls."""


class ConfigDataError(Exception):
    """The data describe no config."""


def config_to_data(config: BackendConfig) -> Any:
    """Return a config as data that JSON holds."""
    return _encode(config.to_dict())


def config_from_data(data: Any) -> BackendConfig:
    """Return the config of data. Raises ConfigDataError for data that are none."""
    try:
        return BackendConfig.from_dict(_decode(data))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, ImportError) as error:
        raise ConfigDataError(f"{type(error).__name__}: {error}") from error


def has_own_code(value: object) -> bool:
    """Tell whether a part of a config, or one inside of it, is a stand-in for the vendor's code."""
    return any(getattr(each, "is_own_code", False) for each in _walk(value))


def _walk(value: object) -> Iterator[object]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _walk(item)
    elif isinstance(value, partial):
        yield from _walk((value.func, *value.args, *value.keywords.values()))
    else:
        yield value


@cache
def _known() -> Mapping[str, Any]:
    """Return the classes and functions that a config may name, by name."""
    known: dict[str, Any] = {leaf_name(MatchAllNode): MatchAllNode}
    known |= {leaf_name(value): value for home in _HOMES for value in vars(home).values() if _is_op(value)}
    for name in CALLED:
        with contextlib.suppress(ImportError, AttributeError):  # not each release of torch has it
            known[name] = resolve_name(name)
    return known


def _is_op(value: object) -> bool:
    return issubclass(value, nn.Module) if isinstance(value, type) else callable(value)


def _is_called(call: partial[Any]) -> bool:
    """Tell whether the judge makes a call: of a listed function, with data and module classes."""
    arguments = _walk((*call.args, *call.keywords.values()))
    is_listed = any(_known().get(name) is call.func for name in CALLED)
    return is_listed and all(isinstance(each, type) or not callable(each) for each in arguments)


def _encode(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if is_dtype(value):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, ObservationType):
        return {"observation": value.name}
    if isinstance(value, (tuple, list)):
        return {type(value).__name__ if type(value) in (tuple, list) else "tuple": [_encode(item) for item in value]}
    if isinstance(value, dict):
        pairs = value.items()
        return {"dict": [[_encode(key), (_encode_call if key in _CALLS else _encode)(item)] for key, item in pairs]}
    if isinstance(value, DTypeWithConstraints):
        return {"bounds": _encode({field.name: getattr(value, field.name) for field in fields(value)})}
    kind, name = _name(value)
    is_known = is_match_all(value) or (kind != "object" and _known().get(name) is value)
    return {"name" if is_known else "own": [kind, name]}


def _name(value: Any) -> tuple[str, str]:
    """Return the kind and the name of a class or function; any other object has the name of its type."""
    kind = "class" if isinstance(value, type) else "function" if hasattr(value, "__qualname__") else "object"
    named: Any = type(value) if kind == "object" else value
    return kind, leaf_name(named)


def _encode_call(value: Any) -> Any:
    """Spell a fuser method or getter, with its arguments."""
    call = value if isinstance(value, partial) else partial(value)
    function = _encode(call.func) if _is_called(call) else {"own": _name(call.func)}
    return {"call": [function, _encode(list(call.args)), _encode(call.keywords)]}


def _decode(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    ((kind, value),) = data.items()
    if kind in ("tuple", "list"):
        items = [_decode(item) for item in value]
        return tuple(items) if kind == "tuple" else items
    if kind == "dict":
        return {_decode(key): (_decode_call if key in _CALLS else _decode)(item) for key, item in value}
    if kind == "dtype":
        return find_dtype(value)
    if kind == "observation":
        return ObservationType[value]
    if kind == "bounds":
        return DTypeWithConstraints(**_decode(value))
    if kind == "name" and value[1] in _known():
        return _known()[value[1]]
    if kind in ("name", "own"):  # a vendor may have given torch a further op
        return _stand_in(*map(str, value))
    raise ValueError(f"unknown kind of data: {kind}")


def _decode_call(data: Any) -> Any:
    function, args, keywords = map(_decode, data["call"])
    call = partial(function, *args, **keywords)
    if not has_own_code(function) and not _is_called(call):
        raise ValueError(f"no fuser method or getter that the judge calls: {call}")
    return call if args or keywords else function


@cache
def _stand_in(kind: str, name: str) -> Any:
    """Return what stands for a class or function of the vendor's, the same for the same name."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"{name} is the vendor's code, which this process has not imported")

    module, _, own_name = name.rpartition(".")
    names = {"__module__": module, "__qualname__": own_name, "is_own_code": True}
    if kind == "class":
        return type(own_name, (nn.Module,), {**names, "__init__": refuse})
    for key, value in names.items():
        setattr(refuse, key, value)
    refuse.__name__ = own_name
    return refuse
