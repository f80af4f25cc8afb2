"""The default QConfigs and mappings beside torch's own: same observers, same numbers, same keys (QCM-01, QCM-02)."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx  # torch's defaults need it loaded before them

from fx_quant_conformance.refimpl.errors import QConfigError
from fx_quant_conformance.refimpl.observers import default_qconfigs
from tests.refimpl.support.both_flows import ENGINES, torch_fakes, torch_mappings, torch_qconfigs, torchs

pytestmark = [
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning"),  # torch's
    pytest.mark.filterwarnings("ignore:Default qconfig of oneDNN:UserWarning"),  # torch's
]

OURS: Any = default_qconfigs
QCONFIGS = sorted(
    name
    for name in vars(default_qconfigs)
    if name.endswith(("_qconfig", "_4bit", "_v2")) and (hasattr(getattr(default_qconfigs, name), "activation"))
)
PARTS = sorted(
    name
    for name in vars(default_qconfigs)
    if name.endswith(("_observer", "_fake_quant", "127", "_4bit")) and not hasattr(getattr(OURS, name), "activation")
)
PROPERTIES = (
    "dtype",
    "qscheme",
    "quant_min",
    "quant_max",
    "reduce_range",
    "ch_axis",
    "is_dynamic",
    "averaging_constant",
    "bins",
    "has_customized_qrange",
)


def described(made: Any) -> dict[str, Any]:
    """Say what an observer or fake quantize is: class, settings, inner observer; and its qparams and output on data."""
    found = {"class": type(made).__name__} | {name: getattr(made, name, None) for name in PROPERTIES}
    inner = getattr(made, "activation_post_process", None)
    eps = getattr(made, "eps", None)
    x = torch.linspace(-3.0, 5.0, 24).reshape(4, 6).requires_grad_()
    measured = inner if inner is not None else made
    out = made(x)
    found |= {"out": out.tolist(), "eps": None if eps is None else float(eps), "state": list(made.state_dict())}
    if hasattr(measured, "min_val") or hasattr(measured, "scale"):
        found["qparams"] = [(part.dtype, part.tolist()) for part in made.calculate_qparams()]
    return found | {"inner": None if inner is None else described(inner)}


def assert_same(ours: Any, theirs: Any, what: str) -> None:
    """Both constructors make the same."""
    found, expected = described(ours()), described(theirs())
    for told in (found, expected):  # in no order that matters
        told["state"] = sorted(told["state"])
        if told["inner"] is not None:
            told["inner"]["state"] = sorted(told["inner"]["state"])
    assert found == expected, f"{what} differs from torch's"


def assert_same_qconfig(ours: Any, theirs: Any, what: str) -> None:
    for role in ("activation", "weight"):
        assert_same(getattr(ours, role), getattr(theirs, role), f"{what}.{role}")


@pytest.mark.rule("QCM-01")
@pytest.mark.parametrize("name", PARTS)
def test_named_observers_and_fake_quantizes_are_torchs(name: str) -> None:
    theirs = getattr(torchs, name, None) or getattr(torch_fakes, name)
    assert_same(getattr(default_qconfigs, name), theirs, name)


@pytest.mark.rule("QCM-01")
@pytest.mark.parametrize("name", QCONFIGS)
def test_named_qconfigs_are_torchs(name: str) -> None:
    assert_same_qconfig(getattr(default_qconfigs, name), getattr(torch_qconfigs, name), name)


@pytest.mark.rule("QCM-01")
def test_no_named_qconfig_of_torchs_is_missing_but_the_one_that_records() -> None:
    theirs = {name for name, value in vars(torch_qconfigs).items() if isinstance(value, torch_qconfigs.QConfig)}
    assert {name for name in theirs if not name.startswith("_")} - set(QCONFIGS) == {"default_debug_qconfig"}


@pytest.mark.rule("QCM-02", "DTY-05")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("function", "version"),
    [
        ("get_default_qconfig_mapping", 0),
        ("get_default_qat_qconfig_mapping", 0),
        ("get_default_qat_qconfig_mapping", 1),
    ],
)
def test_the_default_mapping_of_an_engine_is_torchs(engine: str, function: str, version: int) -> None:
    ours, theirs = (getattr(where, function)(engine, version) for where in (default_qconfigs, torch_mappings))
    assert_same_qconfig(ours.global_qconfig, theirs.global_qconfig, "global")
    assert ours.object_type_qconfigs.keys() == theirs.object_type_qconfigs.keys()
    for object_type, qconfig in theirs.object_type_qconfigs.items():
        assert_same_qconfig(ours.object_type_qconfigs[object_type], qconfig, str(object_type))
    assert not theirs.module_name_qconfigs and not ours.module_name_qconfigs
    assert not theirs.module_name_regex_qconfigs and not ours.module_name_regex_qconfigs


@pytest.mark.rule("QCM-01")
@pytest.mark.parametrize(
    "function",
    [
        "get_default_qconfig",
        "get_default_qat_qconfig",
        "get_default_qconfig_mapping",
        "get_default_qat_qconfig_mapping",
    ],
)
def test_the_engine_is_x86_and_torchs_version_unless_said_otherwise(function: str) -> None:
    where = torch_mappings if function.endswith("mapping") else torch_qconfigs
    ours, theirs = getattr(default_qconfigs, function)(), getattr(where, function)()
    if function.endswith("mapping"):
        ours, theirs = ours.global_qconfig, theirs.global_qconfig
    assert_same_qconfig(ours, theirs, function)
    assert ours.activation().quant_max == 127, "x86 takes 7 bits"


@pytest.mark.rule("QCM-01")
@pytest.mark.parametrize(
    ("function", "arguments", "why"),
    [
        ("get_default_qconfig_mapping", ("tpu",), r"backend 'tpu'; expected one of \['fbgemm', 'x86', 'qnnpack'"),
        ("get_default_qat_qconfig", ("x86", 7), r"version 7; expected one of \[0, 1\]"),
        ("get_default_qconfig", ("x86", 1), r"version 1; expected one of \[0\]"),
    ],
)
def test_an_unknown_engine_or_version_is_refused(function: str, arguments: tuple[Any, ...], why: str) -> None:
    with pytest.raises(QConfigError, match=f"no default QConfig for {why}"):
        getattr(default_qconfigs, function)(*arguments)


@pytest.mark.rule("QCM-01")
def test_the_defaults_are_made_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for engine in ENGINES:
            for function in ("get_default_qconfig", "get_default_qat_qconfig"):
                qconfig = getattr(default_qconfigs, function)(engine)
                assert qconfig.activation().dtype == torch.quint8
                assert qconfig.weight().dtype == torch.qint8
