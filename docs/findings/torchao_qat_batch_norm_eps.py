"""torchao: prepare_qat_pt2e gives the batch norm behind a convolution the default eps, momentum and mode."""

# finding: 78
# engine: torchao
# claimed: QAT of a convolution with a batch norm: eps, momentum and mode are those of the model
# fault of: prepare, convert (`qat_utils.py`)
# largest error: 73 % of the output's range
# cpu: all
# claims: none: no claim of a backend is made with it

import copy

import torch
from torch import nn
from torchao.quantization.pt2e import move_exported_model_to_eval
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)


def try_out(eps: float, momentum: float) -> tuple[bool, float]:
    """Return whether eps and momentum are kept, and the converted model's error, in parts of the float one's range."""
    torch.manual_seed(0)
    model = nn.Sequential(layer := nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps, momentum)).train()
    batches = [torch.randn(8, 3, 8, 8) for _ in range(50)]
    layer.weight.data *= 0.2  # a variance of about 0.01, beside which eps counts
    for x in batches:  # quantization aware training begins with a model that is trained
        model(x)
    program = torch.export.export(copy.deepcopy(model), (batches[0],)).module()
    config = get_default_x86_inductor_quantization_config(is_qat=True)
    prepared = prepare_qat_pt2e(program, X86InductorQuantizer().set_global(config))
    (norm,) = (node for node in prepared.graph.nodes if node.target == torch.ops.aten.batch_norm.default)
    *_, momentum_found, eps_found, _ = norm.args
    for x in batches:
        model(x)
        prepared(x)
    converted = move_exported_model_to_eval(convert_pt2e(prepared))
    right, found = model.eval()(batches[0]), converted(batches[0])
    off = float((found - right).abs().max() / (right.max() - right.min()))
    print(
        f"eps {eps}, momentum {momentum}: prepared with {eps_found}, {momentum_found}; "
        f"the converted model is off by {off:.1%} of its range"
    )
    return (eps_found, momentum_found) == (eps, momentum), off


def stays_frozen() -> bool:
    """Tell whether a batch norm that is in eval mode while the model is trained stays so."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    model[1].eval()
    program = torch.export.export(model, (torch.randn(8, 3, 8, 8),)).module()
    config = get_default_x86_inductor_quantization_config(is_qat=True)
    prepared = prepare_qat_pt2e(program, X86InductorQuantizer().set_global(config))
    (norm,) = (node for node in prepared.graph.nodes if node.target == torch.ops.aten.batch_norm.default)
    print(f"a batch norm in eval mode: prepared with training={norm.args[5]}")
    return norm.args[5] is False


is_kept, rounding = try_out(eps=1e-5, momentum=0.1)
is_kept_too, off = try_out(eps=0.0625, momentum=0.3)
shown = is_kept and not is_kept_too and off > 4 * rounding and not stays_frozen()
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
