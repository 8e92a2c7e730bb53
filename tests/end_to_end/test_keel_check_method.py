"""All of `keel check-method` on a sound method."""


def test_a_sound_method_passes_all(printed):
    lines = printed("check-method", "fedcka").splitlines()
    assert lines[-1] == "fedcka: all checks pass"
    assert all(line.startswith("pass") for line in lines[:-1])
