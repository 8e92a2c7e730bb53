"""`flwr-serverapp`, with the same options, patched in `flower_adapter/serverapp.py`."""

from flower_adapter.serverapp import main

if __name__ == "__main__":
    main()
