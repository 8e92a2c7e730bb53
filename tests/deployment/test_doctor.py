"""The command line of `keel doctor`."""

from deployment_fixtures import doctor

from client_app import site_privacy


def test_inside_checks_only_where_the_code_runs(home, monkeypatch):
    monkeypatch.setenv("KEEL_DEVICE", "cpu")
    monkeypatch.setenv("KEEL_SOURCE", f"folder:{home / 'nothing'}")
    monkeypatch.delenv("KEEL_WORKER", raising=False)
    status, lines = doctor("client", "--inside")
    assert [line.split(":")[0] for line in lines] == [
        *("ok       versions", "ok       disk", "ok       device", "PROBLEM  data"),
        *("ok       privacy limits", "skipped  worker", "1 problem"),
    ]
    assert status == 1
    status, lines = doctor("server", "--inside", "--code", "f" * 16)
    assert lines[0].startswith("PROBLEM  versions: Keel's client code is")
    assert "f" * 16 in lines[0]
    status, lines = doctor("server", "--credentials", str(home))
    assert status == 2
    assert "--credentials and --fleet are required" in " ".join(lines)


def test_what_it_cannot_check_it_says(home, monkeypatch):
    """Without containers no variable names data and worker: "no problems found" was all it said."""
    monkeypatch.delenv("KEEL_SOURCE", raising=False)
    monkeypatch.delenv("KEEL_WORKER", raising=False)
    _, lines = doctor("client", "--inside", "--device", "cpu", "--classes", "cat,dog")
    assert "skipped  data: neither --source nor KEEL_SOURCE names it" in lines
    found = "skipped  worker: neither --worker nor KEEL_WORKER names its socket"
    assert found in lines


def test_privacy_limits_of_the_environment(home, monkeypatch):
    """With a limit that cannot be read the worker starts, and refuses every run."""
    asked = ("client", "--inside", "--device", "cpu")
    for name in site_privacy.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    none = "ok       privacy limits: none in the environment"  # lost with a deployment, maybe
    assert none in doctor(*asked)[1]
    monkeypatch.setenv("KEEL_PRIVACY_MAX_CLIP_NORM", "1")
    assert "ok       privacy limits: KEEL_PRIVACY_MAX_CLIP_NORM = 1" in doctor(*asked)[1]
    monkeypatch.setenv("KEEL_PRIVACY_BUDGET_EPSILON", "8")
    found = "ok       privacy limits: epsilon 0 of 8 is spent, at delta 1e-05"
    assert found in doctor(*asked)[1]
    monkeypatch.setenv("KEEL_PRIVACY_BUDGET_EPSILON", "8,0")
    status, lines = doctor(*asked)
    (line,) = [line for line in lines if line.startswith("PROBLEM")]
    found = "KEEL_PRIVACY_BUDGET_EPSILON = '8,0' of this site: expected a number > 0"
    assert line == f"PROBLEM  privacy limits: {found}"
    assert status == 1
    monkeypatch.setenv("KEEL_PRIVACY_BUDGET_EPSILON", "8")
    misspelt = "KEEL_PRIVACY_" + "BUGDET"  # in two parts: no variable to document
    monkeypatch.setenv(misspelt, "8")
    assert any(
        line.startswith(f"PROBLEM  privacy limits: {misspelt}: unknown privacy limit")
        for line in doctor(*asked)[1]
    )


def test_without_a_machine_it_checks_this_one_for_simulation(home):
    status, lines = doctor()
    assert (status, lines[-1]) == (0, "no problems found"), lines
    starts = [line.removeprefix("ok       ").split()[0] for line in lines[:-1]]
    found = "versions: device: disk: memory: Ray entry caches: data"
    assert starts == found.split()
