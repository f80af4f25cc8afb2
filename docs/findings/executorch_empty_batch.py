"""ExecuTorch's XNNPACK delegate: an empty batch ends the process, or gets a shape out of thin air."""

# finding: 59
# engine: executorch
# claimed: a batch of no rows
# fault of: runtime
# largest error: aborts, or any shape
# cpu: all
# claims: none: the backend refuses it itself

import subprocess
import sys

import executorch.kernels.quantized  # noqa: F401
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime
from torch import nn
from torch.export import Dim, export

if len(sys.argv) > 1:
    x = torch.zeros(2, 3, 6, 6)
    program = export(nn.Conv2d(3, 4, 3).eval(), (x,), dynamic_shapes=({0: Dim("batch", min=0, max=8)},))
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch()
    method = Runtime.get().load_program(lowered.buffer).load_method("forward")
    assert method is not None and tuple(method.execute([x[:1]])[0].shape) == (1, 4, 4, 4)
    print(tuple(method.execute([x[:0]])[0].shape), flush=True)
    raise SystemExit

done = subprocess.run([sys.executable, __file__, "child"], capture_output=True, text=True, check=False)
found = done.stdout.strip().splitlines()[-1:] if done.returncode == 0 else []
right = ["(0, 4, 4, 4)"]
print(f"no rows of a convolution: exit code {done.returncode}, shape {found or 'none'}, right is {right}")
print("the fault shows" if found != right else "the fault does not show with this version")
raise SystemExit(found == right)
