"""fbgemm: a depthwise convolution saturates int16 sums of two products when activations use all 8 bits."""

import torch
import torch.nn.functional as F

torch.backends.quantized.engine = "fbgemm"


def worst(groups: int, high: int, largest_weight: int) -> float:
    """Largest distance, in steps of the output's scale, from the exact result of the same integers."""
    torch.manual_seed(0)
    x = torch.randint(0, high + 1, (1, groups, 6, 6)).double()
    w = torch.randint(-largest_weight, largest_weight + 1, (groups, 1, 3, 3)).double()
    exact = F.conv2d(x, w, padding=1, groups=groups)
    scale = float(exact.abs().max()) / 100
    packed = torch.ops.quantized.conv2d_prepack(
        torch.quantize_per_tensor(w.float(), 1.0, 0, torch.qint8), None, [1, 1], [1, 1], [1, 1], groups
    )
    quantized_x = torch.quantize_per_tensor(x.float(), 1.0, 0, torch.quint8)
    found = torch.ops.quantized.conv2d(quantized_x, packed, scale, 128).int_repr()
    return float((found - (exact / scale + 128).clamp(0, 255)).abs().max())


for groups in (8, 4):
    for high, weight in ((255, 127), (127, 127), (255, 63)):
        print(f"groups={groups} activations 0..{high} weights ±{weight}: {worst(groups, high, weight):6.2f} LSB")
assert worst(8, 255, 127) > 1, "the finding no longer holds"
assert worst(8, 127, 127) <= 0.5 + 1e-4, "half the activations' range no longer avoids it"
