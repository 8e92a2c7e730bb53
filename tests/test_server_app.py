"""The ServerApp as Flower calls it: overrides in, one line for a mistake."""

import logging
from types import SimpleNamespace

import pytest
from flwr.app import Context, RecordDict
from grid_fixtures import InlineGrid, simulated_nodes

from server_app.app import SUPERLINK_TIMEOUT_S, main


@pytest.fixture(autouse=True)
def own_log_handlers():
    logger = logging.getLogger("keel")
    logger.handlers.clear()
    logger.propagate = True  # or pytest gives it handlers


class Deployment(InlineGrid):
    """A grid with the keys of `flwr run`, and a SuperLink to retry."""

    def __init__(self, keys):
        super().__init__(simulated_nodes(2))
        self.keys = keys
        self._retry_invoker = SimpleNamespace(
            max_time=None, should_giveup=lambda error: False, invoke=None
        )

    @property
    def run(self):
        return SimpleNamespace(override_config=self.keys)


context = Context(1, 1, {}, RecordDict(), {})
KEYS = {"model": "cnn-fedreco", "num-rounds": 2, "local-epochs": 0, "run-name": "a"}


def test_a_run_uses_the_overrides_prints_a_line_a_round_and_the_table(
    no_pictures, tmp_path, capsys
):
    grid = Deployment(KEYS | {"output-dir": str(tmp_path)})
    main(grid, context)
    shown = capsys.readouterr().out
    assert "round 1/2: accuracy " in shown
    assert f"run directory: {tmp_path / 'a'}" in shown
    assert grid._retry_invoker.max_time == SUPERLINK_TIMEOUT_S


def test_a_mistake_is_one_line_without_the_traceback_below_and_leaves_no_folder(tmp_path, capsys):
    output = {"output-dir": str(tmp_path / "runs")}
    with pytest.raises(RuntimeError, match="fedavgg") as caught:
        main(Deployment({"method": "fedavgg"} | output), context)
    assert caught.value.__suppress_context__
    [line] = capsys.readouterr().out.splitlines()
    assert "error: method = 'fedavgg'" in line
    assert not (tmp_path / "runs").exists()
