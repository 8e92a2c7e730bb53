"""`flower-supernode`, with the same options, that asks for work more often.

Flower 1.39 waits 3 seconds between two questions when there was nothing, and 0.5 seconds between
two looks for the reply; neither can be set. Both waits happen in one module, through its name
`time`, which stands here for a clock that never sleeps longer than $KEEL_POLL_S (0.25 seconds).
"""

import os
import sys
import time
from types import SimpleNamespace

import flwr.supernode.start_client_internal as client_loop
from flwr.supernode.cli.flower_supernode import flower_supernode

poll_s = float(os.environ.get("KEEL_POLL_S") or 0.25)


def sleep_at_most(seconds: float) -> None:
    """Wait as asked, but no longer than `poll_s`."""
    time.sleep(min(seconds, poll_s))


def main() -> None:
    """As `flower-supernode`."""
    if vars(client_loop).get("time") is not time:  # another Flower: its own pace, said aloud
        print("supernode: Flower's waits are not where they were; left alone", file=sys.stderr)
    else:
        setattr(client_loop, "time", SimpleNamespace(sleep=sleep_at_most))  # noqa: B010
    flower_supernode()


if __name__ == "__main__":
    main()
