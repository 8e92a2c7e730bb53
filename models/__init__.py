"""Networks as ordered, named stages; protocol/models.py lists them."""

from models.fixed import FixedModule, own_memory
from models.registry import build_model
from models.staged import Extractor, Stage, StagedModel

__all__ = ["Extractor", "FixedModule", "Stage", "StagedModel", "build_model", "own_memory"]
