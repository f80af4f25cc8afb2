"""Fingerprints name what integer kernels do, honest ones and ones with a known fault or a known other arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized.reference as nnqr
from torch import Tensor, nn

import tests.mutants.integer_faults  # noqa: F401  (enters them in the table)
from fx_quant_conformance.backends.base import Backend, Capabilities, Execution, Requantize, RoundingMode
from fx_quant_conformance.backends.reference import ReferenceBackend
from fx_quant_conformance.backends.torch_engines.tables import native_config
from fx_quant_conformance.conformance.facts.fingerprint import jobs as fingerprint
from fx_quant_conformance.conformance.facts.fingerprint.jobs import OPS, jobs, list_sites
from fx_quant_conformance.conformance.facts.kernel_models import (
    Term,
    keep_inside,
    name_rescale,
    name_rounding,
    predict_leaky,
)
from fx_quant_conformance.conformance.facts.probe_models import Unmeasured
from fx_quant_conformance.conformance.oracle.grids import Grid
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, DTypeConfig, DTypeWithConstraints
from fx_quant_conformance.refimpl.config.patterns import pattern_name
from fx_quant_conformance.reports.schema import Measurement
from tests.mutants import requantize_kinds as kinds
from tests.mutants.fault_table import FAULTS
from tests.mutants.integer_kernels import IntegerBackend, Kernels, Make, SilentIntegers, small_config, varied

pytestmark = pytest.mark.slow


def bench_of(backend: Backend) -> Bench:
    return Bench(backend, seed=0, profile="full")


def kernels_of(fault: str) -> Make:
    return next(each.kernels for each in FAULTS if each.name == fault)


def measure(name: str, kernels: Make, dtype: torch.dtype = torch.quint8, scheme: str = "") -> dict[str, str]:
    """Return all properties of one op on kernels."""
    for site in list_sites(OPS[name], bench_of(IntegerBackend(kernels))):
        if site.dtypes.input_dtype == dtype and scheme in ("", site.scheme):
            return fingerprint.fingerprint(OPS[name], site)
    raise AssertionError(f"{name} is not claimed for {dtype}")


def one(name: str, kernels: Make, wanted: str, dtype: torch.dtype = torch.quint8) -> str:
    """Return one property."""
    bench = bench_of(IntegerBackend(kernels))
    site = next(site for site in list_sites(OPS[name], bench) if site.dtypes.input_dtype == dtype)
    rounding = OPS[name].rounding(site)
    if wanted == "rounding":
        return rounding.text
    try:
        return str(dict(OPS[name].properties)[wanted](site, rounding.rule or torch.round))
    except Unmeasured as error:
        return f"not determined: {error}"


def test_honest_kernels() -> None:
    assert measure("linear", Kernels) == {
        "runs": "quantized",
        "rounding": "half_even",
        "rescale": "exact",
        "to declare": "nothing",
        "accumulator": "int32",
        "padding": "not determined: no padding enters a sum of this op",
        "bias": "float",
        "saturation": "0..255, the whole grid",
        "relu": "at the zero point",
    }
    found = measure("depthwise_conv2d", Kernels, torch.qint8, "per_channel_symmetric")
    assert found["accumulator"] == "holds 7 largest products: 18 bits or more"
    assert (found["saturation"], found["rounding"]) == ("-128..127, the whole grid", "half_even")
    assert {one(name, Kernels, "padding") for name in ("conv2d", "avg_pool2d")} == {"the zero point"}


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "half_away": lambda v: v.sign() * (v.abs() + 0.5).floor(),
    "half_up": lambda v: (v + 0.5).floor(),
    "half_down": lambda v: (v - 0.5).ceil(),
    "half_to_zero": lambda v: v.sign() * (v.abs() - 0.5).ceil(),
    "always down": torch.floor,
    "always up": torch.ceil,
    "always towards zero": torch.trunc,
    "mixed: of ": lambda v: torch.where(v > 20, (v + 0.5).floor(), v.round()),
}


@pytest.mark.rule("NUM-06")
@pytest.mark.parametrize("text", ROUNDINGS)
def test_a_rounding_has_a_name(text: str) -> None:
    exact = torch.arange(-200, 200).double() / 4
    assert name_rounding(exact, ROUNDINGS[text](exact), zero_point=3).text.startswith(text)


@pytest.mark.rule("NUM-06")
@pytest.mark.parametrize("name", ["linear", "conv2d", "depthwise_conv2d", "add", "mul", "avg_pool2d"])
@pytest.mark.parametrize("text", ["half_away", "always up"])
def test_rounding(name: str, text: str) -> None:
    assert one(name, varied("rounded", lambda honest, v: ROUNDINGS[text](v)), "rounding") == text


def to_bits(ratio: Tensor, bits: int) -> Tensor:
    shift = 2.0 ** (bits - ratio.frexp().exponent)
    return (ratio * shift).round() / shift


def float32_rescale(honest: Any, total: Tensor, ratio: Tensor) -> Tensor:
    return (total.float() * ratio.float()).double()


def rounded_twice(honest: Any, total: Tensor, ratio: Tensor) -> Tensor:
    mantissa, exponent = ratio.frexp()
    high = (total * (mantissa * 2.0**31).round() / 2.0**31 + 0.5).floor()
    return high * 2.0**exponent


@pytest.mark.parametrize(
    ("name", "rescale", "text"),
    [
        ("linear", float32_rescale, "float32: · (s_x·s_w/s_y)"),
        ("mul", float32_rescale, "float32: · (s_x·s_w/s_y)"),
        (
            "linear",
            lambda honest, total, ratio: total * to_bits(ratio, 8),
            "fixed point: factor of 8 bits, or of 21 fraction bits",
        ),
        ("linear", lambda honest, total, ratio: total * to_bits(ratio, 31), "fixed point: factor of 31 bits"),
        ("conv2d", rounded_twice, "fixed point: 31 bits, rounded twice"),
    ],
)
def test_rescale(name: str, rescale: Any, text: str) -> None:
    assert one(name, varied("rescale", rescale), "rescale") == text


def test_rescale_of_an_addition() -> None:
    """Both terms by factors of 20 bits over a common shift, as QNNPACK and XNNPACK add."""

    def add(honest: Any, x: Any, y: Any) -> Any:
        return replace(honest(x, y), total=torch.stack([x.centred() * x.scale, y.centred() * y.scale]))

    class Adding(Kernels):
        def add(self, x: Any, y: Any) -> Any:
            terms = torch.stack([x.centred(), y.centred()])
            return replace(super().add(x, y), total=terms, scale=torch.stack([x.scale, y.scale]))

        def rescale(self, total: Tensor, ratio: Tensor) -> Tensor:
            shift = 2.0 ** (20 - int(ratio.max().frexp().exponent))
            return (total * ((ratio * shift).round() / shift).reshape(2, 1, 1)).sum(0)

    text = one("add", Adding, "rescale")
    low, high = text.removeprefix("fixed point: factor of ").removesuffix(" bits").split(" to ")
    assert int(low) <= 20 <= int(high) <= 22


def held(change: Callable[[Tensor], Tensor]) -> Make:
    """Kernels that hold the bias, in steps of the accumulator, in another way."""
    return varied("with_bias", lambda honest, total, b: honest(total, change(b / total.scale) * total.scale))


@pytest.mark.parametrize(
    ("kernels", "text"),
    [
        (held(torch.round), "int32 at s_x·s_w, half_even"),
        (held(lambda b: b.sign() * (b.abs() + 0.5).floor()), "int32 at s_x·s_w, half_away"),
        (held(torch.trunc), "int32 at s_x·s_w, cut off"),
        (held(lambda b: b * 2), "none of the models"),
        (kernels_of("bias dropped"), "dropped"),
        (kernels_of("bias subtracted"), "subtracted"),
        (kernels_of("bias after the rescale"), "added after the rescale"),
        (kernels_of("bias as int8"), "int8 at a scale of its own"),
        (kernels_of("bias saturates as int16"), "int16 at s_x·s_w, saturating"),
    ],
)
def test_bias(kernels: Make, text: str) -> None:
    assert one("linear", kernels, "bias") == text


def float32_sums(honest: Any, x: Any, weight: Any) -> Tensor:
    """Adds products one by one in float32, in 16 sums side by side."""
    products = (x.centred()[:, None] * weight.centred()).float()
    filled = torch.nn.functional.pad(products, (0, -products.shape[-1] % 16))
    total = torch.zeros(*filled.shape[:-1], 16)
    for part in filled.reshape(*filled.shape[:-1], -1, 16).unbind(-2):
        total = total + part
    return total.sum(-1).double()


def wrapped_mean(honest: Any, pool: Any, x: Any) -> Tensor:
    """A sum held in 16 bits, before it is divided."""
    count = x.q.shape[-1] * x.q.shape[-2]
    total = honest(pool, x) * count
    return ((total + 2**15).remainder(2**16) - 2**15) / count  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "kernels", "text"),
    [
        ("linear", kernels_of("pairs saturate in int16"), "sums of two products saturate in int16"),
        ("linear", kernels_of("linear: 16-bit accumulator"), "int16, wraps around"),
        ("linear", varied("linear", lambda honest, x, w: honest(x, w).clamp(-(2**15), 2**15 - 1)), "int16, saturating"),
        ("linear", varied("linear", lambda honest, x, w: honest(x, w) / 3), "none of the models: sums of "),
        ("linear", varied("linear", float32_sums), "float32 or the like: sums that pass 2^24 come back wrong, by up "),
        ("avg_pool2d", varied("average", wrapped_mean), "means of 289 equal numbers [-127.0, 128.0] are found as "),
    ],
)
def test_accumulator(name: str, kernels: Make, text: str) -> None:
    assert one(name, kernels, "accumulator").startswith(text)


@pytest.mark.parametrize(
    ("name", "fault", "dtype", "text"),
    [
        ("conv2d", "conv pads with integer 0", torch.qint8, "integer 0"),
        ("depthwise_conv2d", "conv pads with the lowest integer", torch.qint8, "the lowest integer"),
        ("avg_pool2d", "count_include_pad flipped", torch.quint8, "nothing: not counted"),
    ],
)
def test_padding(name: str, fault: str, dtype: torch.dtype, text: str) -> None:
    assert one(name, kernels_of(fault), "padding", dtype) == text


@pytest.mark.parametrize(
    ("names", "fault", "wanted", "dtype", "text"),
    [
        ("linear add", "range ends one early", "saturation", torch.quint8, "0..254; the grid is 0..255"),
        ("conv2d add", "range starts one late", "saturation", torch.qint8, "-127..127; the grid is -128..127"),
        ("linear", "wraps instead of saturating", "saturation", torch.quint8, "no clamp at 0 and 255: "),
        ("linear add", "relu missing", "relu", torch.quint8, "not at all"),
        ("conv2d add", "relu clamps at integer 0 after a sum", "relu", torch.qint8, "at integer 0"),
        ("mul", "relu missing", "relu", torch.quint8, "not determined: the config claims no relu behind this op"),
        ("add mul", "rescale ratio off by 2^-8", "rescale", torch.quint8, "no model of one step fits: "),
        ("conv2d", "rescale in bfloat16", "rescale", torch.quint8, "fixed point: factor of 8 bits"),
        ("avg_pool2d", "avg_pool: divides by 8", "rounding", torch.quint8, "mixed: "),
        ("conv2d", "input zero point dropped", "rounding", torch.qint8, "mixed: "),
    ],
)
def test_faults(names: str, fault: str, wanted: str, dtype: torch.dtype, text: str) -> None:
    for name in names.split():
        assert one(name, kernels_of(fault), wanted, dtype).startswith(text)


def test_how_far_off_a_rescale_is() -> None:
    text = one("linear", kernels_of("rescale ratio off by 2^-8"), "rescale")
    assert text.startswith("no model of one step fits: ") and " 2^-8 of the result at most" in text


def test_quantize_cat_and_functions() -> None:
    bench = bench_of(ReferenceBackend())
    found = {name: fingerprint.fingerprint(OPS[name], list_sites(OPS[name], bench)[0]) for name in TORCHS}
    assert {name: found[name] | wanted for name, wanted in TORCHS.items()} == found


TORCHS = {
    "quantize": {"rescale": "float32: x, · (1/s_y)", "rounding": "half_even"},
    "cat": {"rescale": "float32: dequantized, · (1/s_y)", "rounding": "half_even"},
    "sigmoid": {"values": "correctly rounded for all 256 integers"},
}
"""What torch's own float32 ops between quantize and dequantize are known to do: quantize multiplies by 1/s."""


