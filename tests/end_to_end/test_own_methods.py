"""Runs of own methods and networks: the same bits from a cell, a file, a module and on Ray."""

import hashlib
import json
import subprocess
import sys

import own_fixtures
import pytest
import torch
from own_fixtures import PULL, cell
from PIL import Image
from run_fixtures import SMALL, assert_same_run, final_model, same_bits

import keel
from client_app.methods.fedprox import FedProx
from keel.cli.main import main
from keel.saved_runs import OWN_CODE, differing_keys, setting_of
from protocol.code import code_version
from protocol.options import ConfigError
from server_app.run_reader import RunReader

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("no_pictures"),
]
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
HALF = '''

class Damped(keel.ServerHalf):
    """Half a step."""

    def next_arrays(self, current, replies):
        average = super().next_arrays(current, replies)
        return {name: (current[name] + array) / 2 for name, array in average.items()}


@dataclass(frozen=True)
class Slow(FedPull):
    """FedPull whose server takes half a step."""

    server_half: ClassVar[type] = Damped
'''
MU = {"fedpull.mu": 0.3}
AUGMENTED = {"image-size": "12x20", "flip": True, "crop-padding": 2, "rotation": 10.0}
KEYS = {key: value for key, value in SMALL.items() if key != "model"} | AUGMENTED


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    """The method's and the network's specs, in files."""
    folder = tmp_path_factory.mktemp("mine")
    net = own_fixtures.file(folder, NET, "net.py")
    return f"{own_fixtures.file(folder)}:FedPull", f"{net}:Net"


@pytest.fixture(scope="module")
def plain(tmp_path_factory, specs):
    """The run whose bits all others have: the classes in files."""
    return trained(tmp_path_factory.mktemp("plain"), *specs, **MU)


def trained(folder, method, model="cnn-fedreco", **keys):
    """A run of two clients on images of 12 x 20 pixels; of Keel's networks on the digits' own."""
    keys = (SMALL if model == "cnn-fedreco" else KEYS) | keys
    keys |= {"output-dir": str(folder / "runs"), "method": method, "model": model}
    return keel.run(keys, clients=2, quiet=True)


def test_classes_have_the_same_bits_in_cells_files_and_modules(plain, specs, tmp_path, monkeypatch):
    package = own_fixtures.module(tmp_path, monkeypatch)
    runs = [
        trained(tmp_path, cell(PULL)(mu=0.3), cell(NET, "Net")),
        trained(tmp_path, package.FedPull, specs[1], **MU),
        trained(tmp_path, "own_package:FedPull", specs[1], **MU),
    ]
    for run in runs:
        assert_same_run(run.directory, plain.directory)
    assert [run.config["method"].partition(":")[0] for run in runs] == [
        *("own", "own_package", "own_package"),
    ]


