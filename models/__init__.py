"""Networks as ordered, named stages; protocol/models.py lists them."""

from models.registry import build_model
from models.staged import Stage, StagedModel

__all__ = ["Stage", "StagedModel", "build_model"]
