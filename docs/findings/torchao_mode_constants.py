"""torchao: eval() and train() of an exported program give batch norms and dropouts the default constants."""

# finding: 108
# engine: torchao
# claimed: `eval()` and `train()` of an exported program
# fault of: `export_utils.py`
# largest error: another eps, momentum and p
# cpu: all
# claims: none: no claim of a backend is made with it

from typing import Any

import torch
from torch import nn
from torchao.quantization.pt2e import allow_exported_model_train_eval


def spell(program: Any) -> list[str]:
    """Return the batch norms and dropouts of a program, with their numbers: mode, momentum and eps; p and mode."""
    return [
        f"{str(node.target).split('.')[1]}{tuple(value for value in node.args if isinstance(value, (int, float)))}"
        for node in program.graph.nodes
        if "batch_norm" in str(node.target) or "dropout" in str(node.target)
    ]


def try_out(what: str, model: nn.Module) -> tuple[list[str], list[str]]:
    """Return the ops of a program as it was exported, and after eval() and train()."""
    program = allow_exported_model_train_eval(torch.export.export(model, (torch.randn(8, 4, 2, 2),)).module())
    before = spell(program)
    program.eval()
    between = spell(program)
    program.train()
    print(f"{what}: {', '.join(before)}; eval(): {', '.join(between)}; train(): {', '.join(spell(program))}")
    return before, spell(program)


frozen = nn.Sequential(nn.BatchNorm2d(4)).train()
frozen[0].eval()
pairs = [
    try_out("defaults", nn.Sequential(nn.BatchNorm2d(4), nn.Dropout()).train()),
    try_out("others", nn.Sequential(nn.BatchNorm2d(4, eps=1e-3, momentum=0.03), nn.Dropout(0.1)).train()),
    try_out("a frozen norm", frozen),
]
try_out("by channels", nn.Sequential(nn.Dropout2d()).train())  # as torchao documents it
is_kept = [before == after for before, after in pairs]
shown = is_kept == [True, False, False]
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
