"""Words of the command line become typed overrides; mistakes are named all at once."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.cli.main import main
from keel.cli.overrides import checked_config, parse_overrides
from protocol.catalogue import method_names, method_spec
from protocol.config import (
    DIAGNOSTICS,
    DataConfig,
    ModelConfig,
    PrivacyConfig,
    RoundsConfig,
    TrainConfig,
    default_config,
    presets,
)
from protocol.models import MODELS
from protocol.options import key_of
from protocol.server_optimizers import SERVER_OPTIMIZERS
from protocol.source_spec import SOURCE_NAMES


def test_values_need_no_quotes_and_take_their_defaults_type():
    words = ["method=fedcka", "alpha=1", "flip=true", "source=folder:/data", "num-rounds=3"]
    expected = {
        "method": "fedcka",
        "alpha": 1.0,
        "flip": True,
        "source": "folder:/data",
        "num-rounds": 3,
    }
    found = parse_overrides(words)
    assert found == expected
    assert {key: type(value) for key, value in found.items()} == {
        key: type(value) for key, value in expected.items()
    }


def test_toml_quotes_work_too():
    assert parse_overrides(['method="fedcka"', "fedreco.k-u='20 steps'"]) == {
        "method": "fedcka",
        "fedreco.k-u": "20 steps",
    }
    assert parse_overrides(["source=folder:/a=b c"]) == {"source": "folder:/a=b c"}
    assert parse_overrides(["norm="]) == {"norm": ""}


@given(st.data())
def test_every_default_can_be_written_as_a_word(data):
    defaults = default_config()
    key = data.draw(st.sampled_from(sorted(defaults)))
    value = defaults[key]
    word = f"{key}={str(value).lower() if isinstance(value, bool) else value}"
    assert parse_overrides([word]) == {key: value}


MISTAKES = {
    "mehtod=fedcka": "config key = 'mehtod' is unknown; did you mean method?",
    "fedcka.muu=1": "config key = 'fedcka.muu' is unknown; did you mean fedcka.mu?",
    "num-rounds=ten": "num-rounds = 'ten': expected a whole number",
    "num-rounds=1.5": "num-rounds = '1.5': expected a whole number",
    "flip=maybe": "flip = 'maybe': expected true or false",
    "partition=dirichelt": (
        "partition = 'dirichelt': expected one of iid, dirichlet, dirichlet-balanced, classes, "
        "shards; did you mean dirichlet?"
    ),
    "source=digit": "source = 'digit': expected one of digits, ",
    "source=fodler:/x": "source = 'fodler:/x': expected one of ",
    "tracker=mlfow": "tracker = 'mlfow': expected none, or some of ",
    "diagnostics=drift,cka-globl": "diagnostics = 'cka-globl' is unknown; did you mean cka-global?",
    'alpha="0.1"': 'alpha = "0.1": expected a number, found a string',
    "METHOD=fedcka": "config key = 'METHOD' is unknown; did you mean method?",
    "FEDCKA.mu=1": "config key = 'FEDCKA.mu' is unknown; did you mean fedcka.mu?",
    "method=FEDCKA": "method = 'FEDCKA' is unknown; did you mean fedcka?",
    "preset=fedcka": "preset = 'fedcka' is unknown; did you mean fedcka-table1-cifar10?",
    "fedcka": "'fedcka': expected KEY=VALUE, such as method=fedintr",
}


@pytest.mark.parametrize(("word", "line"), MISTAKES.items())
def test_what_the_user_sees_of_a_mistake(word, line, capsys):
    assert main(["run", word]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"error: {line}")
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_spaces_around_the_equals_sign_are_named(refusal):
    assert refusal("run", "lr", "=", "0.1") == "error: write KEY=VALUE without spaces around =\n"


def enumerated_options():
    """(key, a name that it accepts) of every config key that accepts names."""
    tables = [(cls, "") for cls in (RoundsConfig, DataConfig, ModelConfig, TrainConfig)]
    tables += [(PrivacyConfig, "privacy.")]
    tables += [(method_spec(name).options, f"{name}.") for name in method_names()]
    tables += [(options, f"{name}.") for name, options in SERVER_OPTIMIZERS.items()]
    fields = [(f, prefix) for cls, prefix in tables for f in dataclasses.fields(cls)]
    found = {p + key_of(f): f.metadata["constraint"].choices for f, p in fields}
    found |= {"source": SOURCE_NAMES, "method": method_names(), "model": MODELS}
    found |= {"preset": tuple(presets()), "server-optimizer": tuple(SERVER_OPTIMIZERS)}
    found |= {"client-models": MODELS, "diagnostics": DIAGNOSTICS}
    return [(key, max(names, key=len)) for key, names in found.items() if names]


@pytest.mark.parametrize(("key", "name"), enumerated_options())
def test_a_misspelt_name_is_answered_with_the_nearest(key, name):
    near = name.partition(":")[0]
    misspelt = name.replace(near, near[:-2] + near[-1])
    with pytest.raises(ValueError, match=f"^{re.escape(key)} = .*did you mean {near}"):
        checked_config({key: misspelt})


def test_several_mistakes_are_named_at_once(refusal):
    line = refusal("run", "alpha=abc", "flipp=true", "alpha=1")
    assert "alpha = 'abc': expected a number" in line
    assert "'flipp' is unknown; did you mean flip?" in line
    line = refusal("run", "num-rounds=0", "lr=-1", "batch-size=0")
    assert all(text in line for text in ("num-rounds = 0", "lr = -1", "batch-size = 0"))


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_the_default_that_replaces_a_mistake_adds_no_mistake(beta):
    """fedntd.beta is 1 by default, which the convex form refuses too."""
    keys = {"method": "fedntd", "fedntd.convex": True, "fedntd.beta": beta}
    with pytest.raises(ValueError, match=rf"^fedntd.beta = {beta} with") as error:
        checked_config(keys)
    assert " | " not in str(error.value)
    with pytest.raises(ValueError, match=r"lr = -1.*fedntd.beta|fedntd.beta.*lr = -1"):
        checked_config({"lr": -1.0, **keys})


def test_a_mistake_that_others_are_judged_by_is_named_alone():
    with pytest.raises(ValueError, match=r"^preset = 'nope' is unknown") as error:
        checked_config({"preset": "nope", "lr": -1.0})
    assert " | " not in str(error.value)


def test_underscores_in_numbers_are_those_of_toml():
    assert parse_overrides(["num-rounds=1_000"]) == {"num-rounds": 1000}


def test_the_same_key_twice_is_a_mistake():
    with pytest.raises(ValueError, match="alpha is set twice"):
        parse_overrides(["alpha=1", "alpha=2"])


@pytest.mark.parametrize(
    ("assignments", "hint"),
    [
        (["method=fedcka", "mu=5"], "config key = 'mu' is unknown; did you mean fedcka.mu?"),
        (["method=fedcka", "fedcka.tau=1"], "'fedcka.tau' is unknown"),
    ],
)
def test_a_hint_never_names_the_option_of_another_method(assignments, hint):
    with pytest.raises(ValueError, match=re.escape(hint)) as error:
        parse_overrides(assignments)
    assert "fedlc" not in str(error.value)
