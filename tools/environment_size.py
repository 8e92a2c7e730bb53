"""What requirements take on disk here: the installed distributions that they bring, in MB.

python -m tools.environment_size docker/requirements.txt      what the image installs
python -m tools.environment_size "keel[experiments]"          what recipes and pages need
"""

import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TORCH = ("torch", "triton", "nvidia-", "cuda-")  # counted apart: whoever trains needs it


def closure(requirements: Iterable[Requirement]) -> dict[str, int]:
    """Bytes by distribution, of these requirements and all that they bring."""
    sizes: dict[str, int] = {}
    waiting, seen = [(r.name, extra) for r in requirements for extra in ("", *r.extras)], set()
    while waiting:
        name, extra = waiting.pop()
        if (name := canonicalize_name(name), extra) in seen:
            continue
        seen.add((name, extra))
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            print(f"{name} is not installed: not counted", file=sys.stderr)
            continue
        files = (Path(str(found.locate_file(file))) for file in found.files or [])
        sizes[name] = sum(path.stat().st_size for path in files if path.is_file())
        for required in map(Requirement, found.requires or []):
            if required.marker is None or required.marker.evaluate({"extra": extra}):
                waiting += [(required.name, each) for each in ("", *required.extras)]
    return sizes


def main(argument: str) -> None:
    """Print the sizes, the largest first."""
    path = Path(argument)
    lines = path.read_text().splitlines() if path.exists() else [argument]
    sizes = closure(Requirement(line) for line in lines if line and not line.startswith("#"))
    for name, size in sorted(sizes.items(), key=lambda each: -each[1]):
        print(f"{size / 1e6:9.1f}  {name}")
    apart = sum(size for name, size in sizes.items() if name.startswith(TORCH))
    rest = sum(sizes.values()) - apart
    print(f"{rest / 1e6:9.1f}  in all, and torch's {apart / 1e6:.0f} apart")


if __name__ == "__main__":
    main(sys.argv[1])
