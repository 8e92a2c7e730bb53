"""Networks as ordered, named stages; protocol/models.py lists them."""

from models.registry import build_model
from models.staged import Extractor, Stage, StagedModel

__all__ = ["Extractor", "Stage", "StagedModel", "build_model"]
