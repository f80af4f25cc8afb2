"""torch: prepare_qat_fx registers a layer's parametrization again, which gives the user's own layer another weight."""

# finding: 110
# engine: torch
# claimed: QAT of a parametrized linear layer: the weight is the model's
# fault of: prepare (`nnqat.Linear.from_float`)
# largest error: another weight, also in the user's model
# cpu: all
# claims: none: no claim of a backend is made with it

import copy
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, weight_norm

warnings.simplefilter("ignore")
from torch.ao.quantization import get_default_qat_qconfig_mapping  # noqa: E402
from torch.ao.quantization.quantize_fx import prepare_qat_fx  # noqa: E402

torch.manual_seed(0)
shown = {}
for parametrize in (weight_norm, orthogonal):
    model: Any = nn.Sequential(parametrize(nn.Linear(4, 4))).eval()
    right = copy.deepcopy(model)[0].weight.detach()
    prepared: Any = prepare_qat_fx(model.train(), get_default_qat_qconfig_mapping("x86"), (torch.ones(2, 4),))
    found = {"prepared model": prepared.get_submodule("0"), "user's model": model[0]}
    errors = {name: float((layer.eval().weight - right).detach().abs().max()) for name, layer in found.items()}
    shown[parametrize.__name__] = max(errors.values()) > 0.1
    text = ", ".join(f"{error:.2f} in the {name}" for name, error in errors.items())
    print(f"{parametrize.__name__}: found the weight changed by {text}")
print("right: changed by 0")
print("the fault shows" if shown["orthogonal"] else "the fault does not show with this version")
raise SystemExit(not shown["orthogonal"])
