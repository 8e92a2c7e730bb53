"""What a label means is decided by names, at every site and for every source; who has none is told.

Deployments in this process: their sites have data of their own, the server may have none.
"""

import json
import logging

import numpy as np
import pytest
from data_fixtures import make_folder, save_image
from grid_fixtures import InlineGrid, run_on

from client_app.node_config import labels_in_run
from client_app.setup import open_site
from protocol.config import resolve_config
from protocol.options import ConfigError
from server_app.load_model import load_model
from server_app.run_reader import ROSTER_FILE, RunReader
from server_app.sites import keys_of_sites

pytestmark = pytest.mark.end_to_end  # they train whole runs

NAMES = ("cat", "dog", "eel")
KEYS = {
    "model": "cnn-fedreco",
    "num-rounds": 1,
    "lr": 0.05,
    "image-size": 32,
    "channels": 1,
    "device": "cpu",
}


def pictures(label, num, seed=0):
    """Noise with a bright bar in the label's place, uint8 [N, 32, 32]."""
    images = np.random.default_rng(9 * label + seed).integers(0, 60, (num, 32, 32), dtype=np.uint8)
    images[:, :, 10 * label : 10 * label + 10] += 180
    return images


def folder(root, labels=(0, 1, 2), names=NAMES, num=6):
    for split, seed in (("train", 1), ("test", 2)):
        for label in labels:
            for i, pixels in enumerate(pictures(label, num, seed)):
                save_image(root / split / names[label] / f"{i}.png", pixels)
    return f"folder:{root}"


def npz(path, pairs, **more):
    """Images of class `label` under the label that the file has for it, for each pair of both."""
    x = np.concatenate([pictures(label, 6, 3) for label, _ in pairs])
    y = np.repeat([own for _, own in pairs], 6)
    np.savez(path, x_train=x, y_train=y, x_test=x[::3], y_test=y[::3], **more)
    return f"npz:{path}"


def site(name, source, **more):
    return {"name": name, "source": source, **more}


@pytest.fixture
def deployment(tmp_path):
    """Runs a deployment of these sites; returns (roster by client, directory)."""

    def run(*sites, **keys):
        given = KEYS | {"output-dir": str(tmp_path), "num-clients": len(sites)}
        given |= {key.replace("_", "-"): value for key, value in keys.items()}
        grid = InlineGrid(sites)
        path = run_on(grid, given | keys_of_sites(grid, given))
        rows = json.loads((path / ROSTER_FILE).read_text())
        return {row["client"]: row for row in rows}, path

    return run


def test_an_npz_file_without_names_takes_part_only_where_they_are_given(
    deployment, tmp_path, caplog
):
    server, a = folder(tmp_path / "server"), folder(tmp_path / "a")
    shifted = npz(tmp_path / "b.npz", [(0, 1), (1, 2)])
    with pytest.raises(ValueError, match=r"site-b.*'1'"):
        deployment(site("site-a", a), site("site-b", shifted), source=server)
    with pytest.raises(ValueError, match=r"site-b\b.* classes = ") as refusal:
        deployment(site("site-a", a), site("site-b", shifted, classes="1=cat"), source=server)
    assert "ConfigError" not in str(refusal.value)
    named = site("site-b", shifted, classes="1=cat,2=dog")
    with caplog.at_level(logging.INFO, logger="keel.client"):
        roster, path = deployment(site("site-a", a), named, source=server)
    meaning = "site-b: labels and training samples: 1 = cat (6), 2 = dog (6), eel (0)"
    worker = [record.message for record in caplog.records if record.name == "keel.client"]
    assert f"client {meaning}" in worker
    assert any("site-b" in line and "x_test[0]" in line for line in worker)  # also in train
    assert roster["site-b"]["label_counts"] == [6, 6, 0]
    assert roster["site-b"]["own_labels"] == ["1", "2", ""]
    log = (path / "run.log").read_text()
    assert meaning in log
    assert "x_test[0]" not in log  # may name files of the site
    assert "site-a: labels and training samples: cat (6), dog (6), eel (6)" in log


@pytest.mark.parametrize(
    ("pairs", "names"),
    [
        *(
            ([(0, 0), (1, 1)], {"classes": np.array(classes)})
            for classes in (
                *(["cat", "dog", "eel"], [b"cat", b"dog"], ["0=cat", "1=dog"]),
                ["1=dog", "0=cat", "7=yak"],
            )
        ),
        ([(2, "eel"), (0, "cat")], {}),  # labels may be names themselves
    ],
)
def test_the_names_may_stand_in_the_file(tmp_path, pairs, names):
    own = open_site(resolve_config(KEYS), npz(tmp_path / "b.npz", pairs, **names), "", ())
    expected = np.repeat([label for label, _ in pairs], 6)
    assert np.array_equal(labels_in_run(own, NAMES)[own.train.labels], expected)


