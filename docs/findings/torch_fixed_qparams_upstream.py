"""torch: the fixed qparams of sigmoid's output are put at its input too, and spread to what is concatenated with it."""

# finding: 73
# engine: torch
# claimed: sigmoid, tanh, softmax and the like on a value that nothing observes, or in one `cat` with others, under
#   the default mapping
# fault of: prepare
# largest error: the value is clipped to 0…1
# cpu: all
# claims: none: the suite gives inputs an observer of their own

import warnings

import torch
from torch import Tensor, nn

warnings.simplefilter("ignore")
from torch.ao.quantization import get_default_qconfig_mapping  # noqa: E402
from torch.ao.quantization.quantize_fx import convert_to_reference_fx, prepare_fx  # noqa: E402


class Alone(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Identity(), nn.Linear(1, 1)
        self.b.weight.data.fill_(1.0)
        self.b.bias.data.fill_(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.sigmoid(self.a(x)), self.b(x)], 1)


x = torch.tensor([[-4.0], [4.0]])
shown = []
for model in (Alone().eval(), Joined().eval()):
    prepared = prepare_fx(model, get_default_qconfig_mapping("qnnpack"), (x,))
    prepared(x)
    found, right = convert_to_reference_fx(prepared)(x), model(x)
    print(f"{type(model).__name__}: found {found.tolist()} right {right.tolist()}")
    shown.append(float((found - right).abs().max()) > 0.2)
print("the fault shows" if all(shown) else "the fault does not show with this version")
raise SystemExit(not all(shown))
