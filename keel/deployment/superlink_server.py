"""`flower-superlink`, with the same options, patched in `protocol/flower_compat/superlink.py`."""

import os
import sys

from keel.deployment.credentials import warn_of_certificates
from protocol.flower_compat.superlink import main
from protocol.processes import return_large_blocks

if __name__ == "__main__":
    return_large_blocks()
    os.umask(0o077)  # the database, among others, is for this user alone
    warn_of_certificates(sys.argv[1:])
    main()
