"""One contract over all methods: their declarations, limits, and the checks of authors.

Nothing here lists a method: a new file in client_app/methods is tested as it is added.
"""

from pathlib import Path

import pytest
from client_fixtures import (
    assert_same_bits,
    differ,
    initial,
    make_config,
    subject_of,
    train,
)
from method_fixtures import METHODS

import client_app.objective
import strategies
from client_app.methods import method_of
from keel.method_checks import CHECKS
from keel.method_subject import NotApplicable
from strategies import Average, server_half

each_method = pytest.mark.parametrize("name", METHODS)
WITH_RUNS = {  # of whole runs: those of tests/end_to_end are of one method
    "same seed, same bits",
    "resumed run equals uninterrupted run",
    "first round equals FedAvg",
    "capability flags are consistent",
}


@each_method
def test_a_method_passes_the_checks_of_check_method(name):
    for text, check in CHECKS.items():
        if text not in WITH_RUNS:
            try:
                check(subject_of(name))
            except NotApplicable:
                continue


def test_a_flag_may_follow_an_option():
    private = method_of(make_config(method="fedbabu", fedbabu__fedper_like=True))
    assert private.is_stateful
    assert not private.has_global_model
    assert not METHODS["fedbabu"].is_stateful
    assert METHODS["fedbabu"].has_global_model


@each_method
def test_the_server_half_is_its_own_file_or_the_average(name):
    own = Path(strategies.__file__).parent / f"{name.replace('-', '_')}.py"
    assert own.is_file() == METHODS[name].has_own_server_half
    assert (server_half(METHODS[name]) is Average) != own.is_file()


LIMITS = [
    *((n, {}) for n, cls in METHODS.items() if cls.equals_fedavg_at),
    *((n, {f"{n}__projection": "mlp-side"}) for n in ("moon", "fedcka")),
]


@pytest.mark.parametrize("is_computed", [False, True])
@pytest.mark.parametrize(("name", "form"), LIMITS)
def test_at_its_limit_a_method_is_fedavg_to_the_bit(name, form, is_computed, monkeypatch):
    """Training leaves the penalty out there; computed, it changes only the norm that clips."""
    keys = {"batch_size": 10, "local_epochs": 2}
    if is_computed:
        monkeypatch.setattr(client_app.objective, "is_at_limit", lambda objective: False)
    else:
        keys |= {"clip_norm": 0.2, "weight_decay": 0.001}
    plain = make_config(**keys)
    received = initial(make_config(method=name, **form))
    fedavg = train(plain, received={key: received[key] for key in initial(plain)}).arrays

    def trained(**options):
        config = make_config(method=name, **keys, **form, **options)
        state = {"previous": initial(config, seed=5)} if METHODS[name].is_stateful else {}
        return train(config, received=received, state=state).arrays

    at_limit = {f"{name}__{k}": value for k, value in METHODS[name].equals_fedavg_at.items()}
    assert_same_bits(trained(**at_limit), fedavg, names=fedavg)
    assert differ(fedavg, trained())
