"""How tensors travel between the process of the judge and that of the backend: as plain data, and their memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fx_quant_conformance.conformance.machine.frames import WireError
from fx_quant_conformance.conformance.machine.guard import guard


def pack(value: Any, pieces: list[bytes]) -> Any:
    """Return a nested value of tensors as plain data; its tensors' bytes are appended to ``pieces``."""
    if isinstance(value, Tensor):
        return _pack_tensor(value.detach(), pieces)
    if type(value) in (tuple, list):
        return {type(value).__name__: [pack(item, pieces) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[str(key), pack(item, pieces)] for key, item in value.items()]}
    return {"other": type(value).__name__}


def _pack_tensor(tensor: Tensor, pieces: list[bytes]) -> dict[str, Any]:
    head = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    if tensor.is_quantized or tensor.layout is not torch.strided:
        return head
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    pieces.append(memory_of(tensor))
    begins_later = tensor.storage_offset() > 0  # than its storage
    return head | {"strides": list(tensor.stride()), "begins_later": begins_later, "piece": len(pieces) - 1}


def memory_of(tensor: Tensor) -> bytes:
    """Return the bytes of memory that a tensor on the CPU is made from."""
    size = extent_of(tensor.shape, tensor.stride())
    return ctypes.string_at(tensor.data_ptr(), size * tensor.element_size()) if size else b""


class HeldOutputs:
    """The outputs of runs, one after the other, and the bytes that each had directly after its run."""

    def __init__(self) -> None:
        self._held: list[tuple[Any, list[bytes]]] = []

    def pack(self, output: Any, pieces: list[bytes]) -> Any:
        """Return the output of the next run as `pack` does, and hold it."""
        first = len(pieces)
        data = pack(output, pieces)
        self._held.append((output, pieces[first:]))
        return data

    @guard("numerics.results")
    def find_overwritten(self) -> Iterator[tuple[int, int]]:
        """Find the outputs that no longer have their bytes. (NUM-07)

        Yields the number of each, and how many runs later the last one came whose bytes it has now; 0: none has.
        """
        for number, (output, then) in enumerate(self._held):
            now = list[bytes]()
            pack(output, now)
            if now != then:  # rule: NUM-07
                alike = (later for later, (_, bytes_) in enumerate(self._held[number:]) if bytes_ == now)
                yield number, max(alike, default=0)


def unpack(data: Any, pieces: Sequence[bytes | memoryview]) -> Any:
    """Return the nested value of plain data. Raises WireError for data that describes none."""
    try:
        return _unpack(data, pieces)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError) as error:
        raise WireError(f"an output that cannot be read: {type(error).__name__}: {error}") from error


def _unpack(data: dict[str, Any], pieces: Sequence[bytes | memoryview]) -> Any:
    if "tuple" in data or "list" in data:
        ((name, items),) = data.items()
        values = [_unpack(item, pieces) for item in items]
        return tuple(values) if name == "tuple" else values
    if "dict" in data:
        return {str(key): _unpack(item, pieces) for key, item in data["dict"]}
    return _stand_in(str(data["other"])) if "other" in data else _unpack_tensor(data, pieces)


def _stand_in(kind: str) -> object:
    """Return an object of an empty class of this name: of what is no tensor, the judge says only what it is."""
    return type(kind, (), {})()


def _unpack_tensor(data: dict[str, Any], pieces: Sequence[bytes | memoryview]) -> Any:
    dtype, shape = getattr(torch, str(data["dtype"])), [int(length) for length in data["shape"]]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype: {data['dtype']}")
    if "piece" not in data:
        return _stand_in(f"tensor of dtype {dtype} that is not a plain one")
    strides = [int(stride) for stride in data["strides"]]
    size, piece = extent_of(shape, strides), pieces[data["piece"]]
    if len(piece) != size * dtype.itemsize or any(number < 0 for number in (*shape, *strides)):
        raise ValueError(f"{len(piece)} bytes for shape {shape} and strides {strides} of {dtype}")
    if not size:
        return torch.empty(shape, dtype=dtype)
    offset = int(bool(data.get("begins_later")))
    memory = torch.frombuffer(bytearray(offset * dtype.itemsize) + piece, dtype=dtype)
    return memory.as_strided(shape, strides, offset)


def extent_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return from how many elements of memory a tensor is made."""
    if not math.prod(shape):
        return 0
    return 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
