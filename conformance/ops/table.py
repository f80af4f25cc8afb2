"""The table of recipes: how to build, call and vary each op that a pattern can name (variation.py)."""

from __future__ import annotations

from typing import Any

from conformance.ops import activations as recipes_functions
from conformance.ops import arithmetic as recipes_values
from conformance.ops import embeddings_and_recurrent as recipes_dynamic
from conformance.ops import weighted as recipes_weighted
from conformance.ops.fused_modules import FOLLOWERS as FOLLOWERS
from conformance.ops.fused_modules import PARTS as PARTS
from conformance.ops.fused_modules import QAT_OF as QAT_OF
from conformance.ops.fused_modules import root_of as root_of
from conformance.ops.variants import Recipe
from conformance.ops.weighted import out_channels as out_channels

RECIPES: dict[Any, Recipe] = {
    **recipes_weighted.RECIPES,
    **recipes_values.RECIPES,
    **recipes_functions.RECIPES,
    **recipes_dynamic.RECIPES,
}
WEIGHTED = frozenset(recipes_weighted.RECIPES)
