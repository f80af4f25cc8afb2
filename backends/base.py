"""The contract with a backend vendor: what to implement for a certificate (README.md, "Your backend in ten lines").

A minimal backend::

    from fx_quant_conformance import Backend, Representation

    class MyBackend(Backend):
        name = "my_backend"
        representation = Representation.DECOMPOSED

        def backend_config(self):
            return my_backend_config()          # what the hardware quantizes

        def lower(self, reference_model, example_inputs):
            return my_compiler.compile(reference_model, example_inputs)

Then ``pytest --pyargs fx_quant_conformance --backend=my_package.my_module:MyBackend``. Everything else has defaults.
``fx_quant_conformance.register`` makes a vendor's own modules and functions buildable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from fx_quant_conformance.refimpl import BackendConfig

Flow = Literal["ptq", "qat"]
"""Post-training quantization, or quantization-aware training."""
WEIGHT_SCHEMES = ("per_tensor_symmetric", "per_channel_symmetric", "per_tensor_affine", "per_channel_affine")
"""Names of the ways to quantize a weight, for ``Capabilities.weight_schemes``."""

Taken: TypeAlias = tuple[Any, ...] | Callable[[Any], bool]
"""Values of an argument that a backend supports: these, or those for which the callable returns True."""


class Representation(Enum):
    """The form in which a backend takes a quantized model."""

    DECOMPOSED = "decomposed"
    """Plain integer tensors: ``torch.ops.quantized_decomposed.quantize_per_tensor`` makes a ``torch.uint8``
    tensor; scale, zero point and bounds are arguments of each op. What most compilers prefer."""

    EXPORTED = "exported"
    """A `torch.export.ExportedProgram` in PT2E's form: aten ops, the decomposed form's quantize and dequantize, weights
    as integers that are dequantized, axis 0 dynamic where ``Capabilities.dynamic_batch`` says so. It is made from the
    decomposed form by ``refimpl.export_reference`` right before ``lower`` is called."""

    QUANTIZED = "quantized"
    """The form of torch's own engines, as long as torch has them: a quantized tensor of dtype ``quint8`` carries scale
    and zero point inside of it."""


class RoundingMode(Enum):
    """To which integer a rescaled result is rounded, before the zero point is added. (NUM-03, NUM-06)"""

    NEAREST = "nearest"
    """The nearest integer; halfway between two, either one."""
    HALF_EVEN = "half even"
    """The nearest integer; halfway, the even one."""
    HALF_AWAY = "half away"
    """The nearest integer; halfway, the one away from zero."""
    HALF_UP = "half up"
    """The nearest integer; halfway, the higher one."""
    DOWN = "down"
    """The next lower integer (floor), as an arithmetic shift gives it: up to a whole step off."""
    TOWARDS_ZERO = "towards zero"
    """The integer without the fraction (truncation): up to a whole step off."""

    @property
    def is_directed(self) -> bool:
        """Whether a result is rounded to one side, however near the other one is."""
        return self in (RoundingMode.DOWN, RoundingMode.TOWARDS_ZERO)


def _is_number(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value < float("inf")  # type: ignore[operator]


def _are_some_of(known: Sequence[str], value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(each, str) and each in known for each in value)


def _are_by_text(kind: type, value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(each, kind) for name, each in value.items()
    )


def _is_nested(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(each, Mapping) for each in value.values())


_FITS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "int": (lambda value: _is_number(value, int), "a whole number, 0 or more"),
    "float": (lambda value: _is_number(value, int, float), "a number, 0 or more"),
    "tuple[str, ...]": (
        partial(_are_some_of, WEIGHT_SCHEMES),
        f"a tuple of one or more of {', '.join(WEIGHT_SCHEMES)}",
    ),
    "tuple[Flow, ...]": (
        partial(_are_some_of, get_args(Flow)),
        f"a tuple of one or more of {', '.join(get_args(Flow))}",
    ),
    "Requantize": (lambda value: isinstance(value, Requantize), "a fx_quant_conformance.Requantize"),
    "Mapping[str, Requantize]": (
        lambda value: _are_by_text(Requantize, value),
        "a dict of globs of ops with a fx_quant_conformance.Requantize each",
    ),
    "Mapping[str, str]": (partial(_are_by_text, str), "a dict of globs of ops with a condition each (docs/limits.md)"),
    "Mapping[str, Tolerance]": (
        lambda value: _are_by_text(Tolerance, value),
        "a dict of globs of ops with a fx_quant_conformance.Tolerance each",
    ),
    "Mapping[str, Mapping[str, Taken]]": (_is_nested, "a dict of ops with dicts of arguments (docs/limits.md)"),
}
"""By the annotation of a field: whether a value fits, and what to give."""


def _check_fields(declared: Capabilities | Requantize | Tolerance) -> None:
    """Raise ValueError, in one line, for the first field whose value does not fit its annotation."""
    for item in fields(declared):
        fits, wanted = _FITS.get(str(item.type), (lambda value: True, ""))
        value = getattr(declared, item.name)
        if not fits(value):
            raise ValueError(f"{type(declared).__name__}.{item.name}: found {_show(value)}; give {wanted}")


def _show(value: object) -> str:
    return " ".join(repr(value).split())[:_LONGEST_FOUND]


_LONGEST_FOUND = 200
LEAST_BITS, MOST_BITS = 8, 62
"""Bits that a multiplier may have: with fewer, results of 8 bits would be more than a step off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requantize:
    """How integer sums become integers of the output's grid; the default suits kernels that rescale in float32.

    What is declared is right within the bound that follows from it (NUM-04), and nothing else is. TFLite and gemmlowp:
    ``Requantize(multiplier_bits=31, rounds_twice=True, rounding=RoundingMode.HALF_AWAY)``.

    Raises ValueError for a number of bits that is none from 8 to 62, ``fraction_bits`` beside ``multiplier_bits``, what
    belongs to a multiplier without one, or a rounding that is no RoundingMode.
    """

    multiplier_bits: int | None = None
    """Bits of a fixed-point multiplier: the factor s_x·s_w / s_y is held as a mantissa of so many bits, rounded to
    nearest, and a power of two. None: the factor is a float32, or has ``fraction_bits``."""

    fraction_bits: int | None = None
    """Bits behind the point of a fixed-point factor: it is rounded to the nearest multiple of 2⁻ⁿ, however small it is.
    XNNPACK's leaky relu has 8. It counts where a single factor takes the accumulator to the output: not for sums of two
    tensors, and not where the accumulator's step is not known, as of average pooling."""

    rounds_twice: bool = False
    """Whether the product with the multiplier is rounded to an integer before it is shifted right, which rounds again;
    ``rounding`` is that of the shift."""

    spare_bits: int = 0
    """By how many bits a multiplier that is rounded twice may be smaller than a mantissa of at least 1/2: the shift is
    as much shorter, and the first rounding counts 2ⁿ times. TFLite's mean has 1, as it divides the multiplier by the
    number of elements."""

    rounding: RoundingMode = RoundingMode.NEAREST
    """The last rounding. One that is named is judged at exact ties too; NEAREST leaves them open."""

    def __post_init__(self) -> None:
        _check_fields(self)
        for name in ("multiplier_bits", "fraction_bits"):
            bits = getattr(self, name)
            is_number = isinstance(bits, int) and not isinstance(bits, bool) and LEAST_BITS <= bits <= MOST_BITS
            if bits is not None and not is_number:
                raise ValueError(
                    f"Requantize.{name}: found {bits!r}; give a number from {LEAST_BITS} to {MOST_BITS}, or None "
                    "if the factor is a float32"
                )
        if self.multiplier_bits is not None and self.fraction_bits is not None:
            raise ValueError(
                "Requantize.fraction_bits: found beside multiplier_bits; a factor has a mantissa of so many bits, or a "
                "fraction of so many: give one"
            )
        if self.rounds_twice and self.multiplier_bits is None:
            raise ValueError("Requantize.rounds_twice: found True without multiplier_bits; give these too (TFLite: 31)")
        if self.spare_bits and not self.rounds_twice:
            raise ValueError(f"Requantize.spare_bits: found {self.spare_bits} without rounds_twice; give both, or none")
        if not isinstance(self.rounding, RoundingMode):
            modes = ", ".join(f"RoundingMode.{mode.name}" for mode in RoundingMode)
            raise ValueError(f"Requantize.rounding: found {self.rounding!r}; give one of {modes}")

    def __str__(self) -> str:
        factor = "float32" if self.multiplier_bits is None else f"multiplier of {self.multiplier_bits} bits"
        factor = factor if self.fraction_bits is None else f"factor of {self.fraction_bits} fraction bits"
        spare = f"{self.spare_bits} spare, " if self.spare_bits else ""
        return f"{factor}, {spare}{'rounded twice, ' * self.rounds_twice}{self.rounding.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far an integer of an op may be from the exact result, where `Requantize` has no words for what is done.

    A claim that needs it is TOLERATED, not VERIFIED. Raises ValueError for a number that is not above 0.5 (what is
    nearest is right without it) and at most 1.
    """

    lsb: float = 1.0
    """In steps of the output, beside the slack (NUM-04)."""

    def __post_init__(self) -> None:
        _check_fields(self)
        if not 0.5 < self.lsb <= 1:
            raise ValueError(f"Tolerance.lsb: found {self.lsb!r}; give a number above 0.5 and at most 1: one step")

    def __str__(self) -> str:
        return f"{self.lsb:g} LSB"


REMOVED_CAPABILITIES = {
    "packs": "each case is lowered alone: leave it out",
    "specializes": "each case is lowered alone: leave it out",
}
"""Fields of `Capabilities` in earlier versions, and what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a BackendConfig cannot say about a backend; the defaults suit a plain int8 backend.

    Raises ValueError for a value that does not fit its field, as for a weight scheme that is not one of WEIGHT_SCHEMES,
    or for none.
    """

    weight_schemes: tuple[str, ...] = ("per_tensor_symmetric",)
    """Supported weight schemes; each is certified separately."""

    flows: tuple[Flow, ...] = ("ptq", "qat")
    """The flows in which the config's entries are claimed: without "qat", of none for a backend, or a Quantizer, that
    takes no models quantized in training."""

    int32_bias: bool = False
    """Whether the bias is held as int32 of scale ``s_x * s_w``, which rounds it once more. (NUM-04)"""

    lowers_bias: bool = False
    """Whether ``lower`` makes the int32 bias of a float one, so that a torchao Quantizer leaves it float."""

    float_accumulation: bool = False
    """Whether products are summed in floating point: a sum then carries rounding errors (NUM-04), and a result may
    differ with its place in memory as long as it is within the bound (NUM-07)."""

    requantize: Requantize = Requantize()
    """How results are rescaled and rounded to the output's grid. (NUM-03, NUM-04)"""

    requantize_of: Mapping[str, Requantize] = field(default_factory=dict)
    """Glob of names of ops, as patterns have them (``"nn.Conv*"``) → how their results are rescaled and rounded, in
    place of ``requantize``; the first that fits counts. What only moves or clamps values is rounded as what made
    them."""

    tolerance: Mapping[str, Tolerance] = field(default_factory=dict)
    """Glob of names of ops → how far from the exact result their integers may be, such as ``{"nn.Softmax":
    Tolerance(lsb=1)}``; the first that fits counts. It holds for what is computed from their float values too, up to
    the next quantize, and for no op that only moves values (NUM-05)."""

    dynamic_states: bool = False
    """Whether hidden states of recurrent ops are quantized as their input is."""

    dynamic_scale_floor: float = 0.0
    """Smallest scale of a dynamic input."""

    half_row_qparams: bool = False
    """Whether rows of a 4-bit embedding keep scale and bias in half precision."""

    channels_last: bool = True
    """Whether inputs in channels-last layout are supported."""

    dynamic_batch: bool = True
    """Whether batches of another size than that of the example inputs are supported."""

    fold_weights: bool = True
    """Whether an exported program holds weights as integers, or as floats that it quantizes, as some converters want
    them."""

    tie_steps: int = 0
    """Number of steps by which a result may differ with its place in memory (layout, batch, thread): 1 if the body and
    the tail of a vector loop round exact ties differently, or sum floats in another order. If it is not 0, two
    different results may both be right. (NUM-06, NUM-07)"""

    limits: Mapping[str, Mapping[str, Taken]] = field(default_factory=dict)
    """Op (as patterns name it: ``"nn.Conv2d"``) → argument → the supported values. Other values, for example left in
    float, cannot be said in a BackendConfig and are not tested. docs/limits.md lists all ops and arguments; another one
    is an error."""

    where: Mapping[str, str] = field(default_factory=dict)
    """Glob of names of ops → what holds of each case that is supported, as an expression on arguments, shapes and
    scales: ``{"nn.Conv2d": "groups in (1, in_channels)", "*": "s_in / s_out < 128"}``. All that fit an op count. A case
    of which one does not hold is not tried. docs/limits.md has the language."""

    def __post_init__(self) -> None:
        _check_fields(self)

    def requantize_for(self, op: str) -> Requantize:
        """Return how the results of an op are rescaled and rounded, by its name."""
        return next((each for glob, each in self.requantize_of.items() if fnmatchcase(op, glob)), self.requantize)

    def conditions_for(self, op: str) -> list[str]:
        """List the conditions on the cases of an op, by its name."""
        return [text for glob, text in self.where.items() if fnmatchcase(op, glob)]

    def tolerance_for(self, op: str) -> float:
        """Return how many steps the integers of an op may be from the exact result, by its name; 0: none is granted."""
        return next((float(each.lsb) for glob, each in self.tolerance.items() if fnmatchcase(op, glob)), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What a lowered model runs. With float fallbacks, or without a quantized op, it is judged FALLBACK. (LOW-04)

    An op is named by a text that begins with the name of a node of the reference model, or with the path of the module
    that it calls: ``"op0"``, ``"op0 (my_kernel)"``, ``"op0 (my_kernel): too many groups"``. A report of quantized ops
    that the numbers contradict refutes the claim.

    Raises ValueError for a field that is no tuple or list of texts.
    """

    quantized_ops: tuple[str, ...]
    """The ops that execute on integers. A text that names none of the ops which prepare decided to quantize does not
    count. If none counts and no fallback is named, the backend has not said what runs."""

    float_fallbacks: tuple[str, ...]
    """The ops that execute in float although the claims say that they are quantized. Of those that are named as above,
    reports show the op, and a reason where none is given; others count as well."""

    kernels: tuple[str, ...] = ()
    """Names of the kernels that run, if they are known; a report shows them where a claim is FALLBACK."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, (tuple, list)) or not all(isinstance(each, str) for each in value):
                raise ValueError(f"Execution.{item.name}: found {_show(value)}; give a tuple of texts")


class Lowered(ABC):
    """A lowered model. ``Backend.lower`` returns one, or any callable, which is wrapped (`backends.lowering`)."""

    @abstractmethod
    def __call__(self, *inputs: Any) -> Any:
        """Run it once; return the structure of tensors that the model would return. They belong to the caller."""

    def run_all(self, batches: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        """Run it on several inputs, one after the other; yield the outputs."""
        return (self(*inputs) for inputs in batches)

    def execution(self) -> Execution | None:
        """Report what it runs; None: that is not known."""
        return None

    def graph(self) -> str:
        """Return its graph as text, which reports show; "": it has none."""
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizerRequest:
    """For which claims ``Backend.quantizer`` is asked, so that it configures its Quantizer as a user would for them."""

    is_qat: bool = False
    """Whether it is for ``prepare_qat_pt2e``."""
    is_dynamic: bool = False
    """Whether activations are quantized while running."""
    weight_scheme: str = ""
    """One of WEIGHT_SCHEMES; "" where no weight is quantized."""


class UnsupportedPattern(Exception):
    """Raised by ``Backend.lower`` to decline a model; the message says why.

    Declining what the backend's own config claims refutes the claim: the config says more than is done.
    """


class Backend(ABC):
    """One backend under test. Subclass it, set ``name`` and ``representation``, implement the abstract methods.

    The class is instantiated without arguments, in processes of its own, even where the backend cannot run: the
    constructor must not open the hardware. The process that judges imports none of the vendor's code.
    """

    name: str
    """Name for reports, such as ``"my_npu"``."""

    representation: Representation
    """Form in which ``lower`` gets the model."""

    engine: str = ""
    """The ``torch.backends.quantized.engine`` to run under; empty if the backend does not use torch's engines."""

    waivers: Path | None = None
    """TOML file of known deviations that the vendor accepts, with the tables of ``conformance/run/waivers.py``;
    used unless the command line says otherwise."""

    @abstractmethod
    def backend_config(self) -> BackendConfig:
        """Return the claims: which patterns of ops are quantized, with which dtypes.

        A ``refimpl.BackendConfig``, torch's own class, or its dict form.
        """

    @abstractmethod
    def lower(self, reference_model: Any, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """Compile a reference quantized model into something to call with inputs like ``example_inputs``.

        The reference model is a ``torch.fx.GraphModule`` in the form of ``representation``, or, in the form EXPORTED,
        a ``torch.export.ExportedProgram``. Every quantized op is written as dequantize → float op → quantize, and a
        backend replaces such groups by its integer kernels. The result is called as the model would be, and returns the
        same structure of tensors, which belong to the caller: no later call writes to them (NUM-07). Do not change a
        GraphModule; a program is made for this call, and may be changed. A `Lowered` says itself what it runs and what
        its graph is; of any other callable `execution` says it, and reports show the graph of one that is a GraphModule
        or has one as ``graph_module``.

        Raises UnsupportedPattern to decline; any other exception counts as a failure of the backend.
        """

    def unavailable_reason(self) -> str | None:
        """Say why the backend cannot run on this machine ("no NPU found"); None: it can."""
        return None

    def warm_up(self) -> None:
        """Import and build once what takes long, so that the processes in which claims run have it from the start.

        These are forked from the process in which this is called: do nothing here that opens the hardware.
        """
        return

    def execution(self, lowered: Callable[..., Any]) -> Execution | None:
        """Report what ``lowered`` runs, if it is no `Lowered`, which says so itself; None: the backend does not know.

        Then only numbers can show that integers ran, in long sums of products; other claims are UNSHOWN. (LOW-04)
        """
        return lowered.execution() if isinstance(lowered, Lowered) else None

    def capabilities(self) -> Capabilities:
        """Return what the BackendConfig cannot say."""
        return Capabilities()

    def qconfigs(self) -> Sequence[Any] | None:
        """Return the QConfigs, with observers of your own, that models are to be prepared with; None: the suite's.

        Give them where the hardware asks for scales that min/max observers do not give, such as powers of two. Each
        claim and each op of a model takes the first one that its dtype config takes (DTY-02) and whose weight has the
        claim's scheme; a claim that none fits is UNEXERCISED. Constructors as in refimpl's or torch's QConfig: classes,
        or what their ``with_args`` returns, at the top level of a module. In training they become the observers of
        fake quantizes, unless they make these themselves. Fixed qparams (DTY-05) are made from the dtype config.
        """
        return None

    def quantizer(self, request: QuantizerRequest) -> Any:
        """Return your own torchao Quantizer, a new one, configured for such claims; None: there is none for them.

        With one, the stage ``annotate`` holds it to the BackendConfig: what is claimed is annotated with the claimed
        dtype, scheme and sharing, and nothing else is. torchao is the extra ``pt2e``. (docs/pt2e.md)
        """
        return None

    def prepare_custom_config(self) -> Any:
        """Return a PrepareCustomConfig, refimpl's or torch's, with the classes of custom modules; None: there are none.

        A custom module is claimed as any module is, by an entry of the config for its float class, and built by
        ``fx_quant_conformance.register``. Its dtype config says what is observed around it. (CUS-01)
        """
        return None

    def convert_custom_config(self) -> Any:
        """Return the ConvertCustomConfig that belongs to ``prepare_custom_config``; None: there are none.

        A static quantized class has ``scale``, ``zero_point`` and ``dtype`` of its output, and ``float_function``: what
        it computes before it rounds its output, from and to tensors of float32 or float64; a weight is held as by a
        reference module. (CUS-01, CVT-02, NUM-03)
        """
        return None

    def versions(self) -> dict[str, str]:
        """Return the versions that a result depends on: ``{"my_compiler": "1.2", "driver": "535"}``."""
        return {}
