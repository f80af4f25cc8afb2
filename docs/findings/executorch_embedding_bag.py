"""ExecuTorch: a program with an EmbeddingBag lowers and cannot be loaded: the runtime has no kernel for it."""

# finding: 67
# engine: executorch
# claimed: a model with an EmbeddingBag in float
# fault of: runtime's kernels
# largest error: raises
# cpu: all
# claims: none; the model dlrm
# reason: the runtime has no kernel for EmbeddingBag

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.runtime import Runtime
from torch import nn


def outcome(model: nn.Module) -> str:
    """Print and give what becomes of it: "loaded", or the error."""
    tokens = torch.tensor([[1, 2, 4], [3, 0, 1]])
    program = torch.export.export(model.eval(), (tokens,))
    config = EdgeCompileConfig(_check_ir_validity=False)
    edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], compile_config=config)
    buffer = edge.to_executorch().buffer
    try:
        Runtime.get().load_program(buffer).load_method("forward")
        told = "loaded"
    except RuntimeError as error:
        told = str(error)
    print(f"{model}: {told}")
    return told


found = [outcome(nn.Embedding(5, 4)), outcome(nn.EmbeddingBag(5, 4, mode="sum"))]
shown = found[0] == "loaded" and "0x:14" in found[1]  # operator missing
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
