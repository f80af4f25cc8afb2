"""What one run of the example inputs tells of a graph's values; inputs that cannot be run are no error (OBS-15)."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._subclasses import fake_tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_leaves

from refimpl.errors import warn_user
from refimpl.tracing import Draft

# What following a model by shapes alone cannot do.
_BEYOND_SHAPES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)


class Seen(NamedTuple):
    """A tensor that a node gave: its number of axes, and its dtype."""

    rank: int
    dtype: torch.dtype


Fact: TypeAlias = "Seen | tuple[Any, ...] | None"  # of a tuple, list or dict those of its values; None: no tensor


class Examples:
    """The example inputs of a traced model, which is run on them once, when something is first asked. (OBS-15)

    `inputs`: the positional inputs in a tuple or list, or the only one; None or (): not known. A model in eval mode is
    run, on copies of its buffers and of the inputs. One in train mode is followed by shapes alone, for a batch of one
    may be too small for it; where the shapes depend on data, later nodes are not reached. A run that ends too early
    otherwise is a warning that says where and why.
    """

    def __init__(self, model: Draft, inputs: object) -> None:
        self._model = model
        self._inputs = tuple(inputs) if isinstance(inputs, (tuple, list)) else () if inputs is None else (inputs,)
        self._found: tuple[dict[Node, Fact], str] | None = None

    @property
    def are_given(self) -> bool:
        """Tell whether there are any; without inputs nothing is known."""
        return bool(self._inputs)

    @property
    def were_run(self) -> bool:
        """Tell whether they were run, so that asking costs nothing."""
        return self._found is not None

    @property
    def known(self) -> dict[Node, Fact]:
        """What is known without a run that was not made yet: then it is of the model's inputs alone."""
        if self.were_run:
            return self.seen
        inputs = () if self._misfit() else self._inputs
        given = zip(self._model.graph.find_nodes(op="placeholder"), inputs, strict=False)
        return {node: _fact(value) for node, value in given if not str(node.target).startswith("*")}

    @property
    def seen(self) -> dict[Node, Fact]:
        """The nodes that were reached, with the facts of what they gave."""
        return self.run()[0]

    @property
    def failure(self) -> str:
        """Why the inputs do not run to the end, and at which node; "" if they do, or if none are given."""
        return self.run()[1]

    def run(self) -> tuple[dict[Node, Fact], str]:
        """Return what was seen and the failure; run the model if it was not yet."""
        if self._found is None:
            self._found = self._read()
            if self._found[1]:  # rule: OBS-15
                warn_user(f"example_inputs cannot be run; from there on ranks are not known: {self._found[1]}")
        return self._found

    def replace(self, old: Node, new: Node) -> None:
        """Let `new` stand for the value of `old`, as after fusing; what was not run yet is run as it is then."""
        if self._found is not None and old is not new:
            self.seen.pop(new, None)
            if old in self.seen:
                self.seen[new] = self.seen.pop(old)

    def _read(self) -> tuple[dict[Node, Fact], str]:
        reader, failure = _Reader(self._model), self._misfit() if self._inputs else ""
        if self._inputs and not failure:
            try:
                with torch.no_grad():
                    (_follow if self._model.training else _run)(self._model, reader, self._inputs)
            except _BEYOND_SHAPES:
                pass  # no fault of the inputs
            except Exception as error:
                failure = f"{reader.at}: {type(error).__name__}: {error}"
        return reader.seen, failure

    def _misfit(self) -> str:
        """Say why the model cannot even be called with that number of inputs."""
        taken = [node for node in self._model.graph.nodes if node.op == "placeholder"]
        names = [str(node.target) for node in taken]
        is_open = any(name.startswith("*") for name in names)
        if is_open or sum(not node.args for node in taken) <= len(self._inputs) <= len(taken):
            return ""
        return f"{self._model.origin} takes ({', '.join(names)}), found {len(self._inputs)} inputs"


class _Reader(Interpreter):
    """Runs a graph; keeps the facts of every tensor, and the tensor itself only while it is needed."""

    def __init__(self, model: GraphModule) -> None:
        super().__init__(model)
        self.extra_traceback = False
        self.seen: dict[Node, Fact] = {}
        self.at = "before the first node"

    def run_node(self, n: Node) -> Any:
        """Run one node, and note what it gives."""
        self.at = n.format_node() or n.name
        value = super().run_node(n)
        self.seen[n] = _fact(value)
        return value


def _fact(value: Any) -> Fact:
    if isinstance(value, torch.Tensor):
        return Seen(value.dim(), value.dtype)
    if isinstance(value, (tuple, list, dict)):
        return tuple(map(_fact, value.values() if isinstance(value, dict) else value))
    return None


def _run(model: GraphModule, reader: _Reader, inputs: tuple[Any, ...]) -> None:
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    tensors = {id(value): value.detach().clone() for value in tree_leaves(inputs) if isinstance(value, torch.Tensor)}
    with torch.random.fork_rng(devices=()), _reparametrize_module(model, buffers):
        reader.run(*copy.deepcopy(inputs, tensors))  # which would refuse a tensor with a history


def _follow(model: GraphModule, reader: _Reader, inputs: tuple[Any, ...]) -> None:
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        state = dict(model.named_parameters()) | dict(model.named_buffers())
        with _reparametrize_module(model, {name: mode.from_tensor(value) for name, value in state.items()}):
            reader.run(*inputs)
