"""Networks as ordered, named stages; `registry.MODELS` lists them."""

from models.registry import MODELS, Recipe, build_model, input_spec
from models.staged import Stage, StagedModel

__all__ = ["MODELS", "Recipe", "Stage", "StagedModel", "build_model", "input_spec"]
