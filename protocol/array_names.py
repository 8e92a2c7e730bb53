"""Names of saved arrays: those of earlier versions are read under today's names."""

import re
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")

# 0.1 saved a model's projection heads as "tap_heads.<stage>...", also behind a prefix: of a group
# of client state ("previous/tap_heads...") or of a server optimizer's moment ("m.tap_heads...").
_old_name = re.compile(r"(^|[/.])tap_heads\.")


def with_current_names(arrays: Mapping[str, T]) -> dict[str, T]:
    """The same arrays under the names that this version gives them."""
    return {_old_name.sub(r"\1projection_heads.", name): a for name, a in arrays.items()}
