"""`flower-superlink`, with the same options, patched in `protocol/flower_compat/superlink.py`."""

from protocol.flower_compat.superlink import main

if __name__ == "__main__":
    main()
