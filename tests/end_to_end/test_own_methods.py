"""Own methods run with the same bits from a cell, a file and a module, on each engine."""

import subprocess
import sys

import own_fixtures
import pytest
from own_fixtures import PULL, cell
from PIL import Image
from run_fixtures import SMALL, assert_same_run, final_model, same_bits

import keel
from keel.cli.main import main
from keel.saved_runs import OWN_CODE, differing_keys, setting_of
from protocol.code import code_version
from protocol.options import ConfigError
from server_app.run_reader import RunReader

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(600)]
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


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The run whose bits all others have: the class in a file."""
    folder = tmp_path_factory.mktemp("plain")
    mine = own_fixtures.file(folder)
    return trained(folder, f"{mine}:FedPull", **{"fedpull.mu": 0.3})


def trained(folder, method, engine="inline", **keys):
    """A run of two clients."""
    keys = SMALL | {"output-dir": str(folder / "runs"), "method": method} | keys
    return keel.run(keys, clients=2, engine=engine, quiet=True)


def test_a_class_has_the_same_bits_in_a_cell_a_file_and_a_module(plain, tmp_path, monkeypatch):
    package = own_fixtures.module(tmp_path, monkeypatch)
    runs = [
        trained(tmp_path, cell(PULL)(mu=0.3)),
        trained(tmp_path, cell(PULL), **{"fedpull.mu": 0.3}),
        trained(tmp_path, package.FedPull(mu=0.3)),
        trained(tmp_path, "own_package:FedPull", **{"fedpull.mu": 0.3}),
    ]
    for run in runs:
        assert_same_run(run.directory, plain.directory)
    assert [run.config["method"].partition(":")[0] for run in runs] == [
        *("own", "own"),
        *("own_package", "own_package"),
    ]
    fedavg = trained(tmp_path, "fedavg")
    assert not same_bits(final_model(fedavg.directory), final_model(plain.directory))


def test_workers_on_ray_are_given_a_class_of_a_cell(plain, tmp_path):
    """In a process of its own: Ray's workers import what this one has on its path."""
    script = own_fixtures.file(
        tmp_path,
        f"""{PULL}
import sys

import keel

if __name__ == "__main__":
    keys = {SMALL!r} | {{"output-dir": {str(tmp_path / "runs")!r}}}
    run = keel.run(keys, method=FedPull(mu=0.3), clients=2, engine="flower", quiet=True)
    print(run.directory)
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
    """In other processes, with the file gone and the cell's process ended."""
    mine = own_fixtures.file(tmp_path)
    runs = [trained(tmp_path, f"{mine}:FedPull"), trained(tmp_path, cell(PULL))]
    longer = trained(tmp_path, f"{mine}:FedPull", **{"num-rounds": 3})
    mine.unlink()
    Image.new("L", (32, 32)).save(image := tmp_path / "digit.png")
    words = []
    for run in [str(run.directory) for run in runs]:
        words += [["resume", run, "num-rounds=3"], ["predict", run, str(image)]]
        words += [["experiments", "verify", run]]
    code = f"from keel.cli.main import main; print([main(each) for each in {words}])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.splitlines()[-1] == str([0] * 6), done.stdout + done.stderr
    for run in runs:
        assert_same_run(run.directory, longer.directory)
        assert main(["compare", str(run.directory), str(longer.directory)]) == 0
    capsys.readouterr()


def test_an_edited_file_is_used_by_new_runs_and_named_to_old_ones(plain, tmp_path):
    mine = own_fixtures.file(tmp_path)
    first = trained(tmp_path, f"{mine}:FedPull", **{"fedpull.mu": 0.3})
    mine.write_text(PULL.replace("SCALE = 1.0", "SCALE = 5.0"))
    edited = trained(tmp_path, f"{mine}:FedPull", **{"fedpull.mu": 0.3})
    assert not same_bits(final_model(edited.directory), final_model(first.directory))
    readers = [RunReader(run.directory) for run in (first, edited)]
    assert readers[0].manifest["code"] != readers[1].manifest["code"]
    assert differing_keys([setting_of(reader) for reader in readers], set()) == [OWN_CODE]
    fedavg = trained(tmp_path, "fedavg")
    assert RunReader(fedavg.directory).manifest["code"] == [code_version()]
    resumed = keel.run(resume=first.directory, num_rounds=3, quiet=True)
    log = (resumed.directory / "run.log").read_text()
    assert f"{mine} has changed since the run began" in log
    longer = trained(tmp_path, f"{plain.directory}/own/mine.py:FedPull",
                     **{"fedpull.mu": 0.3, "num-rounds": 3})  # fmt: skip
    assert_same_run(resumed.directory, longer.directory)


def test_a_method_names_its_server_half(plain, tmp_path):
    mine = own_fixtures.file(tmp_path, f"import keel\n{PULL}{HALF}")
    slow = trained(tmp_path, f"{mine}:Slow", **{"slow.mu": 0.3, "num-rounds": 1})
    whole = trained(tmp_path, f"{mine}:FedPull", **{"fedpull.mu": 0.3, "num-rounds": 1})
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
    file = cell(text)
    with pytest.raises(RuntimeError, match=rf"cell \d+.:{line}"):
        trained(tmp_path, file)


def test_objects_that_are_no_methods_are_refused(tmp_path):
    for wrong, named in (
        (3.5, "a string"),
        (object(), "instance"),
        (cell("FedPull = dict"), "dict"),
    ):
        with pytest.raises(ValueError, match=named):
            trained(tmp_path, wrong)
    with pytest.raises(ConfigError, match=r"fedpull\.mu") as error:
        trained(tmp_path, cell(PULL), mu=0.3)
    assert error.value.key == "mu"
    with pytest.raises(ValueError, match=r"FedPull\.mu has no default"):
        trained(tmp_path, cell(PULL.replace(", default=0.1", "")))
    assert not (tmp_path / "runs").exists()


def test_a_method_of_keels_is_taken_as_its_class(tmp_path):
    from client_app.methods.fedprox import FedProx

    run = trained(tmp_path, FedProx(mu=0.25))
    assert (run.config["method"], run.config["fedprox.mu"]) == ("fedprox", 0.25)


def test_the_command_line_sets_the_options_of_an_own_method(tmp_path, monkeypatch, capsys, plain):
    own_fixtures.file(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = [f"{key}={value}".replace("True", "true") for key, value in SMALL.items()]
    words += ["method=mine.py:FedPull", f"output-dir={tmp_path / 'runs'}", "--clients", "2"]
    assert main(["run", *words, "fedpull.mu=0.3"]) == 0
    assert "mine.py:FedPull (mu 0.3)" in capsys.readouterr().out
    [run] = (tmp_path / "runs").iterdir()
    assert_same_run(run, plain.directory)
    assert main(["run", *words, "fedpull.nu=0.3"]) == 2
    assert "did you mean fedpull.mu?" in capsys.readouterr().err
    assert main(["run", *words, "method-options=nu = 0.3"]) == 2
    assert "did you mean fedpull.mu?" in capsys.readouterr().err
    assert main(["run", *words, "fedpull.mu=many"]) == 2
    assert "expected a number" in capsys.readouterr().err
