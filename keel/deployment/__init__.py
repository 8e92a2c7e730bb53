"""Keel on several machines: credentials, registration, health checks, and a local trial.

Its programs, and the Flower processes that they start, send nothing to Flower unless the
environment says so, and ask no proxy for this machine or for a container beside them.
"""

import os
from collections.abc import Mapping

DIRECT = ("localhost", "127.0.0.1", "::1", "superlink", "supernode")  # the last: names in compose


def proxy_exceptions(environ: Mapping[str, str]) -> dict[str, str]:
    """no_proxy, NO_PROXY and gRPC's no_grpc_proxy with `DIRECT` in them; empty without a proxy."""
    proxies = [name for name in environ if name.lower().endswith("_proxy") and environ[name]]
    if not {name.lower() for name in proxies} - {"no_proxy", "no_grpc_proxy"}:
        return {}
    common = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    found = {}
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        hosts = environ.get(name) or common
        missing = [host for host in DIRECT if host not in hosts.split(",")]
        found[name] = hosts if hosts == "*" else ",".join(filter(None, [hosts, *missing]))
    return found


# set before Flower is imported, which reads the first variable then
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.update(proxy_exceptions(os.environ))
