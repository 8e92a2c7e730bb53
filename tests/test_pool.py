"""The workers of a simulation: what they are sent, and what becomes of their answers."""

import itertools

import pytest
from flwr.app import Context, Error, Message, RecordDict
from grid_fixtures import InlineGrid, simulated_nodes
from run_fixtures import NUM_CLIENTS, SMALL, assert_same_run, history_of

from client_app.handlers import answer
from flower_adapter import begin_task
from protocol.config import resolve_config
from server_app.experiment import build_experiment
from server_app.inline import run_inline, with_num_clients
from server_app.pool import FlowerWorkers, WorkerPool
from server_app.preflight import checked_machines
from server_app.run import run_federation

pytestmark = pytest.mark.end_to_end  # they start processes

KEYS = SMALL | {"method": "fedintr", "local-test-fraction": 0.2, "evaluate-clients": "all"}


class Workers:
    """This process as several workers, whose answers come last first. lost: places in `answers`."""

    parts = 4

    def __init__(self, num, lost=(), silent=()):
        self.num, self.lost, self.silent = num, lost, silent
        self.calls = itertools.count()
        begin_task(1)
        self.sizes = []

    def answers(self, contents, kind, seconds):
        self.sizes.append(len(contents))
        for k, content in reversed(list(enumerate(contents))):
            number = next(self.calls)
            if number in self.silent:
                continue
            if number in self.lost:
                yield k, Error(0, "the actor died")
                continue
            message = Message(content, dst_node_id=1, message_type=kind)
            yield k, answer(message, Context(1, 1, {}, RecordDict(), {}))


def run_with(workers, keys):
    def make_pool(experiment, resumed):
        config = experiment.config
        return WorkerPool(workers, config, experiment.source, config.rounds.num_clients)

    return run_federation(make_pool, with_num_clients(keys, NUM_CLIENTS)).path


def test_the_bits_do_not_depend_on_the_workers_of_which_one_may_be_lost(tmp_path, no_pictures):
    """An idle worker takes the next message: to train there are four for each."""
    keys = KEYS | {"output-dir": str(tmp_path)}
    inline = run_inline(keys, NUM_CLIENTS)
    for num in (1, 2, NUM_CLIENTS, 20):
        workers = Workers(num)
        assert_same_run(run_with(workers, keys), inline)
        assert workers.sizes == [4, min(num, 4)] * 2  # to train, and to evaluate
    with pytest.raises(RuntimeError, match="the actor died"):
        run_with(Workers(1, lost=[6]), keys | {"run-name": "cut"})  # in round 2
    run_with(Workers(2), {"resume": str(tmp_path / "cut")})
    assert_same_run(tmp_path / "cut", inline)


def test_a_client_without_an_answer_in_time_is_left_out_and_named(tmp_path, no_pictures):
    keys = KEYS | {"num-rounds": 1, "output-dir": str(tmp_path), "round-timeout": 9.0}
    [line] = history_of(run_with(Workers(1, silent=[0]), keys))
    [(client, reason)] = line["left_out"].items()
    assert "round-timeout = 9" in reason
    assert client not in line["participants"]
    assert client in line["evaluation_left_out"]


# --- Flower's simulation --------------------------------------------------------------------------


@pytest.fixture
def simulation(monkeypatch):
    monkeypatch.setattr("server_app.pool.SETTLE_S", 0.01)
    return InlineGrid(simulated_nodes(2))


def test_a_simulation_that_has_ended_ends_the_run(simulation):
    def ended():
        raise RuntimeError("Ray has ended")

    workers = FlowerWorkers(simulation)
    simulation.answer = lambda message: None
    simulation.pull_messages = lambda ids: []
    workers.check = ended
    with pytest.raises(RuntimeError, match="Ray has ended"):
        list(workers.answers([RecordDict()], "query", 60.0))


@pytest.fixture
def experiment():
    return build_experiment(resolve_config(KEYS | {"num-clients": NUM_CLIENTS}))


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        (("client_app.machine.data_digest", lambda source: "other"), "digest other"),
        (("protocol.messages.code_digest", lambda: next(CODES)), "runs code"),
        (("pathlib.Path.read_text", lambda self: "nothing"), "does not see"),
    ],
    ids=["data", "code", "folder"],
)
def test_a_worker_with_other_data_code_or_folders_is_refused(
    patch, words, simulation, experiment, tmp_path, monkeypatch
):
    monkeypatch.setattr("client_app.machine.host_name", lambda: "elsewhere")
    workers = FlowerWorkers(simulation)
    monkeypatch.setattr(*patch)
    with pytest.raises(ValueError, match=words):
        checked_machines(workers, experiment, NUM_CLIENTS, tmp_path)


CODES = itertools.count()