def test_float_and_refusal_are_told() -> None:
    assert measure("linear", kernels_of("in float, silently")) == {
        "not determined": "the output is not on its quantization grid: it was computed in float"
    }
    assert measure("cat", kernels_of("raises on one op")) == {
        "not determined": "running it raised RuntimeError: no kernel for this op"
    }


@pytest.mark.rule("NUM-07")
def test_a_kernel_that_does_not_repeat_has_no_fingerprint() -> None:
    assert measure("linear", kernels_of("second call differs")) == {
        "not determined": "two runs on the same input gave different results"
    }


@pytest.mark.rule("NUM-07")
def test_a_backend_that_returns_its_own_buffer_is_not_compared_with_itself() -> None:
    class Buffered(IntegerBackend):
        def lower(self, reference_model: Any, example_inputs: Any) -> Any:
            honest, kept = super().lower(reference_model, example_inputs), list[Tensor]()

            def run(*inputs: Tensor) -> Tensor:
                result = honest(*inputs)
                kept.append(result)
                return kept[0].copy_(result.roll(len(kept)))  # another result each time, in one buffer

            return run

    site = list_sites(OPS["linear"], bench_of(Buffered()))[0]
    told = fingerprint.fingerprint(OPS["linear"], site)
    assert told == {"not determined": "two runs on the same input gave different results"}


