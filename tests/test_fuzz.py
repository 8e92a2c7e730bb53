"""A short run of the fuzzer, and that it would notice a crash."""

import os
import re

import pytest
import tools.fuzz
from tools.fuzz import in_child, kinds


def test_a_few_hundred_mutated_inputs_of_every_kind_crash_nothing(capfd):
    outcomes = in_child("unit", 20 * len(kinds), None)
    assert outcomes.keys() == set(kinds)
    for kind, found in outcomes.items():
        assert found["inputs"] == 20
        assert not found["crashes"], (kind, capfd.readouterr().out)


@pytest.mark.end_to_end
def test_a_crash_and_a_process_that_dies_are_counted(monkeypatch, capfd, tmp_path):
    def read(path):
        if "site-a" not in path.read_text():
            raise KeyError(path.name)
        return True

    monkeypatch.setattr(tools.fuzz, "read_saved_roster", read)
    monkeypatch.setattr(tools.fuzz, "max_seconds", 60.0)
    outcomes = in_child("unit", 20 * len(kinds), tmp_path)
    assert outcomes["roster"]["crashes"] == len(list(tmp_path.glob("roster-*"))) > 0
    assert re.search("roster, unit/[0-9]+: KeyError: 'roster.json'", capfd.readouterr().out)
    monkeypatch.setattr(tools.fuzz, "read_saved_roster", lambda path: os._exit(9))
    assert in_child("unit", 20, None)["process"]["crashes"] == 1
