"""The facts that one run of the example inputs gives of a graph's values; a run that fails is no error (OBS-15)."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._subclasses import fake_tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_leaves

from fx_quant_conformance.refimpl.errors import warn_user
from fx_quant_conformance.refimpl.graph.graph_modules import Draft

# What following a model only by shapes cannot do.
_BEYOND_SHAPES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)


class Seen(NamedTuple):
    """A tensor that a node returned: its number of axes, and its dtype."""

    rank: int
    dtype: torch.dtype


Fact: TypeAlias = "Seen | tuple[Any, ...] | None"  # a tuple's, list's or dict's are its values'; None: no tensor


class Examples:
    """The example inputs of a traced model, which is run on them once, when a fact is first needed. (OBS-15)

    `inputs`: the positional inputs in a tuple or list, or the only one; None or (): not known. A model in eval mode is
    run, on copies of its buffers and of the inputs. One in train mode is followed only by shapes, because a batch of
    one may be too small for it; where the shapes depend on data, later nodes are not reached. Any other run that ends
    early gives a warning that says where and why.
    """

    def __init__(self, model: Draft, inputs: object) -> None:
        self._model = model
        self._inputs = tuple(inputs) if isinstance(inputs, (tuple, list)) else () if inputs is None else (inputs,)
        self._result: tuple[dict[Node, Fact], str] | None = None

    @classmethod
    def of_facts(cls, model: Draft, facts: dict[Node, Fact]) -> Examples:
        """Return examples of which the facts are known otherwise, so that the model is not run."""
        examples = cls(model, (None,))
        examples._result = facts, ""
        return examples

    @property
    def are_given(self) -> bool:
        """Whether any inputs are given; without them nothing is known."""
        return bool(self._inputs)

    @property
    def were_run(self) -> bool:
        """Whether the model was run, so that all facts are known."""
        return self._result is not None

    @property
    def known(self) -> dict[Node, Fact]:
        """The facts that are known without another run: before the run, only the model inputs' facts."""
        if self.were_run:
            return self.seen
        inputs = () if self._format_misfit() else self._inputs
        values = zip(self._model.graph.find_nodes(op="placeholder"), inputs, strict=False)
        return {node: _fact_of(value) for node, value in values if not str(node.target).startswith("*")}

    @property
    def seen(self) -> dict[Node, Fact]:
        """The nodes that were reached, with the facts of their values."""
        return self.run()[0]

    @property
    def failure(self) -> str:
        """Why the inputs do not run to the end, and at which node; "" if they do, or if none are given."""
        return self.run()[1]

    def run(self) -> tuple[dict[Node, Fact], str]:
        """Return the facts and the failure; run the model if it was not run before."""
        if self._result is None:
            self._result = self._read()
            if self._result[1]:  # rule: OBS-15
                warn_user(f"example_inputs cannot be run; from there on ranks are not known: {self._result[1]}")
        return self._result

    def replace(self, old: Node, new: Node) -> None:
        """Give `new` the facts of `old`, as after fusing; before the run there are no facts to move."""
        if self._result is not None and old is not new:
            self.seen.pop(new, None)
            if old in self.seen:
                self.seen[new] = self.seen.pop(old)

    def _read(self) -> tuple[dict[Node, Fact], str]:
        reader, failure = _Reader(self._model), self._format_misfit() if self._inputs else ""
        if self._inputs and not failure:
            try:
                with torch.no_grad():
                    (_follow_shapes if self._model.training else _run_on_copies)(self._model, reader, self._inputs)
            except _BEYOND_SHAPES:
                pass  # no fault of the inputs
            except Exception as error:
                failure = f"{reader.at}: {type(error).__name__}: {error}"
        return reader.seen, failure

    def _format_misfit(self) -> str:
        """Return why the model cannot even be called with that number of inputs; "" if it can."""
        parameters = self._model.graph.find_nodes(op="placeholder")
        names = [str(node.target) for node in parameters]
        is_open = any(name.startswith("*") for name in names)
        if is_open or sum(not node.args for node in parameters) <= len(self._inputs) <= len(parameters):
            return ""
        return f"{type(self._model).__name__} takes ({', '.join(names)}), found {len(self._inputs)} inputs"


class _Reader(Interpreter):
    """Runs a graph; keeps the facts of every tensor, and the tensors only while they are needed."""

    def __init__(self, model: GraphModule) -> None:
        super().__init__(model)
        self.extra_traceback = False
        self.seen: dict[Node, Fact] = {}
        self.at = "before the first node"

    def run_node(self, n: Node) -> Any:
        """Run one node, and note the facts of its value."""
        self.at = n.format_node() or n.name
        value = super().run_node(n)
        self.seen[n] = _fact_of(value)
        return value


def _fact_of(value: Any) -> Fact:
    if isinstance(value, torch.Tensor):
        return Seen(value.dim(), value.dtype)
    if isinstance(value, (tuple, list, dict)):
        return tuple(map(_fact_of, value.values() if isinstance(value, dict) else value))
    return None


def _run_on_copies(model: GraphModule, reader: _Reader, inputs: tuple[Any, ...]) -> None:
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    tensors = {id(value): value.detach().clone() for value in tree_leaves(inputs) if isinstance(value, torch.Tensor)}
    with torch.random.fork_rng(devices=()), _reparametrize_module(model, buffers):
        reader.run(*copy.deepcopy(inputs, tensors))  # deepcopy refuses a tensor with a history


def _follow_shapes(model: GraphModule, reader: _Reader, inputs: tuple[Any, ...]) -> None:
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        state = dict(model.named_parameters()) | dict(model.named_buffers())
        with _reparametrize_module(model, {name: mode.from_tensor(value) for name, value in state.items()}):
            reader.run(*inputs)
