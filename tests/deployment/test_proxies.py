"""Processes of Keel ask no proxy for this machine or for the containers beside them."""

from urllib.request import proxy_bypass_environment

import pytest

from keel.deployment import proxy_exceptions


@pytest.mark.parametrize(
    "before",
    [
        {"http_proxy": "http://p:1"},
        {"HTTPS_PROXY": "http://p:1", "NO_PROXY": "example.org"},
        {"grpc_proxy": "http://p:1", "no_proxy": "example.org", "no_grpc_proxy": "a.org"},
    ],
)
def test_loopback_and_the_names_of_compose_are_exempt_and_nothing_else(before):
    found = proxy_exceptions(before)
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        exempt = {"no": found[name]}
        for host in ("localhost", "127.0.0.1", "::1", "supernode", "superlink"):
            assert proxy_bypass_environment(host, exempt)
        assert not proxy_bypass_environment("fl.example.com", exempt)
        own = before.get(name) or before.get("no_proxy") or before.get("NO_PROXY") or "localhost"
        assert proxy_bypass_environment(own, exempt)
    assert proxy_exceptions(before | found) == found


@pytest.mark.parametrize("before", [{}, {"http_proxy": ""}, {"no_proxy": "example.org"}])
def test_without_a_proxy_nothing_is_changed(before):
    assert proxy_exceptions(before) == {}
