"""Arbitrary objects for the front doors, and what stands in their place when it is right."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.ao.quantization as torch_quantization
import torch.nn.functional as F
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    QConfig,
    QConfigMapping,
    QuantType,
)
from fx_quant_conformance.refimpl.config.custom_config import StandaloneModuleConfigEntry
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.both_core import Net, X

fuzz = settings(
    derandomize=True, database=None, deadline=None, max_examples=60, suppress_health_check=list(HealthCheck)
)


def net() -> nn.Module:
    return Net(lambda net, x: net.b(net.relu(net.a(x)))).eval()


def fails(*_: Any) -> Any:
    raise RuntimeError("no memory")


def _make(convert: Callable[[Any], Any] | None) -> Any:
    """A model that passes have made."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it was not calibrated
        prepared = refimpl.prepare_fx(net(), flows.global_mapping(), (X,))
        return prepared if convert is None else convert(prepared)


# Makers, for some of what they make can be changed.
LEAVES: tuple[Callable[[], Any], ...] = (
    *(
        (lambda value=value: value)
        for value in (
            None,
            True,
            0,
            -1,
            3,
            10**30,
            1.5,
            math.nan,
            "",
            "a",
            "relu",
            "(",
            "weight",
            "global",
            "static",
            b"a",
            1j,
            range(2),
            int,
            str,
            dict,
            list,
            reversed,
            object,
            len,
            print,
            fails,
            operator.add,
            torch.relu,
            F.relu,
            torch.add,
            F,
            ...,
            nn.Module,
            nn.Linear,
            nn.ReLU,
            nn.Conv2d,
            nn.LSTM,
            nn.Identity,
            torch.Tensor,
            type,
            torch.quint8,
            torch.qint8,
            torch.float16,
            torch.float32,
            torch.per_tensor_affine,
            torch.device("cpu"),
            flows.QCONFIG,
            flows.QCONFIG.activation,
            QConfig,
            BackendConfig,
            DTypeConfig,
            QConfigMapping,
            QuantType.STATIC,
            refimpl.MinMaxObserver,
            refimpl.PlaceholderObserver,
            refimpl.ObservationType(1),
            refimpl.MatchAllNode,
            refimpl.default_equalization_qconfig,
            torch_quantization.default_qconfig,
            torch_quantization.QuantType.DYNAMIC,
        )
    ),
    *(
        (lambda kind=kind: kind())
        for kind in (
            object,
            net,
            nn.ReLU,
            BackendConfig,
            BackendPatternConfig,
            DTypeConfig,
            QConfigMapping,
            refimpl.PrepareCustomConfig,
            refimpl.ConvertCustomConfig,
            refimpl.FuseCustomConfig,
            refimpl.MinMaxObserver,
            torch_quantization.QConfigMapping,
            torch_quantization.MinMaxObserver,
            dict,
            list,
            set,
        )
    ),
    lambda: nn.LSTM(2, 2),
    lambda: torch.tensor(1.0),
    lambda: torch.ones(2, 3),
    lambda: torch.zeros(0, dtype=torch.int64),
    lambda: X.clone(),
    lambda: torch.fx.symbolic_trace(net()),
    lambda: (value for value in (1, "a")),
    lambda: StandaloneModuleConfigEntry(None, (), None, None),
    lambda: BackendPatternConfig(nn.Linear).add_dtype_config(DTypeConfig(torch.quint8, torch.quint8, torch.qint8)),
    *((lambda parts=parts: QConfig(*parts)) for parts in ((fails, fails), (dict, print), (nn.ReLU, nn.LSTM))),
    *(
        (lambda convert=convert: _make(convert))
        for convert in (
            None,
            refimpl.convert_to_reference_fx,
            refimpl.convert_to_reference_decomposed_fx,
            refimpl.convert_fx,
        )
    ),
)

KEYS = (
    "",
    "name",
    "configs",
    "pattern",
    "dtype_configs",
    "observation_type",
    "fuser_method",
    "root_module",
    "input_type_to_index",
    "num_tensor_args_to_observation_type",
    "pattern_complex_format",
    "input_dtype",
    "is_dynamic",
    "object_type",
    "module_name_regex",
    "module_name",
    "module_name_object_type_order",
    "preserved_attributes",
    "standalone_module_name",
    "standalone_module_class",
    "float_to_observed_custom_module_class",
    "observed_to_quantized_custom_module_class",
    "non_traceable_module_name",
    "non_traceable_module_class",
    "input_quantized_idxs",
    "output_quantized_idxs",
    "static",
    "dynamic",
)

leaves = st.sampled_from(LEAVES).map(lambda make: make())


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.sampled_from(KEYS) | leaves.filter(_hashable)
    lists = st.lists(inner, max_size=5)
    return (
        lists
        | lists.map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.sets(leaves.filter(_hashable), max_size=2)
    )


odd = leaves | st.recursive(leaves, _nested, max_leaves=8)


def some_of(names: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Odd values for at least one of these names, and for few."""
    return st.dictionaries(st.sampled_from(sorted(names)), odd, min_size=1, max_size=2)
