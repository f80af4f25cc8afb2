"""torch: a quantized convolution that is saved as a module cannot be loaded; a quantized linear layer can."""

# finding: 109
# engine: all
# claimed: a lowered model with a convolution, saved as a whole
# fault of: module (`nnq.Conv1d` to `nnq.ConvTranspose3d`)
# largest error: raises when it is loaded
# cpu: all
# claims: none: no claim of a backend is made with it

import io
import warnings
from typing import Any

import torch
from torch import nn

warnings.simplefilter("ignore")
from torch.ao.quantization import get_default_qconfig_mapping  # noqa: E402
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx  # noqa: E402

torch.backends.quantized.engine = torch.backends.quantized.supported_engines[-1]
CASES = {"linear": (nn.Linear(4, 4), torch.ones(2, 4)), "conv2d": (nn.Conv2d(4, 4, 1), torch.ones(2, 4, 3, 3))}


def load(saved: io.BytesIO) -> Any:
    saved.seek(0)
    return torch.load(saved, weights_only=False)


shown = {}
for name, (layer, x) in CASES.items():
    prepared = prepare_fx(nn.Sequential(layer).eval(), get_default_qconfig_mapping("x86"), (x,))
    prepared(x)
    quantized, saved = convert_fx(prepared), io.BytesIO()
    torch.save(quantized, saved)
    try:
        found = "the same values" if torch.equal(load(saved)(x), quantized(x)) else "other values"
    except AttributeError as error:
        found = f"AttributeError: {error}"
    shown[name] = found != "the same values"
    print(f"{name}: found {found}; right the same values")
print("the fault shows" if shown["conv2d"] else "the fault does not show with this version")
raise SystemExit(not shown["conv2d"])
