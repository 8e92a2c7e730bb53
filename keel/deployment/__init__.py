"""Keel on several machines: credentials, registration, health checks, and a local trial.

Its programs, and the Flower processes that they start, send nothing to Flower unless the
environment says so.
"""

import os

# set before Flower is imported, which reads the first variable then
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
