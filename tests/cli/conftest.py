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


@pytest.fixture
def printed(capsys):
    """printed("list"): what such a command prints; its exit code is 0."""

    def output_of(*words):
        assert main(words) == 0
        return capsys.readouterr().out

    return output_of
