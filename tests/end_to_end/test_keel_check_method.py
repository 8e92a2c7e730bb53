"""All of `keel check-method` on a sound method."""

from keel.cli.main import main


def test_a_sound_method_passes_all(capsys):
    assert main(["check-method", "fedcka"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "fedcka: all checks pass"
    assert all(line.startswith("pass") for line in lines[:-1])
