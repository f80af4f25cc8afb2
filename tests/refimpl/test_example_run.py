"""What one run of the example inputs tells, and what follows where it ends too early (FUS-06, OBS-15)."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from fusing import config_of
from torch import Tensor, nn

from refimpl import BackendPatternConfig
from refimpl.example_run import Examples, Seen
from refimpl.fuse import fuse
from refimpl.tracing import Draft, trace


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.relu = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return cast(Tensor, self.relu(self.fc(x))).flatten().masked_fill(mask.unsqueeze(0), 0.0)


X, MASK = torch.ones(2, 4), torch.zeros(8, dtype=torch.bool)
FLOAT, BOOL = torch.float32, torch.bool


def facts(draft: Draft, examples: Examples) -> dict[str, Seen]:
    return {node.name: examples.seen[node] for node in draft.graph.nodes if node in examples.seen}


@pytest.mark.rule("OBS-15")
@pytest.mark.parametrize("is_train", [False, True])
def test_every_tensor_has_its_rank_and_dtype_in_either_mode(is_train: bool) -> None:
    draft = trace(Masked().train(is_train))
    examples = Examples(draft, (X, MASK))
    assert facts(draft, examples) == {
        "x": Seen(2, FLOAT), "mask": Seen(1, BOOL), "fc": Seen(2, FLOAT), "relu": Seen(2, FLOAT),
        "flatten": Seen(1, FLOAT), "unsqueeze": Seen(2, BOOL), "masked_fill": Seen(2, FLOAT), "output": Seen(2, FLOAT),
    }  # fmt: skip
    assert examples.failure == ""


@pytest.mark.rule("OBS-15")
@pytest.mark.parametrize("is_train", [False, True])
def test_what_was_reached_before_the_run_ended_is_kept(is_train: bool) -> None:
    draft = trace(Masked().train(is_train))
    examples = Examples(draft, (X, None))
    assert list(facts(draft, examples)) == ["x", "fc", "relu", "flatten"]
    assert examples.failure.startswith("%unsqueeze : [num_users=1] = call_method[target=unsqueeze]")
    assert "AttributeError" in examples.failure
    assert not Examples(draft, None).are_given and not Examples(draft, None).seen


@pytest.mark.rule("OBS-15")
def test_it_is_run_once_and_a_fused_module_stands_for_its_last_part() -> None:
    calls: list[int] = []
    linear = nn.Linear(4, 4)
    linear.register_forward_hook(lambda *_: calls.append(1))
    draft = trace(nn.Sequential(linear, nn.Flatten()).eval())
    examples = Examples(draft, (torch.ones(2, 3, 4),))
    last = next(node for node in draft.graph.nodes if node.target == "1")
    entry = BackendPatternConfig((nn.Linear, nn.Flatten)).set_fuser_method(lambda is_qat, *parts: nn.Sequential(*parts))
    fuse(draft, config_of(entry), is_qat=False, examples=examples)
    assert facts(draft, examples) == {"input_1": Seen(3, FLOAT), "_0": Seen(2, FLOAT), "output": Seen(2, FLOAT)}
    assert last not in examples.seen and len(calls) == 1
