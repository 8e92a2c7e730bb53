"""`python -m server_app.status` works until Keel 0.3; `keel status [RUN]` replaces it."""

import os
import sys

if __name__ == "__main__":
    print("python -m server_app.status works until Keel 0.3; use: keel status", file=sys.stderr)
    os.execv(sys.executable, [sys.executable, "-m", "keel", "status", *sys.argv[1:]])
