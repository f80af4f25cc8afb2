"""Model sets: torchvision, timm and transformers, with random weights from a seed."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from fx_quant_conformance.conformance.own_models import sets
from fx_quant_conformance.conformance.own_models.given import ModelSpecError, load_given, settle
from fx_quant_conformance.conformance.own_models.sets import ModelSetError, expand


@pytest.mark.slow
def test_a_glob_stands_for_the_models_that_it_matches() -> None:
    assert expand("torchvision:resnet[13]?") == ("torchvision:resnet18", "torchvision:resnet34")
    assert {"timm:efficientnet_lite0", "timm:tf_efficientnet_lite0"} <= set(expand("timm:*lite*"))
    assert expand("torchvision:resnet18") == ("torchvision:resnet18",)
    assert expand("my_nets:make") == ("my_nets:make",)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["torchvision:mobilenet_v3_small", "timm:mobilenetv3_small_050"])
def test_a_model_is_the_same_for_the_same_seed(spec: str) -> None:
    first, again, other = (load_given(spec, seed) for seed in (1, 1, 2))
    states = [list(each.model.state_dict().values()) for each in (first, again, other)]
    assert all(map(torch.equal, states[0], states[1])) and not all(map(torch.equal, states[0], states[2]))
    assert torch.equal(first.example_inputs[0], again.example_inputs[0])
    assert not first.model.training and len(first.calibration) == sets.BATCHES


@pytest.mark.slow
def test_batch_norms_have_the_statistics_of_the_images() -> None:
    given = load_given("torchvision:resnet18", 0)
    seen: list[torch.Tensor] = []
    norms = {name: each for name, each in given.model.named_modules() if isinstance(each, nn.BatchNorm2d)}
    first = norms["bn1"]
    first.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.no_grad():
        for batch in given.calibration:
            given.model(*batch)
    means = torch.stack([values.mean((0, 2, 3)) for values in seen]).mean(0)
    assert first.running_mean is not None and torch.allclose(first.running_mean, means, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("torchvision:resnet19", "torchvision has no model 'resnet19'"),
        ("timm:no_such_net", "timm has no model 'no_such_net'"),
    ],
)
def test_a_model_that_there_is_not_is_refused(spec: str, told: str) -> None:
    with pytest.raises(ModelSpecError, match=told):
        load_given(spec, 0)


def test_a_glob_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ModelSetError, match="torchvision has no model that 'alex\\?' matches"):
        expand("torchvision:alex?")


@pytest.mark.parametrize("name", ["torchvision", "timm"])
def test_a_set_that_is_not_installed_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in [each for each in sys.modules if each.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, each)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModelSpecError, match=rf"{name} is not installed: pip install 'fx-quant-conformance\[models\]'"):
        load_given(f"{name}:resnet18", 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BertModel", "GPT2Model", "ViTModel", "T5Model"])
def test_an_architecture_of_transformers_is_small_and_runs(name: str) -> None:
    given = load_given(f"transformers:{name}", 0)
    assert sum(each.numel() for each in given.model.parameters()) < 200_000
    settled = settle(given)
    with torch.no_grad():
        results = settled.model(*settled.example_inputs)
    assert all(bool(each.isfinite().all()) for each in (results if isinstance(results, tuple) else (results,)))
    again = load_given(f"transformers:{name}", 0)
    assert all(map(torch.equal, given.model.state_dict().values(), again.model.state_dict().values()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ReformerModel", "PaliGemmaModel", "Speech2TextModel", "CodeGenModel", "Idefics3VisionTransformer"]
)
def test_where_the_smallest_config_or_its_inputs_do_not_do_others_are_tried(name: str) -> None:
    """Each has a need of its own.

    Axes of positions must fit the width; images want tokens of their own; a spectrum may have its frames first; what
    is rotated of a head has a size of its own; a part of a model wants an image, and says that it wants tokens.
    """
    given = load_given(f"transformers:{name}", 0)
    assert sum(each.numel() for each in given.model.parameters()) < 5_000_000
    settle(given)


@pytest.mark.slow
def test_of_a_model_that_does_not_run_the_reason_is_that_of_the_smallest() -> None:
    given = load_given("transformers:Glm4vMoeVisionModel", 0)
    with pytest.raises(
        ModelSpecError, match=r"does not run on the inputs that come with it.*'hidden_states' and 'grid_"
    ):
        settle(given)
    with pytest.raises(ModelSpecError, match="transformers cannot make it: TypeError: unsupported operand"):
        load_given("transformers:HunYuanDenseV1Model", 0)


@pytest.mark.slow
def test_a_glob_stands_for_models_of_transformers_and_base_for_the_whole_size() -> None:
    assert {"transformers:BertModel", "transformers:BertGenerationEncoder"} & set(expand("transformers:Bert*"))
    with pytest.raises(ModelSpecError, match="transformers has no model 'NoSuchModel@base'"):
        load_given("transformers:NoSuchModel@base", 0)
