"""All engines: instance norm with running statistics writes to them in evaluation, rounded.

The engines leave the module in float. It repeats its statistics for each image of the batch, and puts the mean of the
copies back, in evaluation too. In float32 that mean is another number: each run moves the next run's output.
"""

# finding: 112
# engine: all
# claimed: instance norm with `track_running_stats=True`
# fault of: torch's float op
# largest error: an output of one run is 1 LSB off in the next
# cpu: torch 2.6 to 2.10, all
# claims: `nn.InstanceNorm?d/*`, PTQ
# reason: instance norm in evaluation writes rounded means to its running statistics

from typing import Any

import torch

NEEDS_ANOTHER_BUILD = 77

if [int(number) for number in torch.__version__.split(".")[:2]] >= [2, 11]:
    print(f"torch {torch.__version__} leaves the statistics as they are; those of 2.6 to 2.10 do not")
    raise SystemExit(NEEDS_ANOTHER_BUILD)
torch.manual_seed(0)
norm: Any = torch.nn.InstanceNorm1d(4, track_running_stats=True).eval()
norm.running_mean.normal_()
norm.running_var.uniform_(0.5, 2.0)
before = norm.running_mean.clone(), norm.running_var.clone()
x = torch.randn(7, 4, 9)
with torch.no_grad():
    first = norm(x)
    for _ in range(50):
        norm(torch.randn(7, 4, 9))
    again = norm(x)
after = norm.running_mean, norm.running_var
changes = [float((now - then).abs().max()) for now, then in zip(after, before, strict=True)]
print(f"after 51 runs in evaluation the running mean is {changes[0]:.3g} off, the running variance {changes[1]:.3g}")
print(f"the same input gives outputs that differ by {float((again - first).abs().max()):.3g}")
if not all(changes):
    print("the fault does not show")
    raise SystemExit(1)
print("the fault shows")
