"""torch: FusedMovingAvgObsFakeQuantize, symmetric: a model is trained on other qparams than it is converted with."""

# finding: 72
# engine: torch
# claimed: symmetric fused fake quantizes: what is trained is what is converted
# fault of: training (`FusedMovingAvgObsFakeQuantize`)
# largest error: another scale, another zero point
# cpu: all
# claims: none: a model is converted by its observer

import torch
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize, MovingAverageMinMaxObserver

shown = []
for values in ([-1.0, 0.5], [0.5, 1.0]):
    fused = FusedMovingAvgObsFakeQuantize(
        MovingAverageMinMaxObserver,
        quant_min=-128,
        quant_max=127,
        dtype=torch.qint8,
        qscheme=torch.per_tensor_symmetric,
    )
    fused(torch.tensor(values))
    trained = float(fused.scale), int(fused.zero_point)
    scale, zero_point = fused.calculate_qparams()
    converted = float(scale), int(zero_point)
    print(f"range of {values}: trained with scale, zero point {trained}, converted with {converted}")
    shown.append(abs(trained[0] / converted[0] - 1) > 1e-3)
print("the fault shows" if all(shown) else "the fault does not show with this version")
raise SystemExit(not all(shown))
