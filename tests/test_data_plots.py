import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from data.plots import plot_label_distribution


@pytest.mark.parametrize(("num_clients", "num_classes"), [(1, 2), (100, 10), (60, 100)])
def test_plot_is_written_for_few_and_many(tmp_path, num_clients, num_classes):
    counts = np.random.default_rng(0).integers(0, 500, (num_clients, num_classes))
    path = tmp_path / "new" / "labels.png"
    plot_label_distribution(counts.tolist(), [f"class {k}" for k in range(num_classes)], path)
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.width <= 1800


def test_clients_run_along_x_and_more_samples_are_darker(tmp_path):
    """Client 2 holds all samples, of class 0: the darkest pixels are top right."""
    plot_label_distribution([[0, 0], [0, 0], [9, 0]], ["a", "b"], tmp_path / "labels.png")
    with Image.open(tmp_path / "labels.png") as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    rows, columns = np.nonzero((pixels == [8, 48, 107]).all(axis=2))  # the darkest of Blues
    heat_columns = columns[columns < 0.7 * pixels.shape[1]]  # without the colour bar
    assert len(heat_columns) > 100
    assert heat_columns.min() > 0.4 * pixels.shape[1]
    assert rows[columns < 0.7 * pixels.shape[1]].max() < 0.5 * pixels.shape[0]


@pytest.fixture
def not_rendered(monkeypatch):
    """For tests of what is drawn, not of the file."""
    monkeypatch.setattr(Figure, "savefig", lambda *where, **how: None)


@pytest.mark.parametrize("num_clients", [10, 100, 10_000])
def test_totals_and_axis_names_are_drawn_for_any_number_of_clients(
    tmp_path, monkeypatch, not_rendered, num_clients
):
    """20 of 10,000 clients share a column, which shows their mean."""
    counts = np.random.default_rng(0).integers(0, 9, (num_clients, 5))
    drawn = {}
    stairs = Axes.stairs

    def noted(axes, values, *rest, **options):
        drawn.update(values=values, axes=axes)
        return stairs(axes, values, *rest, **options)

    monkeypatch.setattr(Axes, "stairs", noted)
    plot_label_distribution(counts.tolist(), list("abcde"), tmp_path / "labels.png")
    totals = counts.sum(axis=1)
    heat, below = drawn["axes"].figure.axes[:2]
    assert (heat.get_ylabel(), below.get_ylabel()) == ("class", "samples")
    if num_clients <= 500:
        assert drawn["values"].tolist() == totals.tolist()
        assert below.get_xlabel() == "client"
    else:
        assert len(drawn["values"]) == 500
        assert 20 * drawn["values"].sum() == pytest.approx(totals.sum())
        name = (
            "10,000 clients in the order of their most frequent class; a column is the mean of 20"
        )
        assert below.get_xlabel() == name
    assert len(below.get_xticks()) <= 20


def test_clients_that_share_columns_are_in_the_order_of_their_most_frequent_class(
    tmp_path, monkeypatch, not_rendered
):
    shown = []
    imshow = Axes.imshow

    def noted(axes, counts, **options):
        shown.append(counts)
        return imshow(axes, counts, **options)

    monkeypatch.setattr(Axes, "imshow", noted)
    plot_label_distribution([[9, 0], [0, 9]] * 1000, ["a", "b"], tmp_path / "labels.png")
    assert shown[0].tolist() == [[9.0] * 250 + [0.0] * 250, [0.0] * 250 + [9.0] * 250]