def test_workers_on_ray_are_given_a_class_of_a_cell_and_a_file(plain, specs, tmp_path):
    """In a process of its own: Ray's workers import what this one has on its path."""
    script = own_fixtures.file(
        tmp_path,
        f"""{PULL}
import keel

if __name__ == "__main__":
    keys = {KEYS!r} | {{"output-dir": {str(tmp_path / "runs")!r}, "model": {specs[1]!r}}}
    keel.run(keys, method=FedPull(mu=0.3), clients=2, engine="flower", quiet=True)
""",
        "script.py",
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    [run] = (tmp_path / "runs").iterdir()
    assert_same_run(run, plain.directory)
    assert RunReader(run).config["method"] == "own:FedPull"


def test_a_run_goes_on_and_is_verified_without_what_it_came_from(tmp_path, home, capsys):
    """In another process, with the files gone and the cell's process ended."""
    mine, net = own_fixtures.file(tmp_path), own_fixtures.file(tmp_path, NET, "net.py")
    run = trained(tmp_path, f"{mine}:FedPull", cell(NET, "Net"))
    longer = trained(tmp_path, cell(PULL), f"{net}:Net", **{"num-rounds": 3})
    mine.unlink()
    net.unlink()
    Image.new("L", (20, 12)).save(image := tmp_path / "digit.png")
    name = str(run.directory)
    words = [["resume", name, "num-rounds=3"], ["predict", name, str(image)]]
    words += [["experiments", "verify", name]]
    code = f"from keel.cli.main import main; print([main(each) for each in {words}])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.splitlines()[-1] == str([0] * 3), done.stdout + done.stderr
    assert_same_run(run.directory, longer.directory)
    assert main(["compare", name, str(longer.directory)]) == 0
    assert run.model().network.input_shape == (1, 12, 20)
    capsys.readouterr()


def test_an_edited_file_is_used_by_new_runs_and_named_to_old_ones(plain, specs, tmp_path):
    mine = own_fixtures.file(tmp_path)
    first = trained(tmp_path, f"{mine}:FedPull", specs[1], **MU)
    mine.write_text(PULL.replace("SCALE = 1.0", "SCALE = 5.0"))
    edited = trained(tmp_path, f"{mine}:FedPull", specs[1], **MU)
    assert not same_bits(final_model(edited.directory), final_model(first.directory))
    readers = [RunReader(run.directory) for run in (first, edited)]
    assert readers[0].manifest["code"] != readers[1].manifest["code"]
    assert differing_keys([setting_of(reader) for reader in readers], set()) == [OWN_CODE]
    resumed = keel.run(resume=first.directory, num_rounds=3, quiet=True)
    assert f"{mine} has changed since" in (resumed.directory / "run.log").read_text()
    longer = trained(tmp_path, *specs, **MU, **{"num-rounds": 3})
    assert_same_run(resumed.directory, longer.directory)


def test_a_method_names_its_server_half(tmp_path):
    mine = own_fixtures.file(tmp_path, f"import keel\n{PULL}{HALF}")
    slow = trained(tmp_path, f"{mine}:Slow", **{"slow.mu": 0.3, "num-rounds": 1})
    whole = trained(tmp_path, f"{mine}:FedPull", **MU, **{"num-rounds": 1})
    start = trained(tmp_path, f"{mine}:FedPull", **{"lr": 0.0, "num-rounds": 1})
    models = [final_model(run.directory) for run in (slow, whole, start)]
    for name, array in models[0].items():
        assert ((models[1][name] + models[2][name]) / 2 == array).all()


def test_an_error_of_own_code_names_its_line(tmp_path):
    text = PULL.replace("return self.mu *", "return undefined *")
    mine = own_fixtures.file(tmp_path, text)
    line = 1 + text.split("\n").index("        return undefined * distance(z, z_g)")
    with pytest.raises(RuntimeError, match=rf"\(mine\.py:{line}\)"):
        trained(tmp_path, f"{mine}:FedPull")
    with pytest.raises(RuntimeError, match=rf"cell \d+.:{line}"):
        trained(tmp_path, cell(text))


def test_objects_that_are_no_methods_are_refused(tmp_path):
    for wrong, named in (
        (3.5, "a string"),
        (object(), "instance"),
        (cell("FedPull = dict"), "dict"),
        (cell(PULL.replace(", default=0.1", "")), r"FedPull\.mu has no default"),
    ):
        with pytest.raises(ValueError, match=named):
            trained(tmp_path, wrong)
    with pytest.raises(ConfigError) as error:
        trained(tmp_path, cell(PULL), mu=0.3)
    assert error.value.key == "mu"
    assert "fedpull.mu" in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_a_method_of_keels_is_taken_as_its_class(tmp_path):
    run = trained(tmp_path, FedProx(mu=0.25), **{"num-rounds": 1})
    assert (run.config["method"], run.config["fedprox.mu"]) == ("fedprox", 0.25)
    assert RunReader(run.directory).manifest["code"] == [code_version()]


def test_the_command_line_sets_the_options_of_an_own_method(tmp_path, monkeypatch, capsys):
    own_fixtures.file(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = [f"{key}={value}".replace("True", "true") for key, value in SMALL.items()]
    words += ["method=mine.py:FedPull", f"output-dir={tmp_path / 'runs'}", "--clients", "2"]
    assert main(["run", *words, "fedpull.mu=0.3"]) == 0
    assert "mine.py:FedPull (mu 0.3)" in capsys.readouterr().out
    for wrong, named in (
        ("fedpull.nu=0.3", "did you mean fedpull.mu?"),
        ("method-options=nu = 0.3", "did you mean fedpull.mu?"),
        ("fedpull.mu=many", "expected a number"),
    ):
        assert main(["run", *words, wrong]) == 2
        assert named in capsys.readouterr().err


# --- networks -------------------------------------------------------------------------------------


def test_a_run_starts_from_saved_weights_and_notes_their_digest(tmp_path):
    network = cell(NET, "Net")(num_classes=10)
    file = tmp_path / "w.pt"
    torch.save(network.state_dict(), file)
    keys = {"weights": str(file), "local-epochs": 0, "num-rounds": 1}
    run = trained(tmp_path, "fedavg", cell(NET, "Net"), **keys)
    found = final_model(run.directory)
    assert torch.equal(found["classifier.weight"], network.head.weight)
    manifest = json.loads((run.directory / "manifest.json").read_text())
    assert manifest["weights"] == hashlib.sha256(file.read_bytes()).hexdigest()
    torch.save(cell(NET, "Net")(num_classes=3).state_dict(), file)
    with pytest.raises(ValueError, match="weights"):  # they have changed
        keel.run(resume=str(run.directory), num_rounds=2, quiet=True)
    other = trained(tmp_path, "fedavg", cell(NET, "Net"), **keys)
    assert "head of another width" in (other.directory / "run.log").read_text()
    file.unlink()
    assert other.model().predict(torch.zeros(1, 12, 20, dtype=torch.uint8).numpy())


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"image-size": "9x513"}, "image-size"),
        ({"normalise": "imagenet"}, "normalise"),
        ({"normalise": "0.5"}, "normalise"),
        ({"optimizer": "adagrad"}, "optimizer"),
        ({"lr-schedule": "linear"}, "lr-schedule"),
        ({"weights": "/no/such.pt"}, "weights"),
    ],
)
def test_other_values_are_refused_by_their_key(tmp_path, keys, key):
    with pytest.raises(ConfigError) as refused:
        trained(tmp_path, "fedavg", cell(NET, "Net"), **keys)
    assert refused.value.key == key
    assert "\n" not in str(refused.value)


def test_pixels_are_normalised_by_given_numbers(tmp_path):
    keys = {"num-rounds": 1, "data-fraction": 0.05}
    net = cell(NET.replace("Conv2d(1,", "Conv2d(3,"), "Net")
    run = trained(tmp_path, "fedavg", net, channels=3, normalise="imagenet", **keys)
    assert run.model().pixels.mean == (0.485, 0.456, 0.406)
    run = trained(tmp_path, "fedavg", cell(NET, "Net"), normalise="0.5,0.25", **keys)
    pixels = run.model().pixels
    assert (pixels.mean, pixels.std) == ((0.5,), (0.25,))