def test_what_runs_is_told() -> None:
    class Telling(IntegerBackend):
        def execution(self, lowered: Any) -> Execution:
            return Execution(quantized_ops=("linear",), float_fallbacks=("relu: no kernel",))

    site = list_sites(OPS["linear"], bench_of(Telling()))[0]
    assert fingerprint.fingerprint(OPS["linear"], site)["runs"] == "in float: relu: no kernel"
    silent = list_sites(OPS["linear"], bench_of(SilentIntegers()))[0]
    assert fingerprint.fingerprint(OPS["linear"], silent)["runs"] == "not told by the backend"


def test_jobs_and_measurements() -> None:
    backend = IntegerBackend()
    assert jobs(small_config(), backend.capabilities(), "quick") == ()
    made = jobs(small_config(), backend.capabilities(), "full")
    assert [job.id for job in made] == [
        f"fact/fingerprint/{name}"
        for name in (
            "linear",
            "conv2d",
            "depthwise_conv2d",
            "add",
            "mul",
            "quantize",
            "avg_pool2d",
            "adaptive_avg_pool2d",
            "cat",
        )
    ]
    found = list(made[3].run(bench_of(backend)))
    measurements = [each for each in found if isinstance(each, Measurement)]
    assert measurements == found
    assert [each.subject for each in measurements] == ["add, quint8", "add, qint8"]
    assert {each.topic for each in measurements} == {"fingerprint"}


