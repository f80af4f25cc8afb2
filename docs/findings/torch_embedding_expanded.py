"""All engines: a quantized embedding refuses indices that are expanded, as positions and token types of BERT are."""

# finding: 130
# engine: all
# claimed: Embedding of indices that are not contiguous
# fault of: kernel
# largest error: raises
# cpu: all
# claims: `nn.Embedding/*`
# reason: indices that are not contiguous are refused

import torch

ops = torch.ops.quantized
weight = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
rows = torch.quantize_per_channel(weight, torch.full((5,), 0.02), torch.full((5,), 128.0), 0, torch.quint8)
table = ops.embedding_bag_prepack(rows)
expanded = torch.tensor([[0, 1, 2]]).expand(2, 3)
found = {}
for name, indices in {"expanded": expanded, "the same, contiguous": expanded.contiguous()}.items():
    try:
        found[name] = str(tuple(ops.embedding_byte(table, indices).shape))
    except RuntimeError as error:
        found[name] = str(error).partition("\n")[0]
print(found)
shown = "to be contiguous" in found["expanded"] and found["the same, contiguous"] == "(2, 3, 8)"
print("the fault shows" if shown else "the fault does not show with this torch")
raise SystemExit(not shown)
