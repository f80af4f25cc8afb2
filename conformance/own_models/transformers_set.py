"""The model set of the package transformers: its architectures with random weights, small but for ``@base``.

A small one has its own kind of config, in which sizes are reduced: layers, widths, heads, experts, the vocabulary, the
image. Where that does not run, less is reduced, and other inputs are tried. What does not run then says so.
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
LARGEST = 50_000_000
"""Parameters of a small model at most."""
_VOCABULARY, _FIRST_TOKEN, _SIDE = 128, 3, 32
_COUNTS: Mapping[str, int] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size", "decoder_vocab_size"), _VOCABULARY),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth"), 1),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 1),
    **dict.fromkeys(("depths", "num_block_repeats"), 1),
    **dict.fromkeys(("num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 64),
}
_WIDTHS: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "hidden_dim"), 32),
    **dict.fromkeys(("encoder_hidden_size", "decoder_hidden_size", "word_embed_proj_dim", "model_dim"), 32),
    **dict.fromkeys(("projection_size", "projection_dim"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    "ffn_hidden_size": 64,
}
_PARTS: Mapping[str, int] = {**dict.fromkeys(("head_dim", "d_kv", "patch_size"), 8), "expand": 1, "n_groups": 2}
_FEW: Mapping[str, int] = {
    **_COUNTS,
    "vocab_size_per_layer_input": _VOCABULARY,
    "num_hidden_layers": 2,
    "num_kv_shared_layers": 0,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
}
_REDUCTIONS: Sequence[tuple[Mapping[str, int], int]] = (
    ({**_COUNTS, **_WIDTHS, **_PARTS, "image_size": _SIDE}, 1),
    ({**_COUNTS, **_WIDTHS, "num_hidden_layers": 2, "num_key_value_heads": 4}, 1),
    *((_FEW, factor) for factor in (16, 8, 4, 2, 1)),
)
"""Sizes of a small config, by the names that configs have for them, of which none becomes larger; and what all other
widths and numbers of heads are divided by, so that their ratios stay. The first that runs is taken, as a width, its
parts or an image may not be reduced alone."""
_DIVIDED = ("_heads", "_hidden_size", "_width", "_inner")
"""How the names of other widths and numbers of heads end."""
_LISTS = frozenset({"depths", "num_block_repeats", "num_heads", "image_size"})
"""Sizes of which a config may have a list: each of its numbers is reduced."""
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")


def list_architectures(package: Any) -> list[str]:
    """Return the names of the models without a head."""
    names = package.models.auto.modeling_auto.MODEL_MAPPING_NAMES.values()
    return sorted({name if isinstance(name, str) else name[0] for name in names})


def create(package: Any, name: str) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Return a model by its class, or that with ``@base``, and keywords of some calls, random from torch's seed.

    Of the small configs and the inputs the first is taken on which the model runs. If there is none, what the first
    config raises is raised; a model that can be made is returned with inputs on which it does not run.
    """
    own, _, size = name.partition("@")
    kind = getattr(package, own)
    first: tuple[nn.Module, list[dict[str, Any]]] | None = None
    errors: list[Exception] = []
    for number, (sizes, factor) in enumerate((({}, 1),) if size else _REDUCTIONS):
        config = kind.config_class()
        _reduce(config, package.PreTrainedConfig, sizes, factor)
        config._experts_implementation = "batched_mm"  # by ops of torch's, and without a loop over what is drawn
        try:
            if number and not _is_small(kind, config):
                continue
            model: nn.Module = kind(config).eval()
            for form in _FORMS:
                calls = [_draw(model, config, form) for _ in range(ROWS)]
                if size or _runs(model, calls):
                    return model, calls
                first = first or (model, calls)
        except Exception as error:
            errors.append(error)
    if first is None:
        raise errors[0]
    return first


def _is_small(kind: Any, config: Any) -> bool:
    """Tell whether a model of a config has few parameters; it is counted without memory for them."""
    with torch.device("meta"):
        return sum(int(each.numel()) for each in kind(config).parameters()) <= LARGEST


def _runs(model: nn.Module, calls: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether a model takes its inputs. Why it does not is told when it is judged."""
    try:
        with torch.no_grad():
            model(**calls[0])
    except Exception:
        return False
    return True


def _reduce(config: Any, kind: type, sizes: Mapping[str, int], factor: int) -> None:
    """Reduce sizes in a config, and in those that it holds; an image that is cut into windows keeps its size."""
    for name, value in list(vars(config).items()):
        if name == "image_size" and hasattr(config, "window_size"):
            continue
        if isinstance(value, kind):
            _reduce(value, kind, sizes, factor)
        elif type(value) is int and value > sizes.get(name, value):
            setattr(config, name, sizes[name])
        elif name in _LISTS & sizes.keys() and isinstance(value, (list, tuple)):
            setattr(config, name, [sizes[name]] * len(value))
        elif _is_width(name) and type(value) is int:
            setattr(config, name, -(-value // factor))
        elif _is_width(name.removesuffix("s")) and isinstance(value, (list, tuple)):
            setattr(config, name, [-(-each // factor) if type(each) is int else each for each in value])
    for name in _TOKENS if sizes else ():
        if type(getattr(config, name, None)) is int and getattr(config, name) >= _VOCABULARY:
            setattr(config, name, 1)


def _is_width(name: str) -> bool:
    """Tell whether a size is a width or a number of heads; of ratios, of parts of a head and of images none is."""
    return name in _WIDTHS or name.endswith(_DIVIDED)


_FORMS = ("all", "main alone", "frames first")
"""What a model is given: all inputs that it names; its main one, as image tokens would have to be among the tokens; and
a spectrum whose frames come first."""


def _draw(model: Any, config: Any, form: str) -> dict[str, Any]:
    """Return keywords of one call: tokens, images, sound or its spectrum, as the model takes them."""
    taken = inspect.signature(model.forward).parameters
    side = _side_of(config)
    vocabulary = min(_VOCABULARY, getattr(config, "vocab_size", _VOCABULARY) or _VOCABULARY)
    tokens = torch.randint(min(_FIRST_TOKEN, vocabulary - 1), vocabulary, (ROWS, TOKENS))
    frames = getattr(config, "max_length", None) or 2 * getattr(config, "max_source_positions", 64)
    spectrum = torch.randn(ROWS, getattr(config, "num_mel_bins", 80), frames)
    known: dict[str, Tensor] = {
        "pixel_values": torch.randn(ROWS, getattr(config, "num_channels", 3) or 3, side, side),
        "input_values": torch.randn(ROWS, SAMPLES),
        "input_features": spectrum,
        "past_values": torch.randn(
            ROWS, getattr(config, "context_length", TOKENS), getattr(config, "num_input_channels", 1)
        ),
    }
    if form == "frames first":
        known |= dict.fromkeys(("input_values", "input_features"), spectrum.mT)
    main = str(model.main_input_name)
    wanted = [name for name, each in taken.items() if name == main or (each.default is each.empty and name in known)]
    given: dict[str, Any] = {name: known.get(name, tokens) for name in wanted or [main]}
    if main == "pixel_values" and "input_ids" in taken:
        given["input_ids"] = tokens
    if form != "main alone" and "pixel_values" in taken and hasattr(config, "vision_config"):
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
    found = next((each for each in sizes if each), _SIDE)
    return int(found) if isinstance(found, int) else int(found[0])
