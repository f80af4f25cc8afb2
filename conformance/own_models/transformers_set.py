"""The model set of the package transformers: its architectures with random weights, small but for ``@base``.

A small one has its own kind of config, in which sizes are reduced: layers, widths, heads, experts, the vocabulary, the
image. Not every config can be: what then does not run says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

BASE = "@base"
"""What follows a name to ask for the size that the config has by itself."""
ROWS, TOKENS, SAMPLES = 2, 8, 4000
_VOCABULARY, _FIRST_TOKEN = 128, 3
_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size"), _VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "hidden_dim"), 32),
    **dict.fromkeys(("encoder_hidden_size", "decoder_hidden_size", "word_embed_proj_dim", "model_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth"), 1),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "patch_size"), 8),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 64),
}
"""The sizes of a small config, by the names that configs have for them: none becomes larger."""
_LISTS: Mapping[str, int] = {"depths": 1, "num_block_repeats": 1, "num_heads": 4}
"""What each number of a list becomes."""
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")


def list_architectures(package: Any) -> list[str]:
    """Return the names of the models without a head."""
    names = package.models.auto.modeling_auto.MODEL_MAPPING_NAMES.values()
    return sorted({name if isinstance(name, str) else name[0] for name in names})


def create(package: Any, name: str) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Return a model by its class, or that with ``@base``, and keywords of some calls, random from torch's seed."""
    own, _, size = name.partition("@")
    kind = getattr(package, own)
    config = kind.config_class()
    if not size:
        _reduce(config, package.PreTrainedConfig)
    model: nn.Module = kind(config).eval()
    return model, [_draw(model, config) for _ in range(ROWS)]


def _reduce(config: Any, kind: type) -> None:
    """Reduce the sizes in a config, and in those that it holds; an image that is cut into windows keeps its size."""
    for name, value in list(vars(config).items()):
        if name == "image_size" and hasattr(config, "window_size"):
            continue
        if isinstance(value, kind):
            _reduce(value, kind)
        elif type(value) is int and value > _SIZES.get(name, value):
            setattr(config, name, _SIZES[name])
        elif name in _LISTS and isinstance(value, (list, tuple)):
            setattr(config, name, [_LISTS[name]] * len(value))
    for name in _TOKENS:
        if type(getattr(config, name, None)) is int and getattr(config, name) >= _VOCABULARY:
            setattr(config, name, 1)


def _draw(model: Any, config: Any) -> dict[str, Any]:
    """Return keywords of one call: tokens, images, sound or its spectrum, as the model takes them."""
    taken = inspect.signature(model.forward).parameters
    side = _side_of(config)
    vocabulary = min(_VOCABULARY, getattr(config, "vocab_size", _VOCABULARY) or _VOCABULARY)
    tokens = torch.randint(_FIRST_TOKEN, vocabulary, (ROWS, TOKENS))
    known: dict[str, Tensor] = {
        "pixel_values": torch.randn(ROWS, getattr(config, "num_channels", 3) or 3, side, side),
        "input_values": torch.randn(ROWS, SAMPLES),
        "input_features": torch.randn(
            ROWS, getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 64)
        ),
    }
    main = str(model.main_input_name)
    given: dict[str, Any] = {main: known.get(main, tokens)}
    if main == "pixel_values" and "input_ids" in taken:
        given["input_ids"] = tokens
    if "pixel_values" in taken and hasattr(config, "vision_config"):
        given["pixel_values"] = known["pixel_values"]
    if "decoder_input_ids" in taken and config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens.clone()
    if "use_cache" in taken:
        given["use_cache"] = False
    return given


def _side_of(config: Any) -> int:
    sizes: Sequence[Any] = [
        getattr(each, "image_size", None) for each in (config, getattr(config, "vision_config", None))
    ]
    found = next((each for each in sizes if each), _SIZES["image_size"])
    return int(found) if isinstance(found, int) else int(found[0])
