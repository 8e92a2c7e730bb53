"""The command line of `keel doctor`."""

from deployment_fixtures import doctor


def test_inside_checks_only_where_the_code_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("KEEL_HOME", str(tmp_path))
    monkeypatch.setenv("KEEL_DEVICE", "cpu")
    monkeypatch.setenv("KEEL_SOURCE", f"folder:{tmp_path / 'nothing'}")
    monkeypatch.delenv("KEEL_WORKER", raising=False)
    status, lines = doctor("client", "--inside")
    assert [line.split(":")[0] for line in lines] == [
        *("ok       versions", "ok       disk", "ok       device", "PROBLEM  data", "1 problem"),
    ]
    assert status == 1
    status, lines = doctor("server", "--inside", "--code", "f" * 16)
    assert lines[0].startswith("PROBLEM  versions: Keel's client code is")
    assert "f" * 16 in lines[0]
    status, lines = doctor("server", "--credentials", str(tmp_path))
    assert status == 2
    assert "--credentials and --fleet are required" in " ".join(lines)


def test_without_a_machine_it_checks_this_one_for_simulation(tmp_path, monkeypatch):
    monkeypatch.setenv("KEEL_HOME", str(tmp_path))
    status, lines = doctor()
    assert (status, lines[-1]) == (0, "no problems found"), lines
    starts = [line.removeprefix("ok       ").split()[0] for line in lines[:-1]]
    assert starts == [
        *("versions:", "device:", "disk:", "memory:", "Ray", "entry", "caches:", "data"),
    ]
