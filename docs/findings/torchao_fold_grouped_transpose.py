"""torchao: prepare_pt2e cannot fold a batch norm into a transposed convolution of several groups, and raises."""

# finding: 98
# engine: torchao
# claimed: a transposed convolution of several groups, then a batch norm
# fault of: prepare (`utils.py`)
# largest error: raises
# cpu: all
# claims: none: no claim of a backend is made with it

import torch
from torch import nn
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer import ComposableQuantizer


def try_out(channels_in: int, channels_out: int, groups: int) -> bool:
    """Tell whether a float model, of which nothing is annotated, is the same when it is prepared."""
    torch.manual_seed(0)
    layer, norm = nn.ConvTranspose2d(channels_in, channels_out, 2, groups=groups), nn.BatchNorm2d(channels_out)
    model, x = nn.Sequential(layer, norm).eval(), torch.randn(2, channels_in, 4, 4)
    try:
        with torch.no_grad():
            prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), ComposableQuantizer([]))
            is_right = torch.allclose(prepared(x), model(x), atol=1e-5)
        result = "the same" if is_right else "another result"
    except RuntimeError as error:
        is_right, result = False, f"RuntimeError: {str(error)[:110]}"
    print(f"ConvTranspose2d({channels_in}, {channels_out}, 2, groups={groups}) and BatchNorm2d: {result}")
    return is_right


is_right = [try_out(4, 4, 1), try_out(4, 4, 2), try_out(4, 4, 4), try_out(2, 4, 2)]
shown = is_right == [True, False, False, False]
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
