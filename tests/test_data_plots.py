import numpy as np
from PIL import Image

from data.plots import plot_label_distribution


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
