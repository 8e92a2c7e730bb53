"""The client half of every method, by name: each file here defines one."""

from contextlib import suppress

from client_app.method import Method
from protocol.catalogue import imported, method_names, method_spec, method_stem
from protocol.code import check_signatures
from protocol.config import RunConfig, refuse_unknown


def method_class(name: str) -> type[Method]:
    """The class that client_app/methods/<name>.py defines; ValueError if Keel cannot call it."""
    module = imported(f"{__name__}.{method_stem(name)}")
    found: type[Method] = getattr(module, method_spec(name).class_name)
    check_signatures(found)  # type: ignore[arg-type]  # mypy: not hashable
    return found


# All are imported now: a process must run the code that its digest is of, even if a file is edited.
for each in method_names():
    with suppress(ValueError):  # of a broken file, raised again where the method is used
        method_class(each)


def method_of(config: RunConfig) -> Method:
    """The run's method with its options; ValueError naming the key if one is not allowed."""
    name = config.rounds.method
    refuse_unknown("method", name, list(method_names()))
    return config.table(name, method_class(name))
