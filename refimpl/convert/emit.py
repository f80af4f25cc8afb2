"""Writing quantize and dequantize, in both reference forms (rules CVT-01, CVT-03, CVT-04, CVT-07, CVT-09)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from fx_quant_conformance.refimpl.errors import QConfigError, blame
from fx_quant_conformance.refimpl.graph.graph_modules import free_names
from fx_quant_conformance.refimpl.legacy import qint8, qint32, quint8
from fx_quant_conformance.refimpl.legacy.dtypes import PLAIN_DTYPE
from fx_quant_conformance.refimpl.legacy.quantized_tensors import (
    QUANTIZE,
    QUANTIZE_DYNAMIC,
    QUANTIZE_PER_CHANNEL,
    check_torch,
    engine_saturates,
)
from fx_quant_conformance.refimpl.observers.decomposed import OPS
from fx_quant_conformance.refimpl.observers.observers import asks_whole_range
from fx_quant_conformance.refimpl.observers.qparams import (
    QParams,
    dtype_range,
    fill_range,
    read_plain_observers,
    read_qparams,
)
from fx_quant_conformance.refimpl.prepare.plan import Slot


def write_node(graph: Graph, op: str, target: Any, args: tuple[Any, ...]) -> Node:
    """Append a node, named after its target; set its arguments later: fx would search them for symbolic numbers."""
    node = graph.create_node(op, target, name=getattr(target, "__name__", target))
    node.args = args
    return node


class Emitter:
    """Base of both forms: names buffers, and reads the qparams of an observer instance once."""

    write_static: Callable[..., tuple[Node, Node]]  # quantize with known qparams (CVT-01)
    write_dynamic: Callable[..., tuple[Node, Node]]  # quantize with qparams chosen while running (CVT-03)
    write_float16: Callable[..., tuple[Node, Node]]  # cast to float16 and back (CVT-04)

    def __init__(self, graph: Graph, attributes: dict[str, Any], model: nn.Module, observers: Iterable[Any]) -> None:
        self.graph = graph
        self.attributes = attributes
        self._model = model  # whose names are no buffer's
        self._names: dict[str, Iterator[str]] = {}
        self._qparams = read_plain_observers(observers)  # by id
        self._read: list[Any] = []  # observers kept alive, so that no other one gets their id

    def write(self, value: Node, observer: Any, scope: str, slot: Slot) -> tuple[Node, Node]:
        """Write quantize and dequantize of a value at the end of the graph; return both nodes.

        Raises QConfigError, naming the slot, for an observer that gives no qparams.
        """
        if getattr(observer, "is_dynamic", False):
            return self.write_dynamic(value, observer)
        if observer.dtype == torch.float16:
            return self.write_float16(value)
        return self.write_static(value, self.find_qparams(observer, slot), scope)

    def find_qparams(self, observer: Any, slot: Slot) -> QParams:
        """Return the qparams of a slot's observer; each is read once. Raises QConfigError if it gives none."""
        if id(observer) not in self._qparams:
            with blame(QConfigError, f"observer of {slot.value!r} ({slot.role})", "it"):
                self._qparams[id(observer)] = read_qparams(observer)
            self._read.append(observer)
        return self._qparams[id(observer)]

    def add_buffer(self, stem: str, tensor: Tensor) -> Node:
        """Register a buffer under the next free name of a stem, and read it."""
        stem = stem.replace(".", "_")
        if stem not in self._names:
            self._names[stem] = free_names(self._model, f"{stem}_", self.attributes)
        name = next(self._names[stem])
        self.attributes[name] = tensor
        return self.graph.create_node("get_attr", name, name=name)

    def refuse(self, value: Node, what: str, choices: str) -> NoReturn:
        """Raise QConfigError: the form of this emitter cannot say what an observer asks for. (CVT-10)"""
        form = type(self).__name__
        raise QConfigError(f"CVT-10: {value.name} is observed for {what}; {form} can express {choices}")  # rule: CVT-10


