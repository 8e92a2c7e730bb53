"""Keel on several machines: credentials, registration, health checks, and a local trial.

Its programs, and the Flower processes that they start, send nothing to Flower unless the
environment says so.
"""

import os

# before any of them imports Flower, which reads the first variable then
for _name, _value in (("FLWR_TELEMETRY_ENABLED", "0"), ("FLWR_DISABLE_UPDATE_CHECK", "1")):
    os.environ.setdefault(_name, _value)
