"""`python -m keel` is the command `keel`."""

import sys

from keel.cli.main import main

sys.exit(main())
