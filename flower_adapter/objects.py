"""Whether a message and the arrays in it are in one of Flower's object stores.

Replaces nothing. Flower delivers what is announced, and waits for the rest.
"""

from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.object_store import NoObjectInStoreError, ObjectStore
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.state.schema.objectstore_models import StoredObject
from sqlalchemy import func, select


def is_complete(root: str, store: ObjectStore) -> bool:
    """Whether the object with this id and everything in it are in the store.

    A message still being sent, or whose sender was killed, is incomplete; one that its receiver has
    confirmed is gone.
    """
    try:
        tree = store.get_object_tree(root)
    except NoObjectInStoreError:
        return False
    objects = {each.object_id for each in iterate_object_tree(tree)}
    if not isinstance(store, SqlObjectStore):
        return all(map(store.get, objects))
    is_here = StoredObject.object_id.in_(objects) & (StoredObject.is_available == 1)
    with store.session() as session:  # without reading the arrays
        count = select(func.count()).select_from(StoredObject).where(is_here)
        return session.scalar(count) == len(objects)