def test_numbers_are_matched_with_names_as_text(deployment, tmp_path):
    """Labels 1, 2, 3 in a run whose classes are called that, and a site that lacks the first."""
    server = folder(tmp_path / "server", names=("1", "2", "3"))
    all_three = npz(tmp_path / "a.npz", [(0, 1), (1, 2), (2, 3)])
    two = npz(tmp_path / "b.npz", [(2, 3), (1, 2)])
    roster, _ = deployment(site("site-a", all_three), site("site-b", two), source=server)
    assert roster["site-a"]["label_counts"] == [6, 6, 6]
    assert roster["site-b"]["label_counts"] == [0, 6, 6]


def test_a_class_of_another_spelling_is_refused_with_the_nearest(deployment, tmp_path):
    server, own = folder(tmp_path / "server"), folder(tmp_path / "a", names=("Cat", "dog", "eel"))
    with pytest.raises(ValueError, match=r"site-a.*'Cat'.*did you mean cat"):
        deployment(site("site-a", own), source=server)


def test_names_of_one_spelling_in_two_unicode_forms_are_one(tmp_path):
    composed, decomposed = (
        "caf\N{LATIN SMALL LETTER E WITH ACUTE}",
        "cafe\N{COMBINING ACUTE ACCENT}",
    )
    spec = folder(tmp_path / "a", labels=(0, 1), names=(decomposed, "dog"))
    own = open_site(resolve_config(KEYS), spec, "", ())
    assert labels_in_run(own, ["dog", composed]).tolist() == [1, 0]
    assert labels_in_run(own, [composed, "dog", decomposed]).tolist() == [2, 1]


@pytest.mark.parametrize("classes", ["cat", "1=cat,3=dog", "1=cat,2=cat", "1=cat,2=", '["1=cat"'])
def test_names_that_do_not_name_each_label_are_refused(tmp_path, classes):
    spec = npz(tmp_path / "b.npz", [(0, 1), (1, 2)])
    with pytest.raises(ConfigError) as refusal:
        open_site(resolve_config(KEYS), spec, classes, ())
    assert refusal.value.key == "classes"


def test_a_server_without_images_takes_classes_and_shape_from_the_first_site(deployment, tmp_path):
    first, second = folder(tmp_path / "a"), npz(tmp_path / "b.npz", [(1, 1), (2, 2)])
    sites = site("site-b", second, classes="1=dog,2=eel"), site("site-a", first)
    roster, path = deployment(
        *sites, source="sites", normalise="half", image_size=0, channels=0, model="cnn-fedreco"
    )
    assert roster["site-b"]["label_counts"] == [0, 6, 6]
    run = RunReader(path)
    assert run.history[0]["local_global"]["mean"] >= 0
    assert "global" not in run.history[0]
    model = load_model(path)
    assert model.class_names == NAMES
    assert model.network.input_shape == (1, 32, 32)
    assert run.config["classes"] == '["cat", "dog", "eel"]'


def test_a_server_without_images_trains_the_same_model_as_one_with_them(deployment, tmp_path):
    own = site("site-a", folder(tmp_path / "a", num=8)), site("site-b", folder(tmp_path / "b"))
    keys = {"normalise": "half", "evaluate_clients": "all"}
    _, with_images = deployment(*own, source=folder(tmp_path / "server"), **keys)
    _, without = deployment(*own, source="sites", classes="cat,dog,eel", **keys)
    models = [load_model(path).network.state_dict() for path in (with_images, without)]
    assert all((models[0][name] == array).all() for name, array in models[1].items())


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        ("normalise", {"classes": "cat,dog,eel"}),
        ("classes", {"normalise": "half", "privacy.metrics": "withheld", "privacy.epsilon": 0.5}),
        ("image-size", {"normalise": "half", "classes": "cat,dog,eel", "image_size": 0}),
        ("diagnostics", {"normalise": "half", "classes": "cat,dog,eel", "diagnostics": "all"}),
    ],
)
def test_what_a_server_without_images_has_to_be_told(deployment, tmp_path, key, keys):
    with pytest.raises(ConfigError) as refusal:
        deployment(site("site-a", folder(tmp_path / "a")), source="sites", **keys)
    assert refusal.value.key == key


def test_a_simulation_needs_a_data_set(run, refusal):
    assert "source = 'sites'" in refusal("run", "source=sites", "--clients", "2")
    keys = {"classes": "a,b", "normalise": "half", "image-size": 32, "channels": 1}
    with pytest.raises(ConfigError) as refused:
        run(keys | {"source": "sites"})
    assert refused.value.key == "source"


def test_images_of_16_bits_need_one_window_for_all_sites(deployment, tmp_path):
    deep = [pictures(label, 6).astype(np.uint16) * 16 for label in range(3)]
    images = [pixels for label in range(3) for pixels in deep[label]]
    a = make_folder(tmp_path / "a", [images[i % 3 * 6 + i // 3] for i in range(18)], NAMES)
    keys = {"source": "sites", "classes": "cat,dog,eel", "normalise": "half"}
    with pytest.raises(ValueError, match=r"site-a.*window"):
        deployment(site("site-a", a), **keys)
    _, path = deployment(site("site-a", a), **keys, window="0,4080")
    assert load_model(path).preparation.window == (0, 4080)
