"""Run as a script: every flow of refimpl on small models; prints a digest of each output, and who registered ops."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl.observers.decomposed import REGISTRAR
from fx_quant_conformance.refimpl.observers.default_qconfigs import (
    default_dynamic_qconfig,
    float_qparams_weight_only_qconfig,
)


class Net(nn.Module):
    """A convolution, a batch norm, a residual sum, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.norm(self.conv(x))) + x
        return self.fc(y.mean((2, 3)))


class Layers(nn.Module):
    """Fused pairs and layers of each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Sequential(nn.Conv1d(3, 4, 3, padding_mode="reflect", padding=1), nn.BatchNorm1d(4), nn.ReLU())
        self.back = nn.ConvTranspose1d(4, 2, 3, stride=2)
        self.head = nn.Sequential(nn.Linear(2, 5), nn.ReLU())
        self.volume = nn.Sequential(nn.Conv3d(1, 2, 2), nn.ReLU())

    def forward(self, x: Tensor) -> Any:
        y = self.head(self.back(self.rows(x.flatten(2))).mean(2))
        return y, self.volume(x.unsqueeze(1))


class Recurrent(nn.Module):
    """Recurrent layers and cells, and linear ones."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.cell = nn.LSTM(8, 6, 2), nn.GRU(6, 5), nn.LSTMCell(5, 4)
        self.plain, self.head = nn.RNNCell(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        y = self.gru(self.lstm(x.flatten(0, 1))[0])[0]
        return self.head(self.plain(self.cell(y[:, 0])[0]))


class Tables(nn.Module):
    """Tables of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.bag = nn.Embedding(10, 4), nn.EmbeddingBag(10, 4, mode="sum")

    def forward(self, x: Tensor) -> Any:
        indices = x.flatten(1)[:, :6].abs().mul(3).long().clamp(0, 9)
        return self.one(indices).sum(1) + self.bag(indices)


FLOWS: Mapping[str, tuple[type[nn.Module], str]] = {
    "static": (Net, "ptq"),
    "static layers": (Layers, "ptq"),
    "trained": (Net, "qat"),
    "trained layers": (Layers, "qat"),
    "dynamic": (Net, "dynamic"),
    "recurrent": (Recurrent, "dynamic"),
    "tables": (Tables, "tables"),
}
DYNAMIC = (nn.Linear, nn.LSTM, nn.GRU, nn.LSTMCell, nn.RNNCell)


def mapping_of(flow: str) -> Any:
    """What is to be quantized."""
    if flow in ("ptq", "qat"):
        return getattr(refimpl, f"get_default_{'qat_' * (flow == 'qat')}qconfig_mapping")("fbgemm")
    kinds = DYNAMIC if flow == "dynamic" else (nn.Embedding, nn.EmbeddingBag)
    mapping = refimpl.QConfigMapping()
    for kind in kinds:
        mapping.set_object_type(
            kind, default_dynamic_qconfig if flow == "dynamic" else float_qparams_weight_only_qconfig
        )
    return mapping


def digest(value: Any) -> str:
    """The bits of tensors, as a digest."""
    tensors = value if isinstance(value, (tuple, list)) else [value]
    found = hashlib.sha256()
    for tensor in tensors:
        found.update((tensor.dequantize() if tensor.is_quantized else tensor).detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def run(name: str) -> dict[str, str]:
    """Prepare, calibrate, and convert to each form that the flow has; the digest of what each gives, or its error."""
    kind, flow = FLOWS[name]
    torch.manual_seed(7)
    net, x = kind().train(flow == "qat"), torch.randn(2, 3, 4, 8)
    prepare = refimpl.prepare_qat_fx if flow == "qat" else refimpl.prepare_fx
    prepared = prepare(net, mapping_of(flow), (x,))
    trained = prepared(x)
    if flow == "qat":
        sum(each.square().sum() for each in (trained if isinstance(trained, tuple) else (trained,))).backward()
        torch.optim.SGD(prepared.parameters(), 0.01).step()
        prepared(x)
    prepared.eval()

    def export(model: Any) -> Any:
        return refimpl.export_reference(refimpl.convert_to_reference_decomposed_fx(model), (x,)).module()

    forms: dict[str, Callable[..., Any]] = {
        "decomposed": refimpl.convert_to_reference_decomposed_fx,
        "exported": export,
        "quantized": refimpl.convert_to_reference_fx,
        "lowered": refimpl.convert_fx,
    }
    found = {}
    with torch.no_grad():
        for form, convert in forms.items():
            try:
                found[form] = digest(convert(prepared)(x))
            except refimpl.RefimplError as error:
                found[form] = str(error)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    if hasattr(torch.backends, "quantized"):
        torch.backends.quantized.engine = "fbgemm"
    left = sorted(name for name in sys.modules if name.startswith("torch.ao.quantization"))
    print(json.dumps({"outputs": {name: run(name) for name in FLOWS}, "registrar": REGISTRAR, "left": left}))
