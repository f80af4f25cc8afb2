"""onednn, x86: a convolution whose kernel, stride and image are equally wide is wrong on a CPU with VNNI."""

# finding: 133
# engine: onednn, x86; pt2e-x86
# claimed: convolutions whose kernel is as wide as stride and image, of 16 to 48 input channels
# fault of: kernel
# largest error: 211 LSB
# cpu: AVX-512 VNNI
# claims: none has such a case; the models of Segformer
# reason: one output column by a stride as wide as the kernel

import torch
import torch.nn.functional as F

if not torch.cpu._is_vnni_supported() or not torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported():
    print("this CPU has not AVX-512 VNNI alone: another kernel is taken")
    raise SystemExit(77)
torch.set_num_threads(1)


def worst(engine: str, channels: int, kernel: tuple[int, int], width: int, stride: int) -> float:
    """Largest distance, in steps of the output's scale, from the exact result of the same integers."""
    torch.backends.quantized.engine = engine
    torch.manual_seed(0)
    w = torch.randint(-127, 128, (32, channels, *kernel))
    x = torch.randint(0, 256, (1, channels, kernel[0], width))
    exact = F.conv2d(x.double() - 128, w.double(), stride=(1, stride))
    scale = float(exact.abs().max()) / 120
    scales, zeros = torch.ones(32, dtype=torch.double), torch.zeros(32, dtype=torch.long)
    weight = torch._make_per_channel_quantized_tensor(w.to(torch.int8), scales, zeros, 0)
    packed = torch.ops.quantized.conv2d_prepack(weight, None, [1, stride], [0, 0], [1, 1], 1)
    image = torch._make_per_tensor_quantized_tensor(x.to(torch.uint8), 1.0, 128)
    found = torch.ops.quantized.conv2d(image, packed, scale, 128).int_repr()
    return float((found - (exact / scale + 128)).abs().max())


largest = 0.0
for channels, kernel in ((32, (1, 4)), (32, (4, 4)), (32, (8, 8)), (16, (8, 8)), (48, (8, 8)), (32, (6, 6))):
    errors = [worst(engine, channels, kernel, kernel[1], kernel[1]) for engine in ("onednn", "x86", "fbgemm")]
    largest = max(largest, *errors[:2])
    print(f"{channels} channels, kernel {kernel}, as wide as image and stride: ", end="")
    print("onednn {:.1f}, x86 {:.1f}, fbgemm {:.1f}".format(*errors))
right = max(
    worst("onednn", 32, (4, 4), 4, 1),  # another stride
    worst("onednn", 32, (4, 4), 8, 4),  # two columns
    worst("onednn", 32, (5, 5), 5, 5),  # an odd kernel
    worst("onednn", 64, (4, 4), 4, 4),  # channels that are not padded
)
print(f"stride 1, two columns, an odd kernel, 64 channels: at most {right:.1f}")
shown = largest > 100 and right < 0.6
print("the fault shows" if shown else "the fault does not show")
raise SystemExit(not shown)
