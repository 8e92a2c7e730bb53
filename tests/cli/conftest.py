"""Shared by the tests of the command line."""

import pytest

from keel.cli.main import main


@pytest.fixture
def refusal(capsys):
    """refusal("run", "lr=x"): the error of such a command, one line; its exit code is 2."""

    def error_of(*words):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        return error

    return error_of
