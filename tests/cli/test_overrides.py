"""Words of the command line become typed overrides; mistakes are named all at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.cli.main import main
from keel.cli.overrides import parse_overrides
from protocol.config import default_config


def test_values_need_no_quotes_and_take_their_defaults_type():
    words = ["method=fedcka", "alpha=1", "flip=true", "source=folder:/a=b c", "num-rounds=1_000"]
    found = parse_overrides([*words, "fedreco.k-u='20 steps'", "norm="])
    expected = {
        **{"method": "fedcka", "alpha": 1.0, "flip": True, "source": "folder:/a=b c"},
        **{"num-rounds": 1000, "fedreco.k-u": "20 steps", "norm": ""},
    }
    assert found == expected
    assert [*map(type, found.values())] == [*map(type, expected.values())]


@given(st.data())
def test_every_default_can_be_written_as_a_word(data):
    defaults = default_config()
    key = data.draw(st.sampled_from(sorted(defaults)))
    value = defaults[key]
    word = f"{key}={str(value).lower() if isinstance(value, bool) else value}"
    assert parse_overrides([word]) == {key: value}


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("mehtod=fedcka", "did you mean method?"),
        ("fedcka.muu=1", "did you mean fedcka.mu?"),
        ("METHOD=fedcka", "did you mean method?"),
        ("method=FEDCKA", "did you mean fedcka?"),
        ("preset=fedcka", "did you mean fedcka-table1-cifar10?"),
        ("partition=dirichelt", "did you mean dirichlet?"),
        ("diagnostics=drift,cka-globl", "did you mean cka-global?"),
        ("source=fodler:/x", "folder:PATH"),
        ("tracker=mlfow", "tracker = 'mlfow'"),
        ("num-rounds=ten", "num-rounds = 'ten'"),
        ("num-rounds=1.5", "num-rounds = '1.5'"),
        ("flip=maybe", "flip = 'maybe'"),
        ('alpha="0.1"', 'alpha = "0.1"'),
        ("fedcka", "KEY=VALUE"),
        ("=", "KEY=VALUE"),
    ],
)
def test_what_the_user_sees_of_a_mistake(word, named, capsys):
    assert main(["run", word]) == 2
    seen = capsys.readouterr()
    assert named in seen.err
    assert (seen.err.count("\n"), seen.out) == (1, "")


def test_several_mistakes_are_named_at_once(refusal):
    line = refusal("run", "alpha=abc", "flipp=true", "alpha=1")
    assert all(key in line for key in ("alpha", "flipp"))
    line = refusal("run", "num-rounds=0", "lr=-1", "batch-size=0")
    assert all(text in line for text in ("num-rounds = 0", "lr = -1", "batch-size = 0"))
    line = refusal("run", "preset=nope", "lr=-1")  # by which lr is judged
    assert "preset" in line
    assert "lr" not in line


@pytest.mark.parametrize("word", ["mu=5", "fedcka.tau=1"])
def test_a_hint_never_names_the_option_of_another_method(word, refusal):
    assert "fedcka" in (line := refusal("run", "method=fedcka", word))
    assert "fedlc" not in line
