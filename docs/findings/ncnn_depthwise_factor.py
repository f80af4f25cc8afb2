"""ncnn: a depthwise convolution of 8 channels, or a multiple, is rescaled by an approximate factor."""

# finding: 121
# engine: ncnn
# claimed: depthwise convolutions whose channels are a multiple of 8
# fault of: kernel
# largest error: 0.51 LSB
# cpu: seen on AVX2
# claims: `nn.Conv2d*/*`, `nni.ConvReLU2d/*`, `nniqat.Conv*2d/*`, `nnqat.Conv2d/*`
# reason: the factor of a depthwise convolution of 8, 16, … channels is off by 2^-13.5

import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import ncnn
import numpy as np

SCALE = 1 / np.float32(0.000972)


def convolve(channels: int) -> float:
    """Return by how much the result of 100 · 100 with a kernel of one pixel is off, as a share of it."""
    integers = struct.pack("<I", 0x000D4B38) + bytes([100]) * channels + bytes(-channels % 4)
    scales = struct.pack(f"<{channels}f", *[SCALE] * channels) + struct.pack("<f", 1.0)
    net = ncnn.Net()
    net.opt.num_threads = 1
    with TemporaryDirectory() as folder:
        param, weights = Path(folder) / "param", Path(folder) / "bin"
        layer = f"ConvolutionDepthWise conv 1 1 in out 0={channels} 1=1 6={channels} 7={channels} 8=1"
        param.write_text(f"7767517\n2 2\nInput in 0 1 in\n{layer}\n")
        weights.write_bytes(integers + scales)
        assert net.load_param(str(param)) == 0 == net.load_model(str(weights))
        extractor = net.create_extractor()
        image = np.full((channels, 2, 2), 100.0, dtype=np.float32)
        extractor.input("in", ncnn.Mat(image).clone())
        _, out = extractor.extract("out")
        found = float(np.array(out)[0, 0, 0])
        del out  # before the extractor, whose memory it is in
    return abs(found * float(SCALE) / 10000 - 1)


found = {channels: convolve(channels) for channels in (3, 7, 8, 16)}
print(f"error of the result, by the number of channels: {found}")
shown = max(found[3], found[7]) < 1e-6 and min(found[8], found[16]) > 1e-5
print("the fault shows" if shown else "the fault does not show")
raise SystemExit(not shown)
