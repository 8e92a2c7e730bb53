"""`flower-superexec`, with the same options, patched in `protocol/flower_compat/superexec.py`."""

from protocol.flower_compat.superexec import main

if __name__ == "__main__":
    main()
