"""What both halves of Keel agree on: the typed run config and the layout of every message."""
