"""A device for the suite: each plain graph becomes a TFLite file of its own, which LiteRT's interpreter runs on int8.

python device.py BUNDLE OUTPUTS [--kernels=xnnpack|builtin|reference]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from ops import OPS, SIGNATURES, WITH_RELU, Declined, Layer
from writer import Array, Grid, Value, Writer

Node: TypeAlias = Mapping[str, Any]
RESOLVERS = {
    "xnnpack": OpResolverType.AUTO,
    "builtin": OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    "reference": OpResolverType.BUILTIN_REF,
}


def kind_of(node: Node) -> str:
    """Return what an op computes: ``maxpool2d`` for ``nn.MaxPool2d`` and ``F.max_pool2d``."""
    return str(node["op"]).rpartition(".")[2].replace("_", "").lower()


def find_nodes(value: Any) -> Iterator[str]:
    """Yield the names of the nodes in arguments, or in what a graph returns."""
    if isinstance(value, dict) and "node" in value:
        yield value["node"]
    elif isinstance(value, (list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from find_nodes(each)


def read_grid(data: Node, weights: Mapping[str, Array]) -> Grid:
    """Return scales and zero points of a graph: numbers, or arrays for an axis."""
    scale, zero_point = (
        np.atleast_1d(weights[given["tensor"]] if isinstance(given, dict) else given)
        for given in (data["scale"], data["zero_point"])
    )
    return Grid(scale, zero_point, data.get("axis") or 0)


class Model:
    """A graph as a TFLite model for inputs of these shapes."""

    def __init__(self, graph: Node, weights: Mapping[str, Array], shapes: Sequence[Sequence[int]]) -> None:
        self.kernels = dict[str, list[str]]()
        self._writer, self._weights = Writer(), weights
        self._shapes = dict(zip(graph["inputs"], shapes, strict=True))
        self._inputs = dict[str, Value]()
        self._integers = dict[str, Value]()
        self._constants = dict[str, Node]()
        self._waiting = dict[str, Node]()
        for node in graph["nodes"]:
            self._take(node)
        outputs = list(find_nodes(graph["outputs"]))
        if self._shapes.keys() - self._inputs.keys() or {*outputs} - self._integers.keys():
            raise Declined("an input or an output that is not quantized")
        inputs = [self._inputs[name] for name in graph["inputs"]]
        self.grids = [value.grid for value in inputs]
        self.data = self._writer.pack(inputs, [self._integers[name] for name in outputs])

    def _take(self, node: Node) -> None:
        """Take the next node; an op waits for the quantize after it."""
        name = node["name"]
        if node["op"] not in ("quantize", "dequantize"):
            self._waiting[name] = node
            return
        given = node["args"][0]
        if "tensor" in given:
            self._constants[name] = {**node, **given}
        elif node["op"] == "dequantize":
            self._integers[name] = self._integers[given["node"]]
        else:
            self._integers[name] = self._quantize(given["node"], node)

    def _quantize(self, name: str, node: Node) -> Value:
        """Return the integers of a grid: those of an input, or of an op with the relu that follows it."""
        grid = read_grid(node, self._weights)
        if (node["low"], node["high"], node["dtype"]) != (-128, 127, "int8"):
            raise Declined(f"{node['name']}: integers other than -128 to 127")
        if name in self._shapes:
            self._inputs[name] = self._writer.add_tensor(self._shapes[name], grid)
            return self._inputs[name]
        if name in self._integers:
            given = self._integers[name]
            return self._writer.add_op("QUANTIZE", [given], given.shape, grid)
        op, *rest = chain = self._find_chain(name)
        is_fused = [kind_of(each) for each in rest] == ["relu"] and kind_of(op) in WITH_RELU
        if kind_of(op) not in OPS or (rest and not is_fused):
            raise Declined(f"{name}: the device has no {' + '.join(each['op'] for each in chain)}")
        relu = schema.ActivationFunctionType.RELU if is_fused else schema.ActivationFunctionType.NONE
        before = len(self._writer.names)
        made = OPS[kind_of(op)](self._writer, self._read_arguments(op), grid, relu)
        self.kernels.update((each["name"].partition(".")[0], self._writer.names[before:]) for each in chain)
        return made

    def _find_chain(self, name: str) -> list[Node]:
        """Return the ops that end in one, from what takes integers on."""
        node = self._waiting[name]
        before = [each for each in find_nodes(node["args"][:1]) if each in self._waiting]
        return [*self._find_chain(before[0]), node] if before else [node]

    def _read_arguments(self, node: Node) -> dict[str, Any]:
        """Return the arguments of an op by their names, with tensors of the file for integers."""
        values, names = node["args"], SIGNATURES.get(kind_of(node), "").split()
        if not names:  # sizes in a list, or one after the other
            values, names = [values[0], values[1:]], ["input", "sizes"]
            values[1] = values[1][0] if values[1] and isinstance(values[1][0], list) else values[1]
        named = {**node.get("arguments", {}), **dict(zip(names, values, strict=False)), **node.get("kwargs", {})}
        tensors = {**named, **node.get("tensors", {})}
        if "weight" in tensors:
            named["layer"] = self._read_layer(tensors["weight"], tensors.get("bias"))
        return {key: self._read(value) for key, value in named.items() if key not in ("weight", "bias")}

    def _read(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._read(each) for each in value]
        if not isinstance(value, dict):
            return value
        if value.get("node") not in self._integers:
            raise Declined(f"an operand that is no quantized tensor: {value}")
        return self._integers[value["node"]]

    def _read_layer(self, weight: Node, bias: Node | None) -> Layer:
        about = self._constants.get(weight.get("node", ""), weight)
        if about.get("dtype") != "int8" or about.get("axis") not in (None, 0):
            raise Declined("a weight that is no constant of int8 with scales along its first axis")
        real = None if bias is None else self._weights[bias["tensor"]]
        return Layer(self._weights[about["tensor"]], read_grid(about, self._weights), real)


class Program:
    """A model, loaded."""

    def __init__(self, model: Model, kernels: str, threads: int) -> None:
        self._interpreter = Interpreter(
            model_content=model.data, num_threads=threads, experimental_op_resolver_type=RESOLVERS[kernels]
        )
        self._interpreter.allocate_tensors()
        self._grids = model.grids
        self.lines = [f"{name} ({', '.join(names)})" for name, names in model.kernels.items()]
        self.kernels = [op["op_name"] for op in self._interpreter._get_ops_details()]

    def run(self, inputs: Sequence[tuple[Array, bool]]) -> list[Array]:
        """Return the integers that it makes of inputs, which are integers or values to be rounded to their grids."""
        for detail, grid, (array, is_integer) in zip(
            self._interpreter.get_input_details(), self._grids, inputs, strict=True
        ):
            self._interpreter.set_tensor(detail["index"], array if is_integer else quantize(array, grid))
        self._interpreter.invoke()
        return [self._interpreter.get_tensor(detail["index"]) for detail in self._interpreter.get_output_details()]


def quantize(array: Array, grid: Grid | None) -> Array:
    """Round values to integers, as a graph's quantize does."""
    assert grid is not None
    if not np.isfinite(array).all():
        raise Declined("an input that is not finite")
    integers: Array = np.clip(np.rint(array / grid.scale) + grid.zero_point, -128, 127).astype(np.int8)
    return integers


