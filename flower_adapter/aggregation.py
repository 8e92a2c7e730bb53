"""The functions of Flower's robust strategies, which it exports only as whole strategies."""

from flwr.serverapp.strategy.fedtrimmedavg import trim_mean
from flwr.serverapp.strategy.multikrum import select_multikrum

__all__ = ["select_multikrum", "trim_mean"]
