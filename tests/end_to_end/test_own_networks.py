"""Runs of own networks: the same bits from a cell, a file and on Ray; rectangles; saved weights."""

import hashlib
import json
import subprocess
import sys

import own_fixtures
import pytest
import torch
from own_fixtures import cell
from PIL import Image
from run_fixtures import SMALL, assert_same_run, final_model

import keel
from protocol.options import ConfigError

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(600)]
NET = '''"""Two convolutions and a linear layer."""

import torch


class Net(torch.nn.Module):
    """For any size of images."""

    def __init__(self, num_classes):
        super().__init__()
        self.one, self.two = torch.nn.Conv2d(1, 4, 3), torch.nn.Conv2d(4, 8, 3)
        self.norm, self.head = torch.nn.BatchNorm2d(4), torch.nn.Linear(8, num_classes)

    def forward(self, x):
        x = torch.relu(self.norm(self.one(x)))
        return self.head(torch.relu(self.two(x)).mean((2, 3)))
'''
KEYS = {key: value for key, value in SMALL.items() if key != "model"}
AUGMENTED = {"image-size": "12x20", "flip": True, "crop-padding": 2, "rotation": 10.0}


def trained(folder, model, engine="inline", **keys):
    """A run of two clients on images of 12 x 20 pixels."""
    keys = KEYS | AUGMENTED | {"output-dir": str(folder / "runs")} | keys
    return keel.run(keys, model=model, clients=2, engine=engine, quiet=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The run whose bits others have: the class in a file."""
    folder = tmp_path_factory.mktemp("plain")
    return trained(folder, f"{own_fixtures.file(folder, NET)}:Net")


def test_a_network_has_the_same_bits_from_a_cell_and_on_ray(plain, tmp_path):
    assert_same_run(trained(tmp_path, cell(NET, "Net")).directory, plain.directory)
    mine = own_fixtures.file(tmp_path, NET)
    code = (
        f"import keel; keel.run({KEYS | AUGMENTED!r}, model={str(mine) + ':Net'!r}, "
        f"clients=2, engine='flower', quiet=True, output_dir={str(tmp_path / 'ray')!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    [run] = (tmp_path / "ray").iterdir()
    assert_same_run(run, plain.directory)


def test_a_run_of_an_own_network_goes_on_and_predicts(tmp_path):
    spec = f"{own_fixtures.file(tmp_path, NET)}:Net"
    longer = trained(tmp_path, spec, **{"num-rounds": 3})
    shorter = trained(tmp_path, spec)
    resumed = keel.run(resume=str(shorter.directory), num_rounds=3, quiet=True)
    assert_same_run(resumed.directory, longer.directory)
    model = resumed.model()
    assert model.network.input_shape == (1, 12, 20)
    image = Image.new("L", (20, 12), 200)
    image.save(tmp_path / "x.png")
    assert len(model.of_file(str(tmp_path / "x.png"))) == 10


def test_a_run_starts_from_saved_weights_and_notes_their_digest(tmp_path):
    network = cell(NET, "Net")(num_classes=10)
    file = tmp_path / "w.pt"
    torch.save(network.state_dict(), file)
    keys = {"weights": str(file), "local-epochs": 0, "num-rounds": 1}
    run = trained(tmp_path, cell(NET, "Net"), **keys)
    found = final_model(run.directory)
    assert torch.equal(found["classifier.weight"], network.head.weight)
    manifest = json.loads((run.directory / "manifest.json").read_text())
    assert manifest["weights"] == hashlib.sha256(file.read_bytes()).hexdigest()
    torch.save(cell(NET, "Net")(num_classes=3).state_dict(), file)
    with pytest.raises(ValueError, match="weights"):  # they have changed
        keel.run(resume=str(run.directory), num_rounds=2, quiet=True)
    other = trained(tmp_path, cell(NET, "Net"), **keys)
    assert "head of another width" in (other.directory / "run.log").read_text()
    file.unlink()
    with pytest.raises(ConfigError) as refused:
        trained(tmp_path, cell(NET, "Net"), **keys)
    assert refused.value.key == "weights"
    assert other.model().predict(torch.zeros(1, 12, 20, dtype=torch.uint8).numpy())


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"image-size": "9x513"}, "image-size"),
        ({"normalise": "imagenet"}, "normalise"),
        ({"normalise": "0.5"}, "normalise"),
        ({"optimizer": "adagrad"}, "optimizer"),
        ({"lr-schedule": "linear"}, "lr-schedule"),
    ],
)
def test_other_values_are_refused_by_their_key(tmp_path, keys, key):
    with pytest.raises(ConfigError) as refused:
        trained(tmp_path, cell(NET, "Net"), **keys)
    assert refused.value.key == key
    assert "\n" not in str(refused.value)


def test_pixels_are_normalised_by_given_numbers(tmp_path):
    keys = {"channels": 3, "normalise": "imagenet", "num-rounds": 1, "data-fraction": 0.05}
    net = cell(NET.replace("Conv2d(1,", "Conv2d(3,"), "Net")
    assert trained(tmp_path, net, **keys).model().pixels.mean == (0.485, 0.456, 0.406)
    keys = {"normalise": "0.5,0.25", "num-rounds": 1, "data-fraction": 0.05}
    pixels = trained(tmp_path, cell(NET, "Net"), **keys).model().pixels
    assert (pixels.mean, pixels.std) == ((0.5,), (0.25,))
