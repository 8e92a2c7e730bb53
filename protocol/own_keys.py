"""Which config values name own code, and the keys of an own method's options."""

from collections.abc import Collection, Mapping
from dataclasses import is_dataclass

from protocol.config_keys import names_in
from protocol.models import is_library
from protocol.options import ConfigError, OptionValue, defaults_of
from protocol.own_code import VALUE, Own, canonical, find, is_spec, table_of
from protocol.source_spec import SOURCE_NAMES

# whose values may name own code
SPEC_KEYS = ("method", "model", "client-models", "source", "partition", "metrics")


def own_code_in(flat: dict[str, OptionValue], given: Mapping[str, Own]) -> dict[str, Own]:
    """The own code that values of `flat` name, by spec; `flat` gets the canonical specs.

    ConfigError for a file or module that cannot be read, and for two files of one name.
    """
    found: dict[str, Own] = {}
    for key in SPEC_KEYS:
        for spec in (name for name in names_in(str(flat[key])) if is_own(key, name)):
            own = given.get(canonical(spec)) or find(spec, key)
            others = [each for each in found.values() if each.place == own.place != VALUE]
            if any(each.digest != own.digest for each in others):
                raise ConfigError(key, f"{key} = {spec!r}: the run uses another {own.place} too")
            found[own.spec] = own
            flat[key] = str(flat[key]).replace(spec, own.spec)
    return found


def is_own(key: str, name: str) -> bool:
    """Whether a name in the value of this key names own code; `folder:data` is one of Keel's."""
    is_keels = key == "source" and f"{name.partition(':')[0]}:PATH" in SOURCE_NAMES
    if key == "partition" and name.endswith(".json"):
        return True
    return is_spec(name) and not is_keels and not is_library(name)


def own_options(method: Own, taken: Collection[str]) -> dict[str, OptionValue]:
    """The keys of an own method's options with their defaults; loads its class.

    taken: the names of Keel's tables. ConfigError if the options' is one of them, and for an option
    without default.
    """
    table = table_of(method.spec)
    what = f"method = {method.spec!r}"
    if table in taken:
        raise ConfigError("method", f"{what}: Keel has a {table!r}: rename {method.name}")
    try:
        value = method.value
    except ValueError as error:
        raise ConfigError("method", f"{what}: {error}") from error
    if not is_dataclass(value):
        raise ConfigError(
            "method",
            f"{what}: expected a subclass of Method or LocalObjective with @dataclass(frozen=True)",
        )
    try:
        return {f"{table}.{key}": default for key, default in defaults_of(value).items()}
    except ValueError as error:
        raise ConfigError("method", f"{what}: {error}") from error
