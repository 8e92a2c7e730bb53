"""The picture of a run's accuracies and losses."""

import resource
import signal

import pytest

from data.plots import plot_label_distribution, save_png
from server_app.plots import accuracy_figure


def test_losses_have_a_panel_of_their_own_under_the_accuracies():
    accuracies = [("global", [(1, 0.25), (2, 0.5)]), ("personal", [])]
    figure = accuracy_figure(accuracies, "a title", [("supervised", [(1, 2.0), (2, 1.0)])])
    top, bottom = figure.axes
    assert [line.get_ydata().tolist() for line in top.lines] == [[25.0, 50.0]]
    assert [line.get_ydata().tolist() for line in bottom.lines] == [[2.0, 1.0]]
    assert (top.get_ylabel(), bottom.get_ylabel()) == ("accuracy (%)", "loss")
    assert (top.get_title(), bottom.get_xlabel()) == ("a title", "round")


def test_a_dollar_in_a_name_is_a_character(tmp_path):
    hostile = r"$\frac{a$"
    save_png(accuracy_figure([(hostile, [(1, 0.5)])], hostile), tmp_path / "a.png")
    plot_label_distribution([[1, 2]], [hostile, "b"], tmp_path / "b.png")


@pytest.mark.parametrize(
    "draw",
    [
        lambda path: save_png(accuracy_figure([("a", [(1, 0.5)])]), path),
        lambda path: plot_label_distribution([[1, 2]], ["a", "b"], path),
    ],
)
def test_a_full_disk_is_named_and_leaves_the_old_picture(tmp_path, draw):
    path = tmp_path / "a.png"
    draw(path)
    before = path.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with pytest.raises(OSError, match=r"a\.png"):
            draw(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
