"""The float models of the tests, each with its inputs and the recipes that the parity tests take it through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization.fx import custom_config

from conformance.whole_models import zoo as published
from tests.refimpl.support import zoo_basic as basic
from tests.refimpl.support import zoo_features as features
from tests.refimpl.support import zoo_modern as modern
from tests.refimpl.support import zoo_recipes as recipes
from tests.refimpl.support import zoo_text as text
from tests.refimpl.support import zoo_vision as vision
from tests.refimpl.support.both_flows import QCONFIG
from tests.refimpl.support.parity import Batches, Case, Recipe
from tests.refimpl.support.zoo_recipes import RECIPES, only_global, types

ROWS, MAPS, WORDS = (8,), (4, 8, 8), (5, 8)
Spec = tuple[int, ...] | Callable[[], Any]  # the shape of one example of floats, or a maker of a batch
BATCH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model, the inputs of a batch, and recipes by name or in full."""

    make: Callable[[], nn.Module]
    inputs: tuple[Spec, ...]
    recipes: tuple[str | tuple[str, Recipe], ...] = ("minmax",)
    prepare_custom: Callable[[], Any] = lambda: None
    convert_custom: Callable[[], Any] = lambda: None
    convert_mapping: Callable[[], Any] = lambda: None

    @property
    def name(self) -> str:
        if not isinstance(self.make, partial):
            return self.make.__name__
        options = [str(value) for value in (*self.make.args, *self.make.keywords)]
        return f"{self.make.func.__name__}({', '.join(options)})"


def indices(high: int, *shape: int) -> Callable[[], Tensor]:
    """Return a maker of indices below ``high``."""
    return lambda: torch.randint(0, high, shape)


def mask(*shape: int) -> Callable[[], Tensor]:
    """Return a maker of a boolean mask."""
    return lambda: torch.rand(shape) > 0.5


def build(entry: Entry) -> tuple[nn.Module, Batches]:
    """Make a model in eval mode, its batch norms settled, and three batches. The same every time."""
    torch.default_generator.manual_seed(0)
    model = entry.make().eval()
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
            basic.settle(module)
    make = [partial(torch.randn, BATCH, *spec) if isinstance(spec, tuple) else spec for spec in entry.inputs]
    return model, [tuple(maker() for maker in make) for _ in range(3)]


def build_named(name: str) -> tuple[nn.Module, Batches]:
    """Build the model that has this name."""
    return build(next(entry for entry in ENTRIES if entry.name == name))


def keyed(name: str, tweak: recipes.Tweak, base: Any = QCONFIG, **options: Any) -> tuple[str, Recipe]:
    """Return a recipe for one model: a global QConfig and keys of its own."""
    return name, Recipe(mapping=only_global(base, tweak), **options)


def cases(entries: tuple[Entry, ...]) -> list[Case]:
    """Return the cases of entries: one per model and recipe."""
    found = []
    for entry in entries:
        for choice in entry.recipes:
            name, recipe = (choice, RECIPES[choice]) if isinstance(choice, str) else choice
            found.append(
                Case(
                    name=f"{entry.name}, {name}",
                    build=partial(build, entry),
                    recipe=recipe,
                    prepare_custom=entry.prepare_custom,
                    convert_custom=entry.convert_custom,
                    convert_mapping=entry.convert_mapping,
                )
            )
    return found


STATIC = ("minmax", "per channel")
QAT = ("qat qnnpack",)

BASIC = (
    Entry(make=basic.Residual, inputs=(MAPS,), recipes=(*STATIC, "x86", "qat fbgemm", "onednn minmax", "tensorrt")),
    Entry(make=basic.Branches, inputs=(MAPS,), recipes=("minmax", "qnnpack")),
    Entry(make=basic.CatThenConv, inputs=(MAPS,), recipes=(*STATIC, "narrow", "qat onednn")),
    Entry(make=basic.SharedConv, inputs=(MAPS,), recipes=("minmax",)),
    Entry(make=basic.Mlp, inputs=(ROWS,), recipes=(*STATIC, "dynamic", "float16 dynamic", "float16 static", *QAT)),
    Entry(make=basic.Reshapes, inputs=(ROWS,), recipes=("minmax", "fixed", "dynamic")),
    Entry(make=basic.Functions, inputs=(ROWS,), recipes=("minmax", "dynamic", "float16 dynamic")),
    Entry(make=basic.FloatIsland, inputs=(ROWS,), recipes=("minmax",)),
    Entry(make=basic.DeadBranch, inputs=(ROWS,), recipes=("minmax", "dynamic")),
    Entry(make=basic.Nested, inputs=(ROWS,), recipes=("minmax", "histogram", "moving")),
    Entry(make=basic.PoolFunctions, inputs=(MAPS,), recipes=("minmax", "signed", "wide weight")),
    Entry(make=basic.Keywords, inputs=(MAPS,), recipes=("minmax",)),
    Entry(make=basic.LinearBn, inputs=(ROWS,), recipes=("minmax", "qat onednn", *QAT)),
    Entry(make=basic.DenseBlock, inputs=(MAPS,), recipes=("minmax", "histogram")),
    Entry(make=basic.ReluOnly, inputs=(ROWS,), recipes=("minmax",)),
    *(
        Entry(
            make=partial(basic.ConvNet, d),
            inputs=((4, *[8] * d),),
            recipes=("native", "per channel", "qat fbgemm", "float16 static"),
        )
        for d in (1, 2, 3)
    ),
)