def run_case(device: Path, case: Node, folder: Path, kernels: str) -> None:
    """Run a case, and write what is to be handed in."""
    graph = json.loads((device / case["model"]["json"]).read_text())
    weights, arrays = np.load(device / case["model"]["weights"]), np.load(device / case["inputs"])
    programs, outputs, status = dict[str, Program](), dict[str, Array](), dict[str, Any]()
    for number, run in enumerate(case["runs"]):
        shapes, threads = [operand["shape"] for operand in run["inputs"]], run["threads"]
        inputs = [(arrays[operand["array"]], operand["holds"] == "integers") for operand in run["inputs"]]
        key = json.dumps([shapes, threads])
        try:
            if key not in programs:
                programs[key] = Program(Model(graph, weights, shapes), kernels, threads)
            made = programs[key].run(inputs)
        except (Declined, RuntimeError) as error:
            kind = "refused" if isinstance(error, Declined) else "raised"
            status[str(number)] = {"status": kind, "reason": str(error)}
        else:
            outputs.update({f"r{number}_o{place}": value for place, value in enumerate(made)})
    folder.mkdir(parents=True)
    np.savez(folder / "outputs.npz", allow_pickle=False, **outputs)
    for program in list(programs.values())[:1]:
        executed = {"quantized_ops": program.lines, "float_fallbacks": [], "kernels": program.kernels}
        write(folder / "execution.json", executed)
    if len(status) == len(case["runs"]) and len({each["status"] for each in status.values()}) == 1:
        write(folder / "status.json", status["0"])
    elif status:
        write(folder / "status.json", {"runs": status})


def write(file: Path, data: Any) -> None:
    """Write a file of JSON."""
    file.write_text(json.dumps(data))


def main() -> None:
    """Run all cases of a bundle."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("outputs", type=Path)
    parser.add_argument("--kernels", choices=RESOLVERS, default="xnnpack")
    options = parser.parse_args()
    for row in json.loads((options.bundle / "manifest.json").read_text())["cases"]:
        case = json.loads((options.bundle / row["file"]).read_text())
        run_case(options.bundle, case, options.outputs / row["case"], options.kernels)


if __name__ == "__main__":
    main()
