"""Where Flower 1.39 has no option, a name in one of its modules stands for something else."""

import sys
from types import ModuleType

from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.object_store import NoObjectInStoreError, ObjectStore


def replace(module: ModuleType, name: str, by: object, expected: object) -> None:
    """Let `name` in a module of Flower's stand for `by`; ends the process if it is not there."""
    if vars(module).get(name) is not expected:
        sys.exit(f"error: {module.__name__}.{name} is not as in Flower 1.39: install that version")
    setattr(module, name, by)


def is_whole(message: str, store: ObjectStore) -> bool:
    """Whether the message of this id and all that it holds lie in the store.

    One that is being sent, or whose sender was killed on the way, lacks some of it; one whose
    receiver has confirmed it is gone.
    """
    try:
        tree = store.get_object_tree(message)
    except NoObjectInStoreError:
        return False
    return all(store.get(each.object_id) for each in iterate_object_tree(tree))