IMAGES = (3, 16, 16)
VISION = (
    Entry(
        make=published.ResNet,
        inputs=((3, 32, 32),),
        recipes=("minmax", "fbgemm", "native", "qat fbgemm", "onednn minmax"),
    ),
    Entry(make=published.MobileNet, inputs=(IMAGES,), recipes=("fixed", "minmax", "executorch", "qat qnnpack")),
    Entry(make=published.UNet, inputs=(IMAGES,), recipes=("minmax", "qat qnnpack")),
    Entry(make=vision.EfficientNet, inputs=(MAPS,), recipes=("fixed", "per channel")),
    Entry(make=vision.DenseNet, inputs=(MAPS,), recipes=("minmax", "narrow", "qat qnnpack")),
    Entry(make=vision.ShuffleNet, inputs=(MAPS,), recipes=("minmax", "native")),
    Entry(make=vision.SuperResolution, inputs=(MAPS,), recipes=("minmax", "native")),
    Entry(make=vision.Autoencoder, inputs=(MAPS,), recipes=("fixed", "qat qnnpack")),
    Entry(make=vision.FeaturePyramid, inputs=(MAPS,), recipes=("minmax", "fixed")),
    Entry(make=vision.SpatialAttention, inputs=(MAPS,), recipes=("fixed", "minmax")),
    Entry(make=vision.Activations, inputs=(MAPS,), recipes=("fixed", "minmax", "float16 static", "x86 minmax")),
    Entry(make=vision.Norms, inputs=(MAPS,), recipes=("fixed", "qat qnnpack")),
    Entry(make=vision.Video, inputs=((2, 4, 8, 8),), recipes=("x86 minmax",)),
    Entry(make=vision.Audio, inputs=((2, 8),), recipes=("fixed", "minmax")),
    Entry(make=vision.GlobalPools, inputs=(MAPS,), recipes=("minmax", "per channel")),
    Entry(make=vision.ConvBnChains, inputs=(MAPS,), recipes=("minmax", "fixed")),
)

TEXT = (
    Entry(make=text.Transformer, inputs=(WORDS,), recipes=("fixed", "dynamic", "qat qnnpack", "float16 static")),
    Entry(make=text.PostNormTransformer, inputs=(WORDS, mask(BATCH, 5, 5)), recipes=("fixed", "minmax", "dynamic")),
    Entry(make=text.CrossAttention, inputs=(WORDS, WORDS), recipes=("minmax", "dynamic")),
    Entry(make=text.Mixer, inputs=(WORDS,), recipes=("fixed", "per channel", "dynamic")),
    Entry(
        make=text.Classifier,
        inputs=(indices(10, 7), lambda: torch.tensor([0, 3, 5, 7])),
        recipes=("mixed", "weight only", "static, embeddings float"),
    ),
    Entry(
        make=text.TwoTables,
        inputs=(indices(10, 3, 5), indices(10, 3, 5), indices(5, 3, 5)),
        recipes=("mixed", "weight only", "weight only 4 bit", "static, embeddings float"),
    ),
    Entry(
        make=text.Recommender,
        inputs=(ROWS, indices(10, BATCH, 2), indices(10, BATCH, 4)),
        recipes=("mixed", "weight only 4 bit"),
    ),
    Entry(make=text.Lstm, inputs=(WORDS,), recipes=("dynamic", "float16 dynamic", "minmax", "mixed")),
    Entry(make=partial(text.Lstm, bidirectional=True, num_layers=2), inputs=(WORDS,), recipes=("dynamic per channel",)),
    Entry(
        make=text.LastState,
        inputs=(indices(10, 3, 5), lambda: torch.randn(1, 3, 6), lambda: torch.randn(1, 3, 6)),
        recipes=("mixed",),
    ),
    Entry(make=text.Gru, inputs=(WORDS,), recipes=("dynamic", "mixed", "float16 dynamic")),
    Entry(make=text.Cells, inputs=(WORDS, (6,)), recipes=("dynamic", "float16 dynamic")),
    Entry(make=text.Pointer, inputs=(WORDS, mask(BATCH, 5)), recipes=("minmax", "fixed")),
    Entry(make=text.Gated, inputs=(ROWS,), recipes=("fixed", "minmax", "qat qnnpack")),
)

