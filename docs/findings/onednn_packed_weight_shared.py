"""onednn: one packed weight, called by linear and then by linear_dynamic with as many rows: the process dies.

It is as if the second op took the primitive that the first has cached. No module of torch shares a pack so.
"""

import subprocess
import sys

CHILD = """
import torch
torch.backends.quantized.engine = "onednn"
ops, x = torch.ops.quantized, torch.zeros(2, 4)
packed = ops.linear_prepack(torch.quantize_per_tensor(torch.ones(5, 4), 0.01, 0, torch.qint8), None)
ops.linear(torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), packed, 0.1, 0)
ops.linear_dynamic(torch.zeros({rows}, 4), packed, False)
"""
statuses = {}
for rows in (2, 3):
    command = (sys.executable, "-W", "ignore", "-c", CHILD.format(rows=rows))
    statuses[rows] = subprocess.run(command, capture_output=True, check=False).returncode
    print(f"linear of 2 rows, then linear_dynamic of {rows} rows: exit status {statuses[rows]}")
shown = statuses[2] < 0
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
