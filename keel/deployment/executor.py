"""`flower-superexec`, with the same options, patched in `flower_adapter/superexec.py`."""

import os

from flower_adapter.superexec import main

if __name__ == "__main__":
    os.umask(0o077)  # of the ServerApp, too
    main()
