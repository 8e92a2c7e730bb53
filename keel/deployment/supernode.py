"""`flower-supernode`, with the same options, patched in `protocol/flower_compat/supernode.py`."""

import os
import sys

from keel.deployment.credentials import warn_of_certificates
from protocol.flower_compat.supernode import main

if __name__ == "__main__":
    os.umask(0o077)
    warn_of_certificates(sys.argv[1:])
    main()
