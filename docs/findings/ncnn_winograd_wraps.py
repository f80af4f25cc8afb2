"""ncnn: an int8 convolution by Winograd's algorithm overflows where its channels are many and its values large."""

# finding: 120
# engine: ncnn
# claimed: 3×3 convolutions of stride 1, with values over the whole range
# fault of: kernel
# largest error: 254 LSB
# cpu: seen on AVX2
# claims: `nn.Conv2d*/*`, `nni.ConvReLU2d/*`, `nniqat.Conv*2d/*`, `nnqat.Conv2d/*`
# reason: a 3×3 convolution by Winograd's algorithm overflows

import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import ncnn
import numpy as np

CHANNELS, LARGEST = 65, 127


def convolve(*, by_winograd: bool) -> float:
    """Return the middle of a 3×3 convolution of a 6×6 image, all of 127, with weights of 127, in steps of its sum."""
    count = CHANNELS * CHANNELS * 9
    integers = struct.pack("<I", 0x000D4B38) + bytes([LARGEST]) * count + bytes(-count % 4)
    scales = struct.pack(f"<{CHANNELS + 1}f", *[1.0] * (CHANNELS + 1))  # of the weights, and of the input
    net = ncnn.Net()
    net.opt.num_threads, net.opt.use_winograd_convolution = 1, by_winograd
    with TemporaryDirectory() as folder:
        param, weights = Path(folder) / "param", Path(folder) / "bin"
        layer = f"Convolution conv 1 1 in out 0={CHANNELS} 1=3 6={count} 8=1"
        param.write_text(f"7767517\n2 2\nInput in 0 1 in\n{layer}\n")
        weights.write_bytes(integers + scales)
        assert net.load_param(str(param)) == 0 == net.load_model(str(weights))
        image = np.full((CHANNELS, 6, 6), float(LARGEST), dtype=np.float32)
        extractor = net.create_extractor()
        extractor.input("in", ncnn.Mat(image).clone())
        _, out = extractor.extract("out")
        found = float(np.array(out)[0, 1, 1])
        del out  # before the extractor, whose memory it is in
    return found


right = CHANNELS * 9 * LARGEST * LARGEST
found = {by_winograd: convolve(by_winograd=by_winograd) for by_winograd in (True, False)}
print(f"sum of {CHANNELS * 9} products of 127 and 127: {right}; by Winograd {found[True]:.0f}, else {found[False]:.0f}")
shown = abs(found[False] / right - 1) < 1e-6 < 0.1 < abs(found[True] / right - 1)
print("the fault shows" if shown else "the fault does not show")
raise SystemExit(not shown)
