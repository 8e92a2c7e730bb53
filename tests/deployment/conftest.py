"""Shared by the tests of deployments."""

import pytest

from keel.deployment.credentials import make_credentials


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Credentials of a server and two clients, not to be changed."""
    folder = tmp_path_factory.mktemp("made")
    make_credentials(folder, ["fl.example.org", "10.1.2.3"], ["site-a", "site-b"])
    return folder
