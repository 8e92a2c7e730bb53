"""What guards against slower code, as ratios measured within one run: `python -m tools.bench`."""
