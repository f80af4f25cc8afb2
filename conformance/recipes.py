"""The table of recipes: how to build, call and vary each op that a pattern can name (variation.py)."""

from __future__ import annotations

from typing import Any

from conformance import recipes_dynamic, recipes_functions, recipes_values, recipes_weighted
from conformance.recipes_parts import FOLLOWERS as FOLLOWERS
from conformance.recipes_parts import PARTS as PARTS
from conformance.recipes_parts import QAT_OF as QAT_OF
from conformance.recipes_parts import root_of as root_of
from conformance.recipes_weighted import out_channels as out_channels
from conformance.variation import Recipe

RECIPES: dict[Any, Recipe] = {
    **recipes_weighted.RECIPES,
    **recipes_values.RECIPES,
    **recipes_functions.RECIPES,
    **recipes_dynamic.RECIPES,
}
WEIGHTED = frozenset(recipes_weighted.RECIPES)