def test_a_narrow_range_and_affine_weights() -> None:
    """Seven bits of activations, as of kernels that add pairs of products in 16 bits."""
    narrow = DTypeWithConstraints(torch.quint8, quant_min_lower_bound=0, quant_max_upper_bound=127)
    entry = BackendPatternConfig(nn.Linear).set_dtype_configs([DTypeConfig(narrow, narrow, torch.qint8, torch.float32)])
    entry.set_root_module(nn.Linear).set_reference_quantized_module(nnqr.Linear)

    class Narrow(IntegerBackend):
        def backend_config(self) -> BackendConfig:
            return BackendConfig("narrow").set_backend_pattern_config(entry)

        def capabilities(self) -> Capabilities:
            return Capabilities(weight_schemes=("per_channel_affine",))

    measurements = list(fingerprint.measure("linear", bench_of(Narrow(kernels_of("pairs saturate in int16")))))
    assert [each.subject for each in measurements] == ["linear, quint8, per_channel_affine"]
    found = measurements[0].values
    assert (found["rounding"], found["rescale"], found["bias"]) == ("half_even", "exact", "float")
    assert (found["saturation"], found["accumulator"]) == ("0..127, the whole grid", "int32")  # 2·127·127 fits 16 bits


def test_every_op_is_claimed_by_some_shipped_config() -> None:
    config = native_config("qnnpack")
    claimed = {job.id.rpartition("/")[2] for job in jobs(config, ReferenceBackend().capabilities(), "full")}
    assert claimed == set(OPS)


