"""All engines: pools and interpolation of an image of 1x1 pixels give channels in the place of positions."""

# finding: 39
# engine: all; max_pool2d and avg_pool2d of qnnpack have kernels of their own
# claimed: pools, adaptive pools and interpolate of an image of 1×1 pixels, several channels, to more than one
# fault of: kernel
# largest error: 255 LSB
# cpu: all
# claims: `nn.*Pool?d/*`, `F.interpolate/*`
# reason: an image of one pixel is written channels first

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

warnings.simplefilter("ignore")
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "max_pool2d": lambda x: F.max_pool2d(x, 2, 1, 1),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2, 1, 1, count_include_pad=False),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 2),
    "interpolate": lambda x: F.interpolate(x, size=2),
}
wrong = []
for engine in sorted({"fbgemm", "onednn", "qnnpack"} & set(torch.backends.quantized.supported_engines)):
    torch.backends.quantized.engine = engine
    image = torch.tensor([1.0, 255.0]).reshape(1, 2, 1, 1)
    quantized = torch.quantize_per_tensor(image, 1.0, 0, torch.quint8)
    for name, call in CALLS.items():
        if (engine, name) == ("qnnpack", "avg_pool2d"):
            continue  # finding 3
        found, right = call(quantized), call(image)
        if not torch.equal(found.dequantize(), right):
            wrong.append(f"{engine} {name}")
            values = found.dequantize().flatten().tolist()
            print(f"{engine}: {name} gives {values}, right is {right.flatten().tolist()}; strides {found.stride()}")
    # Strides that say channels_last tell the two layouts apart, and all is right.
    same = torch.as_strided(quantized, quantized.shape, (2, 1, 2, 2))
    names = [name for name, call in CALLS.items() if torch.equal(call(same).dequantize(), call(image))]
    print(f"{engine}, with strides of channels_last right: {', '.join(names)}")
print("the fault shows" if wrong else "the fault does not show with this torch on this machine")
raise SystemExit(not wrong)
