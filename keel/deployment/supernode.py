"""`flower-supernode`, with the same options, patched in `protocol/flower_compat/supernode.py`."""

from protocol.flower_compat.supernode import main

if __name__ == "__main__":
    main()
