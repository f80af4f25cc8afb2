"""torch's fuser folds a batch norm wrongly into a transposed convolution of several groups, or raises."""

# finding: 113
# engine: torch
# claimed: a transposed convolution of several groups, then a batch norm, by torch's own fuser method
# fault of: the lowering (`fuse_conv_bn_weights`)
# largest error: raises
# cpu: all
# claims: none: the native configs of the suite fuse by refimpl's own method

import warnings

import torch
from torch import nn
from torch.ao.quantization.quantize_fx import fuse_fx

warnings.simplefilter("ignore")  # that torch.ao is about to be removed


def try_out(channels_in: int, channels_out: int, groups: int) -> bool:
    """Tell whether the fused model computes what the float model does."""
    torch.manual_seed(0)
    layer, norm = nn.ConvTranspose2d(channels_in, channels_out, 2, groups=groups), nn.BatchNorm2d(channels_out)
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    model, x = nn.Sequential(layer, norm).eval(), torch.randn(2, channels_in, 4, 4)
    try:
        with torch.no_grad():
            is_right = torch.allclose(fuse_fx(model)(x), model(x), atol=1e-5)
        result = "the same" if is_right else "another result"
    except RuntimeError as error:
        is_right, result = False, f"RuntimeError: {str(error)[:110]}"
    print(f"ConvTranspose2d({channels_in}, {channels_out}, 2, groups={groups}) and BatchNorm2d: {result}")
    return is_right


is_right = [try_out(4, 4, 1), try_out(4, 4, 2), try_out(4, 4, 4), try_out(2, 4, 2)]
shown = is_right == [True, False, False, False]
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
