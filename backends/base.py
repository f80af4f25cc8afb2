"""The contract with a backend vendor: what to implement for a certificate (README.md, "Certify your own backend").

The whole of a minimal backend::

    from backends.base import Backend, Representation

    class MyBackend(Backend):
        name = "my_backend"
        representation = Representation.DECOMPOSED

        def backend_config(self):
            return my_backend_config()          # what the hardware quantizes

        def lower(self, reference_model, example_inputs):
            return my_compiler.compile(reference_model, example_inputs)

Then ``pytest conformance --backend=my_package.my_module:MyBackend``. All else has defaults. Modules and functions of a
vendor's own are made buildable by ``conformance.vendor.register``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

from torch.fx import GraphModule

from refimpl import BackendConfig

WEIGHT_SCHEMES = ("per_tensor_symmetric", "per_channel_symmetric", "per_tensor_affine", "per_channel_affine")
"""How a weight may be quantized, as ``Capabilities.weight_schemes`` names it."""


Taken: TypeAlias = tuple[Any, ...] | Callable[[Any], bool]
"""The values of an argument that a backend takes: these, or those of which the callable says so."""


class Representation(Enum):
    """The form in which a backend takes a quantized model."""

    QUANTIZED = "quantized"
    """Quantized tensors: ``torch.quantize_per_tensor`` makes a tensor of dtype ``torch.quint8``, and scale and
    zero point travel inside the tensor."""

    DECOMPOSED = "decomposed"
    """Plain integer tensors: ``torch.ops.quantized_decomposed.quantize_per_tensor`` makes a ``torch.uint8``
    tensor; scale, zero point and bounds are arguments of each op. What most compilers prefer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a BackendConfig cannot say of a backend; the defaults suit a plain int8 backend.

    Raises ValueError for a weight scheme that is not one of WEIGHT_SCHEMES, or for none at all.
    """

    weight_schemes: tuple[str, ...] = ("per_tensor_symmetric",)
    """How a weight may be quantized; each is certified by itself."""

    int32_bias: bool = False
    """The bias is held as int32 of scale ``s_x * s_w``, so it is rounded once more. (NUM-04)"""

    float_accumulation: bool = False
    """Products are summed in floating point, so a sum carries rounding errors (NUM-04), and a result may differ with
    its place in memory where both are within the bound (NUM-07)."""

    dynamic_states: bool = False
    """Hidden states of recurrent ops are quantized as their input is."""

    dynamic_scale_floor: float = 0.0
    """The smallest scale that a dynamic input gets."""

    half_row_qparams: bool = False
    """Rows of a 4-bit embedding keep scale and bias in half precision."""

    channels_last: bool = True
    """Inputs in channels-last layout are taken."""

    dynamic_batch: bool = True
    """Batches of another size than that of the example inputs are taken."""

    tie_steps: int = 0
    """By how many steps a result may differ with its place in memory (layout, batch, thread): 1 where the body and the
    tail of a vector loop round exact ties differently, or sum floats in another order. Where it is not 0, results may
    differ that are both right. (NUM-06, NUM-07)"""

    limits: Mapping[str, Mapping[str, Taken]] = field(default_factory=dict)
    """Op (as patterns name it: ``"nn.Conv2d"``) → argument → the values that are taken; others are left in float, say,
    as no BackendConfig can tell. What is outside is not tried."""

    def __post_init__(self) -> None:
        unknown = [scheme for scheme in self.weight_schemes if scheme not in WEIGHT_SCHEMES]
        if unknown or not self.weight_schemes:
            raise ValueError(
                f"Capabilities.weight_schemes: found {self.weight_schemes!r}; "
                f"give one or more of {', '.join(WEIGHT_SCHEMES)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What a lowered model runs. One that has float fallbacks, or no quantized op, is judged FALLBACK. (LOW-04)"""

    quantized_ops: tuple[str, ...]
    """Names of the ops that execute on integers."""

    float_fallbacks: tuple[str, ...]
    """Names of the ops that the claims say are quantized, and that execute in float."""

    kernels: tuple[str, ...] = ()
    """Names of the kernels that run, if they are known: evidence that a report shows where a claim is FALLBACK."""


class UnsupportedPattern(Exception):
    """Raised by ``Backend.lower`` to decline a model; the message says why.

    To decline what the backend's own config claims refutes the claim: the config says more than is done.
    """


class Backend(ABC):
    """One backend under test. Subclass it, set ``name`` and ``representation``, implement the abstract methods.

    The class is instantiated without arguments, once in every process of the run, also where the backend cannot
    run: the constructor should not open the hardware.
    """

    name: str
    """Shown in reports, such as ``"my_npu"``."""

    representation: Representation
    """The form in which ``lower`` gets the model."""

    engine: str = ""
    """The ``torch.backends.quantized.engine`` to run under; empty: the backend does not use torch's engines."""

    waivers: Path | None = None
    """A TOML file of known deviations that the vendor answers for; used unless the command line says otherwise.

    Its tables are those of ``conformance/run/waivers.py``."""

    @abstractmethod
    def backend_config(self) -> BackendConfig:
        """Return the claims: which patterns of ops are quantized, with which dtypes.

        ``refimpl.BackendConfig`` or torch's own class, or its dict form.
        """

    @abstractmethod
    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """Compile a reference quantized model into something to call with inputs like ``example_inputs``.

        The reference model is a ``torch.fx`` graph in the form of ``representation``: every quantized op is
        written as dequantize → float op → quantize, and a backend replaces such groups by its integer kernels.
        The result is called as the model would be, and returns the same structure of tensors. Do not change
        the argument. Reports show the graph of a result that is a GraphModule, or has one as ``graph_module``.

        Raises UnsupportedPattern to decline; any other exception counts as a failure of the backend.
        """

    def unavailable_reason(self) -> str | None:
        """Say why the backend cannot run on this machine ("no NPU found"); None: it can."""
        return None

    def warm_up(self) -> None:
        """Import, and make once, what takes long: the processes in which claims run then have it from their start.

        Called in the process that controls the run: do nothing here that may crash, or that opens the hardware.
        """
        return

    def execution(self, lowered: Callable[..., Any]) -> Execution | None:
        """Tell what ``lowered`` runs; None: the backend cannot tell, and nothing is concluded from it."""
        return None

    def capabilities(self) -> Capabilities:
        """Say what the BackendConfig has no words for."""
        return Capabilities()

    def versions(self) -> dict[str, str]:
        """Name the versions that a result depends on: ``{"my_compiler": "1.2", "driver": "535"}``."""
        return {}
