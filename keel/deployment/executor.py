"""`flower-superexec`, with the same options, patched in `protocol/flower_compat/superexec.py`."""

import os

from protocol.flower_compat.superexec import main

if __name__ == "__main__":
    os.umask(0o077)  # of the ServerApp, too
    main()
