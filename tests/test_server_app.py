"""The ServerApp as Flower calls it: overrides in, one line for a mistake, a bounded wait."""

import logging
from types import SimpleNamespace

import pytest
import server_app.federation
import torch
from flwr.app import Context, RecordDict

import client_app.app
from server_app.app import SUPERLINK_TIMEOUT_S, log_to_stdout, main
from server_app.inline import InlineGrid, simulated_nodes
from strategies import Average


@pytest.fixture(autouse=True)
def own_log_handlers():
    logger = logging.getLogger("keel")
    before = list(logger.handlers), logger.level, logger.propagate
    logger.handlers.clear()
    logger.propagate = True  # or pytest gives it handlers
    yield logger
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


class Grid(InlineGrid):
    """An inline grid with the keys of `flwr run`, and a SuperLink to retry."""

    def __init__(self, keys):
        super().__init__(client_app.app.app, simulated_nodes(2))
        self.keys = keys
        self._retry_invoker = SimpleNamespace(
            max_time=None, should_giveup=lambda error: False, invoke=None
        )

    @property
    def run(self):
        return SimpleNamespace(override_config=self.keys)


context = Context(1, 1, {}, RecordDict(), {})


def test_a_run_uses_the_overrides_prints_a_line_a_round_and_the_table(
    no_pictures, tmp_path, capsys
):
    keys = {"model": "cnn-fedreco", "num-rounds": 2, "output-dir": str(tmp_path), "run-name": "a"}
    grid = Grid(keys | {"local-epochs": 0})
    main(grid, context)
    shown = capsys.readouterr().out
    assert "round 1/2: accuracy " in shown
    assert f"run directory: {tmp_path / 'a'}" in shown
    assert grid._retry_invoker.max_time == SUPERLINK_TIMEOUT_S


def test_a_mistake_is_one_line_without_the_traceback_below(capsys):
    with pytest.raises(RuntimeError, match=r"^method = 'fedavgg' is unknown") as caught:
        main(Grid({"method": "fedavgg"}), context)
    assert caught.value.__suppress_context__
    [line] = capsys.readouterr().out.splitlines()
    assert "error: method = 'fedavgg' is unknown" in line


def test_logging_to_stdout_is_set_up_once(own_log_handlers):
    log_to_stdout()
    log_to_stdout()
    assert len(own_log_handlers.handlers) == 1


def test_a_warning_from_before_there_is_a_directory_is_in_its_log(
    no_pictures, tmp_path, monkeypatch, own_log_handlers
):
    """Such as one on images that are not read: `keel run --engine flower` shows what is there."""
    open_source = server_app.federation.open_source

    def opened(config):
        for level in (logging.INFO, logging.WARNING):
            logging.getLogger("keel.data").log(level, "%d files are not read", level)
        return open_source(config)

    monkeypatch.setattr(server_app.federation, "open_source", opened)
    keys = {"model": "cnn-fedreco", "num-rounds": 1, "output-dir": str(tmp_path), "run-name": "a"}
    main(Grid(keys | {"local-epochs": 0}), context)
    lines = (tmp_path / "a" / "run.log").read_text().splitlines()
    assert [n for n, line in enumerate(lines) if "not read" in line] == [0]
    assert lines[0].endswith(" a WARNING 30 files are not read")
    assert len(own_log_handlers.handlers) == 1  # that of the output


def test_a_server_half_computes_with_the_runs_threads(run, monkeypatch):
    """In a server of its own it had as many as the machine: its sums had other last bits."""
    found, accept, next_arrays = [], Average.accept, Average.next_arrays

    def accepted(self, server_round, message):
        torch.set_num_threads(3)  # inline, the training of a client has set the run's
        accept(self, server_round, message)

    def following(self, current, replies):
        found.append(torch.get_num_threads())
        return next_arrays(self, current, replies)

    monkeypatch.setattr(Average, "accept", accepted)
    monkeypatch.setattr(Average, "next_arrays", following)
    run({"method": "fedavg", "num-rounds": 1, "threads": 2})
    assert found == [2]