class QuantizedTensors(Emitter):
    """Writes quantize and dequantize on torch's quantized tensors; qparams are buffers. (CVT-01)"""

    def __init__(self, graph: Graph, attributes: dict[str, Any], model: nn.Module, observers: Iterable[Any]) -> None:
        check_torch()
        super().__init__(graph, attributes, model, observers)

    dtypes = (quint8, qint8, qint32)

    def write_static(self, value: Node, qparams: QParams, scope: str) -> tuple[Node, Node]:
        """Write quantize_per_tensor, or per_channel with an axis; buffers are named after `scope`. (CVT-01)

        These ops know only the dtype's whole range: only the qparams show a narrower one. (CVT-09)
        """
        if qparams.dtype not in self.dtypes:
            self.refuse(value, str(qparams.dtype), ", ".join(map(str, self.dtypes)))
        scale, zero_point = qparams.scale, qparams.zero_point
        form: tuple[Any, ...] = (qparams.axis, qparams.dtype)
        quantize: Any = QUANTIZE_PER_CHANNEL
        if qparams.axis is None:
            scale, zero_point, form = torch.tensor(float(scale)), torch.tensor(int(zero_point)), (qparams.dtype,)
            quantize = QUANTIZE
        numbers = (self.add_buffer(f"{scope}_scale", scale), self.add_buffer(f"{scope}_zero_point", zero_point))
        quantized = write_node(self.graph, "call_function", quantize, (value, *numbers, *form))
        return quantized, write_node(self.graph, "call_method", "dequantize", (quantized,))

    def write_dynamic(self, value: Node, observer: Any) -> tuple[Node, Node]:
        """Write quantize_per_tensor_dynamic, with reduce_range where the range is half of the dtype's. (CVT-03, CVT-09)

        A whole range is halved too on engines whose kernels saturate, unless the observer asks for it. The op knows
        only these two ranges and affine qparams: another range, or a symmetric scheme, raises QConfigError.
        """
        is_half = observer.dtype != torch.float16 and self._is_half(value, observer)
        is_reduced = is_half or (engine_saturates() and not asks_whole_range(observer))  # rule: CVT-03
        arguments = (value, observer.dtype, is_reduced)  # rule: CVT-09
        quantized = self.graph.call_function(QUANTIZE_DYNAMIC, arguments)  # rule: CVT-03
        return quantized, self.graph.call_method("dequantize", (quantized,))

    def _is_half(self, value: Node, observer: Any) -> bool:
        whole, ends = dtype_range(observer.dtype), fill_range(observer.dtype, observer.quant_min, observer.quant_max)
        half = (whole[0] // 2, whole[1] // 2)
        if ends not in (whole, half) or observer.dtype not in (quint8, qint8):
            self.refuse(value, f"dynamic {observer.dtype} in {ends}", f"dynamic quint8 and qint8, in {whole} or {half}")
        if getattr(observer, "qscheme", None) == torch.per_tensor_symmetric:
            self.refuse(value, "dynamic symmetric qparams", "dynamic affine ones")
        return ends == half

    def write_float16(self, value: Node) -> tuple[Node, Node]:
        """Write a cast to float16, and the ``dequantize`` that casts back. (CVT-04)"""
        half = self.graph.call_method("to", (value, torch.float16))  # rule: CVT-04
        return half, self.graph.call_method("dequantize", (half,))


class Decomposed(Emitter):
    """Writes ``quantized_decomposed`` ops on plain integers; per-tensor qparams are literals. (CVT-07)"""

    def write_static(self, value: Node, qparams: QParams, scope: str) -> tuple[Node, Node]:
        """Write the ops per tensor, or per channel with buffers named after `scope`. (CVT-07)"""
        bounds = (qparams.quant_min, qparams.quant_max, self._plain_dtype_of(value, qparams.dtype))  # rule: CVT-07
        if qparams.axis is None:
            numbers: tuple[Any, ...] = (float(qparams.scale), int(qparams.zero_point), *bounds)
            return self._write_pair(value, numbers, OPS.quantize_per_tensor.default, OPS.dequantize_per_tensor.default)
        tensors = (("scale", qparams.scale), ("zero_point", qparams.zero_point))
        numbers = (*(self.add_buffer(f"{scope}_{name}", tensor) for name, tensor in tensors), qparams.axis, *bounds)
        return self._write_pair(value, numbers, OPS.quantize_per_channel.default, OPS.dequantize_per_channel.default)

    def write_dynamic(self, value: Node, observer: Any) -> tuple[Node, Node]:
        """Write choose_qparams, and quantize and dequantize with what it gives; float16 is cast. (CVT-03)"""
        if observer.dtype == torch.float16:
            return self.write_float16(value)
        bounds = fill_range(observer.dtype, observer.quant_min, observer.quant_max)
        plain = self._plain_dtype_of(value, observer.dtype)
        is_symmetric = getattr(observer, "qscheme", None) == torch.per_tensor_symmetric
        choose = OPS.choose_qparams_symmetric.tensor if is_symmetric else OPS.choose_qparams.tensor
        eps = getattr(observer, "eps", torch.finfo(torch.float32).eps)
        chosen = self.graph.call_function(choose, (value, *bounds, float(eps), plain))  # rule: CVT-03
        qparams = (self.graph.call_function(operator.getitem, (chosen, index)) for index in (0, 1))
        numbers = (*qparams, *bounds, plain)
        return self._write_pair(value, numbers, OPS.quantize_per_tensor.tensor, OPS.dequantize_per_tensor.tensor)

    def write_float16(self, value: Node) -> tuple[Node, Node]:
        """Write a cast to float16, and one back to float32. (CVT-04)"""
        half = self.graph.call_function(OPS.convert_element_type.no_fuse, (value, torch.float16))  # rule: CVT-04
        return half, self.graph.call_function(OPS.convert_element_type.no_fuse, (half, torch.float32))

    def _plain_dtype_of(self, value: Node, dtype: torch.dtype) -> torch.dtype:
        if dtype not in PLAIN_DTYPE:
            self.refuse(value, str(dtype), ", ".join(map(str, PLAIN_DTYPE)))
        return PLAIN_DTYPE[dtype]

    def _write_pair(self, value: Node, numbers: tuple[Any, ...], quantize: Any, dequantize: Any) -> tuple[Node, Node]:
        quantized = write_node(self.graph, "call_function", quantize, (value, *numbers))
        return quantized, write_node(self.graph, "call_function", dequantize, (quantized, *numbers))
