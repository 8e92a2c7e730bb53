"""Speed of Keel, as ratios measured within one run: `keel bench`."""
