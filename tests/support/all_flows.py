"""Run as a script: every flow of refimpl on one small model; prints a digest of each output, and who registered ops."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl.observers.decomposed import REGISTRAR
from fx_quant_conformance.refimpl.observers.default_qconfigs import default_dynamic_qconfig

FLOWS = {"ptq": "get_default_qconfig", "qat": "get_default_qat_qconfig", "dynamic": ""}


class Net(nn.Module):
    """A convolution, a batch norm, a residual sum, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.norm(self.conv(x))) + x
        return self.fc(y.mean((2, 3)))


def digest(value: Any) -> str:
    """The bits of a tensor, as a digest."""
    tensor = value.dequantize() if value.is_quantized else value
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


def run(flow: str) -> dict[str, str]:
    """Prepare, calibrate, and convert to each form that the flow has; the digest of what each gives."""
    torch.manual_seed(7)
    torch.backends.quantized.engine = "fbgemm"
    net, x = Net().train(flow == "qat"), torch.randn(2, 3, 8, 8)
    prepare = refimpl.prepare_qat_fx if flow == "qat" else refimpl.prepare_fx
    if flow == "dynamic":
        mapping = refimpl.QConfigMapping().set_object_type(nn.Linear, default_dynamic_qconfig)
    else:
        mapping = getattr(refimpl, f"{FLOWS[flow]}_mapping")("fbgemm")
    prepared = prepare(net, mapping, (x,))
    prepared(x)
    prepared.eval()
    forms: dict[str, Callable[..., Any]] = {
        "reference": refimpl.convert_to_reference_fx,
        "decomposed": refimpl.convert_to_reference_decomposed_fx,
        "lowered": refimpl.convert_fx,
    }
    with torch.no_grad():
        return {form: digest(convert(prepared)(x)) for form, convert in forms.items()}


if __name__ == "__main__":
    left = sorted(name for name in sys.modules if name.startswith("torch.ao.quantization"))
    print(json.dumps({"outputs": {flow: run(flow) for flow in FLOWS}, "registrar": REGISTRAR, "left": left}))
