"""What one run of the example inputs tells of a graph's values (rules FUS-06, OBS-15)."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.nn.utils.stateless import _reparametrize_module


class Seen(NamedTuple):
    """A tensor that a node gave: its number of axes, and its dtype."""

    rank: int
    dtype: torch.dtype


class Examples:
    """The example inputs of a traced model, which is run on them once, when something is first asked.

    A model in eval mode is run, on copies of its buffers and of the inputs. One in train mode is followed by shapes
    alone, for a batch of one may be too small for it: where the shapes depend on data, later nodes are not reached.
    """

    def __init__(self, model: GraphModule, inputs: tuple[Any, ...] | None) -> None:
        self._model, self._inputs = model, inputs

    @property
    def are_given(self) -> bool:
        """Tell whether there are any; without inputs nothing is known."""
        return bool(self._inputs)

    @property
    def seen(self) -> dict[Node, Seen]:
        """The nodes that were reached and that gave a tensor, with the facts of it."""
        return self._found[0]

    @property
    def failure(self) -> str:
        """The node at which the run ended too early, and why; "" if it did not."""
        return self._found[1]

    @cached_property
    def _found(self) -> tuple[dict[Node, Seen], str]:
        reader, failure = _Reader(self._model), ""
        if self._inputs:
            try:
                with torch.no_grad():
                    (_follow if self._model.training else _run)(self._model, reader, self._inputs)
            except Exception as error:
                failure = f"{reader.at}: {type(error).__name__}: {error}"
        return reader.seen, failure

    def replace(self, old: Node, new: Node) -> None:
        """Let `new` stand for the value of `old`, as after fusing; what was not run yet is run as it is then."""
        if "_found" in vars(self) and old is not new:
            self.seen.pop(new, None)
            if old in self.seen:
                self.seen[new] = self.seen.pop(old)


class _Reader(Interpreter):
    """Runs a graph; keeps the facts of every tensor, and the tensor itself only while it is needed."""

    def __init__(self, model: GraphModule) -> None:
        super().__init__(model)
        self.extra_traceback = False
        self.seen: dict[Node, Seen] = {}
        self.at: str | None = None

    def run_node(self, n: Node) -> Any:
        """Run one node, and note what it gives."""
        self.at = n.format_node()
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.seen[n] = Seen(value.dim(), value.dtype)
        return value


def _run(model: GraphModule, reader: _Reader, inputs: tuple[Any, ...]) -> None:
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng(devices=()), _reparametrize_module(model, buffers):
        reader.run(*copy.deepcopy(inputs))


def _follow(model: GraphModule, reader: _Reader, inputs: tuple[Any, ...]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        state = dict(model.named_parameters()) | dict(model.named_buffers())
        with _reparametrize_module(model, {name: mode.from_tensor(value) for name, value in state.items()}):
            reader.run(*inputs)
