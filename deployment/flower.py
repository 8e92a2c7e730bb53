"""Where Flower 1.39 has no option, a name in one of its modules stands for something else."""

import sys
from types import ModuleType


def replace(module: ModuleType, name: str, by: object, expected: object) -> None:
    """Let `name` in a module of Flower's stand for `by`; ends the process if it is not there."""
    if vars(module).get(name) is not expected:
        sys.exit(f"error: {module.__name__}.{name} is not as in Flower 1.39: install that version")
    setattr(module, name, by)
