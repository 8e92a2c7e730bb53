"""Shared by the tests of the doctor's checks."""

from typer.testing import CliRunner

from keel.cli.doctor import app


def result(findings):
    """(whether it is a problem, the text) of the only finding."""
    [finding] = list(findings)
    return finding.is_problem, finding.text


def program(path, script):
    """Write an executable shell script."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def doctor(*words):
    """(exit status, lines) of `keel doctor`."""
    result = CliRunner().invoke(app, words)
    return result.exit_code, result.output.splitlines()
