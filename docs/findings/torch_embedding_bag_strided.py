"""All engines: EmbeddingBag reads per_sample_weights that are not contiguous as if they were."""

# finding: 38
# engine: all
# claimed: EmbeddingBag with per_sample_weights that are not contiguous
# fault of: kernel
# largest error: as large as the values
# cpu: all
# claims: `nn.EmbeddingBag/*`, `nnqat.EmbeddingBag/*`
# reason: per_sample_weights with strides are read in another order

import torch

ops = torch.ops.quantized
torch.manual_seed(0)
table = torch.randn(5, 8)
indices, offsets = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 2])
strided = torch.rand(8)[::2]
largest = 0.0
for bits, prepack, lookup in (
    (8, ops.embedding_bag_byte_prepack, ops.embedding_bag_byte_rowwise_offsets),
    (4, ops.embedding_bag_4bit_prepack, ops.embedding_bag_4bit_rowwise_offsets),
):
    packed = prepack(table)
    found, right = (
        lookup(packed, indices, offsets, False, 0, False, weights, None, False)
        for weights in (strided, strided.contiguous())
    )
    error = float((found - right).abs().max())
    print(f"{bits} bits: {error:.3f} from the result for equal weights; values up to {right.abs().max():.3f}")
    largest = max(largest, error)
print("the fault shows" if largest > 0.01 else "the fault does not show with this torch on this machine")
raise SystemExit(largest <= 0.01)
