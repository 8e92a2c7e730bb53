"""`flwr-serverapp`, with the same options, patched in `protocol/flower_compat/serverapp.py`."""

from protocol.flower_compat.serverapp import main

if __name__ == "__main__":
    main()
