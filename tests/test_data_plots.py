import tracemalloc

import numpy as np
import pytest
from matplotlib.axes import Axes
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


@pytest.mark.parametrize("num_clients", [10, 10_000])
def test_totals_and_axis_names_are_drawn_for_any_number_of_clients(
    tmp_path, monkeypatch, num_clients
):
    counts = np.random.default_rng(0).integers(0, 9, (num_clients, 5))
    drawn = {}
    stairs = Axes.stairs

    def noted(axes, values, *rest, **options):
        drawn.update(values=values, axes=axes)
        return stairs(axes, values, *rest, **options)

    monkeypatch.setattr(Axes, "stairs", noted)
    plot_label_distribution(counts.tolist(), list("abcde"), tmp_path / "labels.png")
    assert drawn["values"].tolist() == [sum(row) for row in counts.tolist()]
    heat, below = drawn["axes"].figure.axes[:2]
    assert (heat.get_ylabel(), below.get_xlabel(), below.get_ylabel()) == (
        *("class", "client", "samples"),
    )
    assert len(below.get_xticks()) <= 20


def test_rows_that_do_not_fit_the_classes_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"\(2, 3\): .* each of the 2 classes"):
        plot_label_distribution([[1, 2, 3], [4, 5, 6]], ["a", "b"], tmp_path / "labels.png")


@pytest.mark.end_to_end
def test_more_clients_than_pixels_take_the_same_memory_and_give_the_same_picture(
    tmp_path, monkeypatch
):
    """Left to itself, matplotlib would resample 2,000 columns as four floats a pixel."""
    names = [f"class {k}" for k in range(10)]
    rng = np.random.default_rng(0)

    def drawn(num_clients):
        counts = np.minimum(rng.geometric(0.05, (num_clients, 10)), 60)
        tracemalloc.start()
        try:
            plot_label_distribution(counts.tolist(), names, tmp_path / "labels.png")
            return counts, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    _, peak = drawn(100)
    counts, peak_of_many = drawn(2000)
    assert peak_of_many < 1.2 * peak
    imshow = Axes.imshow

    def in_colours(axes, counts, **options):
        return imshow(axes, counts.astype(int), **options | {"interpolation_stage": "rgba"})

    monkeypatch.setattr(Axes, "imshow", in_colours)
    plot_label_distribution(counts.tolist(), names, tmp_path / "plain.png")
    with Image.open(tmp_path / "labels.png") as ours, Image.open(tmp_path / "plain.png") as plain:
        assert np.array_equal(np.asarray(ours), np.asarray(plain))
