"""How fast Keel is, as ratios measured in one run: `make bench`. Figures: docs/results/speed.md."""
