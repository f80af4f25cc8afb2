"""Programs as a vendor's PT2E flow makes them: annotated by its Quantizer, converted by torchao, on given grids.

The grids of activations are those of the reference model that the oracle judges, so that what the backend makes of the
program can be held to the same results. The weights are quantized by the Quantizer's own observers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from fx_quant_conformance.conformance.pt2e.probe import prepare
from fx_quant_conformance.refimpl import explain
from fx_quant_conformance.refimpl.exported.calls import ANNOTATION
from fx_quant_conformance.refimpl.exported.exported import CALLED, OF_MODEL, export_open, open_module
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize, is_quantize

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_Grid = tuple[float, int, int, int]
"""Scale, zero point, and the smallest and the largest integer."""
_OF_OP = -1
"""The place of what an op gives, among the grids by the place of the input."""


class OtherGridError(Exception):
    """The Quantizer observes a value that the reference model does not round, or in another range."""


def make_program(
    quantizer: Any, model: nn.Module, reference: GraphModule, example_inputs: tuple[Any, ...], *, dynamic_batch: bool
) -> ExportedProgram:
    """Return a float model's program as the Quantizer has it quantized, on the grids of its reference model.

    ``model``: a pattern, and nothing else, in eval mode. An output that the Quantizer leaves to the next op is observed
    as the pattern's first input is, as if a quantized op read it. The program's ops are known as parts of the pattern's
    last node, as those of an exported reference model are. Raises OtherGridError, and what torchao raises.
    """
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

    program = open_module(export_open(model.eval(), example_inputs, dynamic_batch=dynamic_batch))
    prepared = prepare(program, _make_reading(quantizer), is_qat=False)
    with torch.no_grad():
        prepared(*example_inputs)
    _set_grids(prepared, dict(_list_grids(reference)))
    converted = export_open(convert_pt2e(prepared), example_inputs, dynamic_batch=dynamic_batch)
    pattern = next(each.node for each in explain(reference).plan.decisions if each.is_quantized)
    for node in converted.graph.nodes:
        if node.op == "call_function" and not is_quantize(node) and not is_dequantize(node):
            own = {pattern: (f"{OF_MODEL}{CALLED}{pattern}", "")}
            node.meta["nn_module_stack"] = own | node.meta.get("nn_module_stack", {})
    return converted


def _make_reading(quantizer: Any) -> Any:
    """Return a Quantizer that annotates as another one does, and outputs as a quantized op that reads them would."""
    from torchao.quantization.pt2e.quantizer import ComposableQuantizer, Quantizer

    class OutputsRead(Quantizer):  # type: ignore[misc]
        def transform_for_annotation(self, model: GraphModule) -> GraphModule:
            transformed: GraphModule = quantizer.transform_for_annotation(model)
            return transformed

        def annotate(self, model: GraphModule) -> GraphModule:
            quantizer.annotate(model)
            for node in model.graph.output_node().all_input_nodes:
                note: Any = node.meta.get(ANNOTATION)
                if note is not None and note.output_qspec is None:
                    note.output_qspec = next(_list_specs(model), None)
            return model

        def validate(self, model: GraphModule) -> None:
            quantizer.validate(model)

    return ComposableQuantizer([OutputsRead()])


def _list_specs(model: GraphModule) -> Iterator[Any]:
    """Yield how the inputs of ops are observed that are no parameters, and not dynamically."""
    for node in model.graph.nodes:
        note: Any = node.meta.get(ANNOTATION)
        for source, spec in note.input_qspec_map.items() if note is not None else ():
            if source.op != "get_attr" and spec is not None and not getattr(spec, "is_dynamic", False):
                yield spec


# -- grids ------------------------------------------------------------------------------------------------------------


def _list_grids(reference: GraphModule) -> Iterator[tuple[int, _Grid]]:
    """Yield the grids of a reference model by what is rounded: the place of an input, or what an op gives."""
    places = {node: place for place, node in enumerate(reference.graph.find_nodes(op="placeholder"))}
    for node in reference.graph.nodes:
        numbers = node.args[1:5]
        if is_quantize(node) and len(numbers) == 4 and not any(isinstance(each, Node) for each in numbers):
            source = node.args[0]
            while isinstance(source, Node) and (is_quantize(source) or is_dequantize(source)):
                source = source.args[0]
            yield places.get(source, _OF_OP), numbers


def _set_grids(prepared: GraphModule, grids: dict[int, _Grid]) -> None:
    """Replace the observers of activations by those that know their qparams."""
    from torchao.quantization.pt2e import DerivedObserverOrFakeQuantize, ObserverBase

    class Known(ObserverBase):  # type: ignore[misc]
        """An observer that was told its qparams."""

        def __init__(self, observer: Any, scale: float, zero_point: int) -> None:
            super().__init__(observer.dtype)
            self.quant_min, self.quant_max, self.qscheme = observer.quant_min, observer.quant_max, observer.qscheme
            self.eps = getattr(observer, "eps", None)
            self._qparams = torch.tensor([scale]), torch.tensor([zero_point])

        def forward(self, x: Any) -> Any:
            return x

        def calculate_qparams(self, **_: Any) -> Any:
            return self._qparams

    places = {node: place for place, node in enumerate(prepared.graph.find_nodes(op="placeholder"))}
    observers = {
        node: module
        for node in prepared.graph.find_nodes(op="call_module")
        if isinstance(module := prepared.get_submodule(str(node.target)), ObserverBase)
    }
    known = dict[int, Known]()
    for node, observer in observers.items():
        source: Any = node.args[0]
        while source in observers:
            source = source.args[0]
        if source.op == "get_attr" or observer.is_dynamic or isinstance(observer, DerivedObserverOrFakeQuantize):
            continue
        grid = grids.get(places.get(source, _OF_OP))
        if grid is None or grid[2:] != (observer.quant_min, observer.quant_max):
            found = "float" if grid is None else f"{grid[2]}..{grid[3]}"
            bounds = f"{observer.quant_min}..{observer.quant_max}"
            raise OtherGridError(f"{source} is observed in {bounds}; the reference model has it {found}")
        known.setdefault(id(observer), Known(observer, *grid[:2]))
        prepared.set_submodule(str(node.target), known[id(observer)])
    for each in observers.values():
        if isinstance(each, DerivedObserverOrFakeQuantize):
            each.obs_or_fqs = [known.get(id(source), source) for source in each.obs_or_fqs]