FEATURES = (
    Entry(make=features.FunctionalConvs, inputs=(MAPS,), recipes=("x86 minmax", "per channel", "qat fbgemm")),
    Entry(make=features.SpelledOutConvs, inputs=(MAPS,), recipes=("x86 minmax", "qat fbgemm")),
    Entry(make=features.FunctionalTransposed, inputs=(MAPS,), recipes=("minmax", "native")),
    Entry(
        make=features.FunctionalLinears,
        inputs=(ROWS,),
        recipes=("minmax", "dynamic", "float16 dynamic", "float16 static"),
    ),
    Entry(make=features.FunctionalNorms, inputs=(MAPS,), recipes=("fixed", "native")),
    Entry(make=features.FunctionalActivations, inputs=(ROWS,), recipes=("fixed", "minmax")),
    Entry(make=features.Float, inputs=(ROWS,), recipes=("minmax", "native")),
    Entry(make=features.InPlace, inputs=(MAPS,), recipes=("minmax",)),
    Entry(make=features.InPlaceOperators, inputs=(ROWS,), recipes=("minmax", "onednn minmax")),
    Entry(make=features.Stacks, inputs=(ROWS,), recipes=("minmax", "fixed")),
    Entry(make=features.NamedOutput, inputs=(ROWS,), recipes=("minmax",)),
    Entry(make=features.NestedOutput, inputs=(ROWS,), recipes=("minmax",)),
    Entry(make=features.Defaults, inputs=(ROWS,), recipes=("minmax",)),
    Entry(make=features.ShapeArithmetic, inputs=(MAPS,), recipes=("minmax", "fixed")),
    Entry(make=features.Reductions, inputs=(MAPS,), recipes=("minmax",)),
    Entry(make=features.Permutations, inputs=(MAPS,), recipes=("minmax", "fixed")),
    Entry(make=features.ScalarOps, inputs=(ROWS,), recipes=("minmax", "float16 static")),
    Entry(make=features.Matmuls, inputs=(ROWS,), recipes=("minmax", "native")),
    Entry(make=features.SharedAlias, inputs=(ROWS,), recipes=("minmax",)),
    Entry(make=features.Dropouts, inputs=(MAPS,), recipes=("minmax", "qat qnnpack")),
    Entry(make=features.Identities, inputs=(ROWS,), recipes=("minmax",)),
    Entry(make=features.DeadCode, inputs=(ROWS, ROWS), recipes=("minmax",)),
    Entry(make=features.Halves, inputs=(ROWS,), recipes=("minmax",)),
    Entry(make=features.Parametrized, inputs=(ROWS,), recipes=("minmax",)),
    Entry(
        make=features.Containers,
        inputs=(ROWS,),
        recipes=(
            "minmax",
            keyed("one name off", lambda m: m.set_module_name("first.1.0", None)),
            keyed("a container off", lambda m: m.set_module_name("first", None)),
            keyed(
                "regex, the first wins",
                lambda m: m.set_module_name_regex("first.*", None).set_module_name_regex(
                    "(first|second).*", recipes.DYNAMIC
                ),
            ),
            keyed("name over regex", lambda m: m.set_module_name_regex(".*", None).set_module_name("second", QCONFIG)),
            keyed("type off", types(None, nn.Linear)),
            keyed("only by name", lambda m: m.set_module_name("first.0", QCONFIG), None),
            keyed("dynamic in static", lambda m: m.set_module_name("second", recipes.DYNAMIC), config="native"),
        ),
    ),
    Entry(
        make=features.FunctionalLinears,
        inputs=(ROWS,),
        recipes=(
            keyed("second call off", lambda m: m.set_module_name_object_type_order("", F.linear, 1, None)),
            keyed("function off", types(None, F.linear)),
            keyed("method off", types(None, "relu")),
        ),
    ),
    Entry(
        make=basic.Residual,
        inputs=(MAPS,),
        recipes=(
            keyed("conv off by name", lambda m: m.set_module_name("conv2", None)),
            keyed("add off", types(None, torch.add)),
            keyed("two observers", lambda m: m.set_module_name("conv2", recipes.SIGNED), converts=recipes.NOT_LOWERED),
        ),
    ),
)


