"""What a model holds, as an evaluation has it: a tensor that the model writes is another one from then on."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fx_quant_conformance.conformance.bounds.error_bounds import NoOracleError
from fx_quant_conformance.refimpl.graph.in_place import works_in_place, writes
from fx_quant_conformance.refimpl.graph.tracing import attribute_of, memory_of


class Held:
    """The tensors that a model's nodes read of it. One tensor may have several names, and views."""

    def __init__(self, model: GraphModule, modules: Mapping[str, nn.Module]) -> None:
        self._tensors = {node: attribute_of(model, str(node.target)) for node in model.graph.find_nodes(op="get_attr")}
        self._memory = {node: memory_of(held) for node, held in self._tensors.items()}
        self._written = {memory for node, memory in self._memory.items() if _is_written(node, modules)}
        self._state: dict[Hashable, tuple[Any, Tensor]] = {}
        """What the evaluation has made of memory that is written, and the tensor that is laid out so."""

    def begin(self) -> None:
        """Begin an evaluation: all is as the model holds it."""
        self._state = {}

    def read(self, node: Node) -> Any:
        """Return what a node reads: what the model holds, or what that has been changed to."""
        held, memory = self._tensors[node], self._memory[node]
        if memory not in self._written:
            return held
        return _lay_out(*self._state.setdefault(memory, (held.clone(), held)), held)

    def change(self, node: Node, value: Any) -> Iterator[Node]:
        """Change what a node has read, if it is one that reads; yield all that read of the same memory."""
        if node in self._tensors:
            memory = self._memory[node]
            self._written.add(memory)
            self._state[memory] = value, self._tensors[node]
            yield from (each for each in self._tensors if self._memory[each] == memory)


def _lay_out(value: Any, of: Tensor, held: Tensor) -> Any:
    """Return what a held tensor has become, by what another of the same memory has. Raises NoOracleError."""
    starts_alike = of.storage_offset() == held.storage_offset() and of.numel() == held.numel()
    if starts_alike and (of.shape, of.stride()) == (held.shape, held.stride()):
        return value
    if not (starts_alike and of.is_contiguous() and held.is_contiguous()):
        raise NoOracleError("a part of a tensor that the model holds is written, and another part is read")
    if isinstance(value, Tensor):
        return value.reshape(held.shape)
    errors = {cause: error.expand_as(value.real).reshape(held.shape) for cause, error in value.errors.items()}
    return replace(value, real=value.real.reshape(held.shape), errors=errors)


def _is_written(node: Node, modules: Mapping[str, nn.Module]) -> bool:
    return any(
        (writes(user, modules) or works_in_place(user)) and node in user.all_input_nodes[:1] for user in node.users
    )
