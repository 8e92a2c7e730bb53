"""The picture of a run's accuracies and losses."""

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
    for name in ("a.png", "b.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