def test_a_dynamic_claim_is_not_probed() -> None:
    entries = [entry for entry in native_config("qnnpack").configs if pattern_name(entry.normal_pattern) == "nn.LSTM"]
    config = BackendConfig("dynamic").set_backend_pattern_configs(entries)
    assert jobs(config, ReferenceBackend().capabilities(), "full") == ()


LINEAR, MUL = "linear", "mul"
HALF_UP, TWICE = RoundingMode.HALF_UP, {"multiplier_bits": 31, "rounds_twice": True, "rounding": RoundingMode.HALF_AWAY}


@pytest.mark.rule("NUM-06")
@pytest.mark.parametrize(
    ("name", "kernels", "declared", "told"),
    [
        (LINEAR, Kernels, {}, "nothing"),
        (LINEAR, kinds.machine(kinds.once(15), kinds.up), {"multiplier_bits": 15, "rounding": HALF_UP}, ""),
        (
            LINEAR,
            kinds.machine(kinds.once(15), kinds.up),
            {"multiplier_bits": 31, "rounding": HALF_UP},
            "multiplier_bits=31",
        ),
        (LINEAR, kinds.machine(kinds.once(15), kinds.up), {}, "multiplier_bits=None"),
        (LINEAR, kinds.machine(kinds.twice(kinds.shift_half_away), kinds.away), TWICE, ""),
        (LINEAR, kinds.machine(kinds.twice(kinds.shift_half_away), kinds.away), {}, "rounds_twice=False"),
        (MUL, kinds.fractional(12), {"fraction_bits": 12, "rounding": HALF_UP}, ""),
        (MUL, kinds.fractional(12), {"fraction_bits": 20, "rounding": HALF_UP}, "fraction_bits=20"),
        (LINEAR, kinds.rounded(torch.floor), {"rounding": RoundingMode.DOWN}, ""),
        (LINEAR, kinds.rounded(torch.floor), {}, "rounding to the nearest"),
        (LINEAR, kinds.rounded(torch.floor), {"rounding": HALF_UP}, "the rounding 'half up'"),
    ],
)
def test_it_proposes_the_declaration_that_is_right_and_names_one_that_is_not(
    name: str, kernels: Make, declared: dict[str, Any], told: str
) -> None:
    """The right declaration of each machine is the one that is given here, where nothing is told against it."""
    backend = IntegerBackend(kernels, requantize=Requantize(**declared))
    site = next(site for site in list_sites(OPS[name], bench_of(backend)) if site.dtypes.input_dtype == torch.quint8)
    found = fingerprint.fingerprint(OPS[name], site)["to declare"]
    line, _, against = found.partition("; declared is ")
    if told == "nothing":
        assert found == told
    else:
        assert told in against and bool(against) is bool(told)
    if declared and not told:
        scope = {"Requantize": Requantize, "RoundingMode": RoundingMode}
        [proposed] = eval(f"dict({line})", scope)["requantize_of"].values()
        assert proposed == Requantize(**declared)


def test_a_leaky_relu_of_fraction_bits_is_told_from_one_of_mantissas() -> None:
    grid = Grid(scale=0.7 * 2.0**-5, zero_point=3, low=-128, high=127, dtype="qint8")
    output = Grid(scale=2.0**-5, zero_point=3, low=-128, high=127, dtype="qint8")
    term = Term(torch.arange(-131, 125).double(), grid)

    def up(value: Tensor) -> Tensor:
        return (value + 0.5).floor()

    def found(hold: Callable[[float], float]) -> str:
        runs = []
        for slope in (0.01, 0.3):
            factors = torch.where(term.centred < 0, hold(slope * 0.7), hold(0.7))
            runs.append(keep_inside(predict_leaky(term, output, slope), up(term.centred * factors)))
        return str(name_rescale(runs, up))

    assert found(lambda factor: round(factor * 256) / 256) == "fixed point: factor of 8 fraction bits"
    assert found(lambda factor: to_bits(torch.tensor(factor), 7).item()).startswith(
        "fixed point: factor of 6 to 7 bits"
    )
    assert found(float).startswith("exact")
