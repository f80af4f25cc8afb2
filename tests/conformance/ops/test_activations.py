"""The samples of activation functions and normalisations: complete, buildable, and directed at what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.backends.torch_engines.tables import FAMILIES
from fx_quant_conformance.conformance.ops.fused_modules import root_of
from fx_quant_conformance.conformance.ops.op_model import MODEL_OF
from fx_quant_conformance.refimpl.config.patterns import leaf_name, leaves, normal_form
from tests.conformance.support.functions import RECORDS

NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.BatchNorm2d, nn.BatchNorm3d)


def made(op: Any, arguments: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return MODEL_OF[1]([RECORDS[op].step(op, arguments)]).eval()


@pytest.mark.filterwarnings("ignore:Implicit dimension choice for softmax")
def test_what_is_in_place_changes_its_input() -> None:
    for op, samples in RECORDS.items():
        base = samples.base()
        for arguments in (base, {**base, "inplace": True}) if "inplace" in base else (base,):
            x = -torch.rand(samples.inputs(arguments)[0].shape) - 0.5
            before = x.clone()
            with torch.no_grad():
                made(op, arguments)(x)
            is_in_place = arguments.get("inplace", leaf_name(op).endswith("_"))
            assert torch.equal(x, before) != is_in_place, leaf_name(op)


def test_every_function_and_normalisation_of_the_native_configs_has_samples() -> None:
    families = ("default", "fixed qparams", "batch norm", "layer norm")
    rows = [row for family in families for row in FAMILIES[family]]
    named = {root_of(next(iter(leaves(normal_form(pattern))))) for row in rows for pattern in row.patterns}
    without_arithmetic, of_no_tensor = {nn.Dropout, F.dropout}, {"hardsigmoid", "hardsigmoid_"}
    assert len(named) > 25
    assert named - set(RECORDS) == without_arithmetic | of_no_tensor
    assert not any(hasattr(Tensor, method) for method in of_no_tensor)


# -- what is drawn ----------------------------------------------------------------------------------------------------


def module(op: Any, **changed: Any) -> Any:
    return made(op, {**RECORDS[op].base(), **changed}).get_submodule("op0")


@pytest.mark.parametrize("op", NORMS, ids=leaf_name)
def test_normalisations_have_parameters_and_statistics_that_cannot_be_left_out(op: Any) -> None:
    norm = module(op, affine=True, track_running_stats=True)
    assert {*(norm.weight > 0).tolist()} == {True, False}
    for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        assert len(set(tensor.tolist())) == 7
    assert bool((norm.running_var >= 0.5).all())
    assert module(op, affine=True, bias=False).bias is None


@pytest.mark.parametrize("op", NORMS, ids=leaf_name)
def test_what_is_rarely_quantized_stands_apart(op: Any) -> None:
    samples = RECORDS[op]
    usual = samples.base()
    rare = {"track_running_stats", "bias", "_unbatched"} | ({"affine"} if usual["affine"] else set())
    seen = set()
    for varied, arguments in samples.variants():
        away = rare & set(varied)
        seen |= away
        assert len(away) <= 1
        assert not away or arguments["shape"] == usual["shape"]
        assert arguments["bias"] or arguments["affine"]
    assert seen == rare & set(samples.arguments)


def test_slopes_of_channels_differ() -> None:
    slopes = module(nn.PReLU, num_parameters=7, init=-0.5, shape=(2, 7, 3, 3)).weight
    assert slopes[0].item() == -0.5
    assert len(set(slopes.tolist())) == 7


def test_functions_get_the_statistics_that_they_shall_use() -> None:
    """With its statistics F.instance_norm is an affine function: what is equal in two channels' inputs stays equal."""
    arguments = {**RECORDS[F.instance_norm].base(), "use_input_stats": False}
    model = made(F.instance_norm, arguments)
    x = torch.randn(2, 7, 3, 5)
    with torch.no_grad():
        zero, one, two = (model(x * factor) for factor in (0.0, 1.0, 2.0))
    torch.testing.assert_close(two - one, one - zero)
    assert len(set(zero[0, :, 0, 0].tolist())) == 7
