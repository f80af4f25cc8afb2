"""The float models of the tests, each with its inputs and the recipes that the parity tests take it through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.conformance.whole_models import zoo as published
from tests.refimpl.support import zoo_basic as basic
from tests.refimpl.support import zoo_features as features
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
            found.append(Case(name=f"{entry.name}, {name}", build=partial(build, entry), recipe=recipe))
    return found


BASIC = (
    Entry(make=basic.Residual, inputs=(MAPS,), recipes=("minmax", "onednn minmax", "tensorrt", "qat fbgemm")),
    Entry(make=basic.CatThenConv, inputs=(MAPS,), recipes=("minmax", "narrow")),
    Entry(make=basic.SharedConv, inputs=(MAPS,)),
    Entry(
        make=basic.Mlp,
        inputs=(ROWS,),
        recipes=("histogram", "moving", "float16 dynamic", "float16 static", "qat qnnpack"),
    ),
    Entry(make=basic.Reshapes, inputs=(ROWS,), recipes=("minmax", "dynamic")),
    Entry(make=basic.Functions, inputs=(ROWS,), recipes=("minmax", "dynamic", "float16 dynamic")),
    Entry(make=basic.FloatIsland, inputs=(ROWS,)),
    Entry(make=basic.DeadBranch, inputs=(ROWS,)),
    Entry(make=basic.PoolFunctions, inputs=(MAPS,), recipes=("minmax", "signed", "wide weight")),
    Entry(make=basic.LinearBn, inputs=(ROWS,), recipes=("qat onednn", "qat qnnpack")),
    Entry(make=basic.DenseBlock, inputs=(MAPS,)),
    Entry(make=basic.ReluOnly, inputs=(ROWS,)),
    *(
        Entry(
            make=partial(basic.ConvNet, d),
            inputs=((4, *[8] * d),),
            recipes=("per channel", "float16 static", "qat fbgemm"),
        )
        for d in (1, 2, 3)
    ),
)

IMAGES = (3, 16, 16)
VISION = (
    Entry(make=published.ResNet, inputs=((3, 32, 32),), recipes=("native", "onednn minmax")),
    Entry(make=published.MobileNet, inputs=(IMAGES,), recipes=("executorch",)),
    Entry(make=published.UNet, inputs=(IMAGES,)),
    Entry(make=vision.ShuffleNet, inputs=(MAPS,)),
    Entry(make=vision.Upscaling, inputs=(MAPS,), recipes=("fixed", "native")),
    Entry(make=vision.Activations, inputs=(MAPS,), recipes=("fixed", "x86 minmax", "float16 static")),
    Entry(make=vision.Gates, inputs=(ROWS,), recipes=("x86", "qnnpack", "fbgemm", "qat x86", "qat qnnpack")),
    Entry(make=vision.Norms, inputs=(MAPS,), recipes=("fixed",)),
    Entry(make=vision.Video, inputs=((2, 4, 8, 8),), recipes=("x86 minmax", "qat fbgemm")),
    Entry(make=vision.Audio, inputs=((2, 8),), recipes=("fixed", "minmax")),
    Entry(make=vision.GlobalPools, inputs=(MAPS,)),
    Entry(make=vision.ConvBnChains, inputs=(MAPS,), recipes=("fixed",)),
)

TEXT = (
    Entry(make=text.PostNormTransformer, inputs=(WORDS, mask(BATCH, 5, 5)), recipes=("minmax", "dynamic")),
    Entry(
        make=text.TwoTables,
        inputs=(indices(10, 3, 5), indices(10, 3, 5), indices(5, 3, 5)),
        recipes=("weight only", "weight only 4 bit", "static, embeddings float"),
    ),
    Entry(
        make=text.Recommender,
        inputs=(ROWS, indices(10, BATCH, 2), indices(10, BATCH, 4)),
        recipes=("mixed", "weight only 4 bit"),
    ),
    Entry(make=text.Lstm, inputs=(WORDS,), recipes=("dynamic", "float16 dynamic")),
    Entry(make=partial(text.Lstm, bidirectional=True, num_layers=2), inputs=(WORDS,), recipes=("dynamic per channel",)),
    Entry(make=text.Gru, inputs=(WORDS,), recipes=("dynamic", "mixed", "float16 dynamic")),
    Entry(make=text.Cells, inputs=(WORDS, (6,)), recipes=("minmax", "dynamic", "float16 dynamic")),
    Entry(make=text.Pointer, inputs=(WORDS, mask(BATCH, 5))),
    Entry(make=text.Gated, inputs=(ROWS,), recipes=("minmax", "qat qnnpack")),
)

FEATURES = (
    Entry(make=features.SpelledOutConvs, inputs=(MAPS,), recipes=("x86 minmax", "qat fbgemm")),
    Entry(make=features.FunctionalTransposed, inputs=(MAPS,), recipes=("minmax", "native")),
    Entry(make=features.FunctionalNorms, inputs=(MAPS,), recipes=("fixed", "native")),
    Entry(make=features.FunctionalActivations, inputs=(ROWS,), recipes=("fixed", "minmax")),
    Entry(make=features.Float, inputs=(ROWS,)),
    Entry(make=features.InPlace, inputs=(MAPS,)),
    Entry(make=features.Defaults, inputs=(ROWS,)),
    Entry(make=features.Reductions, inputs=(MAPS,)),
    Entry(make=features.Permutations, inputs=(MAPS,)),
    Entry(make=features.ScalarOps, inputs=(ROWS,), recipes=("minmax", "float16 static")),
    Entry(make=features.SharedAlias, inputs=(ROWS,)),
    Entry(
        make=features.Containers,
        inputs=(ROWS,),
        recipes=(
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
            "minmax",
            "float16 dynamic",
            "float16 static",
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
            keyed("two observers", lambda m: m.set_module_name("conv2", recipes.SIGNED), converts=recipes.NOT_LOWERED),
        ),
    ),
)

ENTRIES = (*BASIC, *VISION, *TEXT, *FEATURES)
CASES = cases(ENTRIES)