MODERN = (
    Entry(make=modern.SqueezeNet, inputs=(MAPS,), recipes=("fbgemm", "qat qnnpack")),
    Entry(make=modern.InceptionBlocks, inputs=(MAPS,), recipes=("fbgemm", "onednn")),
    Entry(make=modern.SharedHead, inputs=(MAPS,), recipes=("minmax",)),
    Entry(make=modern.ConvNeXt, inputs=(MAPS,), recipes=("onednn", "dynamic fbgemm")),
    Entry(make=modern.WindowAttention, inputs=((8, 8, 8),), recipes=("onednn", "dynamic fbgemm")),
    Entry(make=modern.FaceNet, inputs=(MAPS,), recipes=("fbgemm",)),
    Entry(make=modern.CausalDecoder, inputs=(WORDS,), recipes=("onednn", "dynamic per channel x86")),
)


def by_default(entries: tuple[Entry, ...], *defaults: str) -> tuple[Entry, ...]:
    """Return the entries with default mappings among their recipes, but for those that neither side can take."""
    found = []
    for entry in entries:
        added = (name for name in defaults if name not in entry.recipes and (entry.name, name) not in IMPOSSIBLE)
        found.append(replace(entry, recipes=(*entry.recipes, *added)))
    return tuple(found)


# Torch's embeddings cannot be trained with default weights, nothing fuses a transposed convolution and its norm in
# training, and qnnpack has no 3-d convolution: test_modes, test_fuse_qat and the suite's findings hold these.
IMPOSSIBLE = {
    *((name, "qat x86") for name in ("Classifier", "TwoTables", "Recommender", "LastState", "ConvBnChains")),
    ("Video", "qnnpack"),
}


def custom(**settings: Any) -> Callable[[], Any]:
    """Return a maker of torch's PrepareCustomConfig: method name → its arguments."""

    def make() -> Any:
        config: Any = custom_config.PrepareCustomConfig()
        for method, arguments in settings.items():
            getattr(config, method)(*arguments)
        return config

    return make


STANDALONE = (only_global(QCONFIG)(), (torch.randn(BATCH, 8),), None, None)
QUANTIZED_BOUNDARY = (
    only_global(QCONFIG)(),
    (torch.randn(BATCH, 8),),
    custom(set_input_quantized_indexes=([0],), set_output_quantized_indexes=([0],))(),
    None,
)
CUSTOM = (
    Entry(
        make=features.WithBranching,
        inputs=(ROWS,),
        prepare_custom=custom(set_non_traceable_module_names=(["branching"],)),
    ),
    Entry(
        make=features.WithInner,
        inputs=(ROWS,),
        prepare_custom=custom(set_non_traceable_module_classes=([features.Inner],)),
        recipes=("minmax", "dynamic"),
    ),
    Entry(
        make=features.WithInner,
        inputs=(ROWS,),
        prepare_custom=custom(set_standalone_module_name=("inner", *STANDALONE)),
        recipes=(("standalone, float boundary", RECIPES["minmax"]),),
    ),
    Entry(
        make=features.WithInner,
        inputs=(ROWS,),
        prepare_custom=custom(set_standalone_module_class=(features.Inner, *QUANTIZED_BOUNDARY)),
        recipes=(("standalone, quantized boundary", RECIPES["minmax"]),),
    ),
    Entry(
        make=basic.Mlp,
        inputs=(ROWS,),
        prepare_custom=custom(set_output_quantized_indexes=([0],)),
        recipes=(("quantized output", RECIPES["minmax"]),),
    ),
    Entry(
        make=basic.Mlp,
        inputs=(ROWS,),
        convert_mapping=only_global(QCONFIG, lambda m: m.set_module_name("layers.2", None)),
        recipes=(
            (
                "part off at convert",
                Recipe(mapping=only_global(QCONFIG, lambda m: m.set_module_name("layers.2", QCONFIG))),
            ),
        ),
    ),
)

DEFAULTS = ("x86", "qnnpack", "qat x86")
ENTRIES = (
    *BASIC,
    *by_default(VISION, *DEFAULTS),
    *by_default(TEXT, *DEFAULTS, "dynamic x86", "dynamic onednn"),
    *FEATURES,
    *by_default(MODERN, *DEFAULTS),
    *CUSTOM,
)
CASES = cases(ENTRIES)
