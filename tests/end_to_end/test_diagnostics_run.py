"""Diagnostics as part of a run, and as a command over saved models."""

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from client_fixtures import add_small_cnn
from data_fixtures import make_npz, random_images
from printed_formulas import cka_as_printed, covariances
from run_fixtures import NUM_CLIENTS, SMALL, final_model, resume, same_bits, without_times
from safetensors.torch import load_file

import server_app.report
from client_app.setup import forget_sources, model_for, open_source
from keel.cli.main import main
from protocol.config import resolve_config
from server_app.diagnostics.comparison import probe_of
from server_app.run_reader import RunReader

Run = Callable[..., Path]
LAYERS = ["conv1", "conv2", "fc1", "fc2", "features", "logits"]  # of cnn-fedreco
PERSONAL = {"local-test-fraction": 0.2, "num-rounds": 1, "local-epochs": 1}


@pytest.fixture
def run(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """conftest's small runs, without diagnostics' pictures either."""
    monkeypatch.setattr(server_app.report, "plot_rounds", lambda *what: None)
    return run


def measured(folder: Path) -> tuple[dict, dict]:
    """The last round's diagnostics: over the clients, and each client's."""
    read = RunReader(folder)
    *_, of_clients = read.clients()
    return read.history[-1]["diagnostics"], of_clients["diagnostics"]


def checkpoint(folder: Path, number: int) -> dict[str, torch.Tensor]:
    [path] = (folder / "checkpoints").glob(f"round-{number:05d}-*.safetensors")
    return {k[6:]: v for k, v in load_file(path).items() if k.startswith("model/")}


def own_model(folder: Path, client: str, number: int) -> dict[str, torch.Tensor]:
    [path] = (folder / "clients" / client).glob(f"round-{number:05d}-*.safetensors")
    return {k.removeprefix("model/"): v for k, v in load_file(path).items()}


def reps_of(config, arrays, name="", reps=LAYERS, count=256):
    """Labels and the reps of a model on the first samples of the probe, [n, ...] in float64."""
    source = open_source(config)
    model = model_for(config, source, name).eval()
    model.load_state_dict(model.state_dict() | arrays)
    probe = probe_of(config, source, torch.device("cpu"), 2000)
    x, y = next(probe.in_order(count))
    with torch.no_grad():
        _, found = model.run(x, reps, to_logits=False)
    return y, {layer: a.flatten(1).double() for layer, a in zip(reps, found, strict=True)}


def fast_cka(x, y):
    """Eq. (3) again, for reps too wide for a loop over their entries."""
    x, y = (t.numpy() - t.numpy().mean(0) for t in (x, y))
    top = np.linalg.norm(y.T @ x) ** 2
    return top / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))


def distance(w, w_g) -> float:
    return sum((w[k] - w_g[k]).double().square().sum() for k in w).sqrt().item()


# --- in a run --------------------------------------------------------------------------------


def test_a_run_with_diagnostics_trains_the_same_model_and_measures_when_due(run):
    plain = run({"num-rounds": 3})
    watched = run({"num-rounds": 3, "diagnostics": "drift, vci", "diagnostics-every": 2})
    assert same_bits(final_model(plain), final_model(watched))
    history = RunReader(watched).history
    assert [line["round"] for line in history if "diagnostics" in line] == [2, 3]
    numbers, of_clients = measured(watched)
    assert numbers.keys() == of_clients.keys() == {"drift", "vci"}
    assert of_clients["vci"].keys() == {f"client-{i:04d}" for i in range(NUM_CLIENTS)}
    values = list(of_clients["drift"].values())
    assert numbers["drift"]["mean"] == pytest.approx(np.mean(values))
    assert (numbers["drift"]["lowest"], numbers["drift"]["highest"]) == (min(values), max(values))
    for line in history:
        line.pop("diagnostics", None)
    assert without_times(history) == without_times(RunReader(plain).history)
    assert not (plain / "diagnostics").exists()


def test_the_numbers_are_those_of_the_models_of_the_round(run):
    """With one client its model of round 2 is the global one after it, and both are kept."""
    overrides = {"diagnostics": "all", "num-rounds": 2}
    folder = run(overrides, num_clients=1)
    numbers, of_clients = measured(folder)
    config = resolve_config(SMALL | overrides)
    w_g, w = checkpoint(folder, 1), checkpoint(folder, 2)

    _, before = reps_of(config, w_g)
    _, after = reps_of(config, w)
    assert list(numbers["cka-global"]) == LAYERS
    for layer in LAYERS:
        found = of_clients["cka-global"][layer]["client-0000"]
        assert found == pytest.approx(fast_cka(before[layer], after[layer]), rel=1e-4)
    printed = cka_as_printed(before["logits"], after["logits"])
    assert numbers["cka-global"]["logits"]["mean"] == pytest.approx(printed, rel=1e-4)

    for arrays, key in ((w_g, "global"), (w, "mean")):
        y, reps = reps_of(config, arrays, count=2000)  # all 359 test images
        sigma_w, sigma_b, sigma_t = covariances(reps["features"], y)
        assert numbers["within-class-trace"][key] == pytest.approx(sigma_w.trace(), rel=1e-5)
        assert numbers["between-class-trace"][key] == pytest.approx(sigma_b.trace(), rel=1e-5)
        p = np.linalg.svd(sigma_t, compute_uv=False)
        p = (p / p.sum())[p > 1e-12 * p.sum()]
        assert numbers["effective-rank"][key] == pytest.approx(np.exp(-(p * np.log(p)).sum()), 1e-4)
        vci = 1 - np.trace(np.linalg.pinv(sigma_t, rcond=1e-12) @ sigma_b) / 9
        assert numbers["vci"][key] == pytest.approx(vci, rel=1e-4)

    origin = sum(w_g[name].double().square().sum() for name in w).sqrt().item()
    assert numbers["drift"]["mean"] == pytest.approx(distance(w, w_g), rel=1e-6)
    assert numbers["relative-drift"]["mean"] == pytest.approx(distance(w, w_g) / origin, rel=1e-6)
    assert "cka-clients" not in numbers  # one has no other to be like


def test_clients_are_compared_pair_by_pair_by_their_own_models_not_by_fedrecos_gradients(run):
    overrides = PERSONAL | {"method": "fedreco", "num-rounds": 2, "fedreco.eta-u": 0.05}
    overrides |= {"diagnostics": "cka-clients,drift"}
    folder = run(overrides, num_clients=3)
    numbers, of_clients = measured(folder)
    u_0 = checkpoint(folder, 1)
    models = {client: own_model(folder, client, 2) for client in of_clients["drift"]}
    for client, own in models.items():
        expected = distance({k: own[k] for k in u_0}, u_0)
        assert of_clients["drift"][client] == pytest.approx(expected, rel=1e-6)
    config = resolve_config(SMALL | overrides)
    reps = [reps_of(config, arrays)[1] for arrays in models.values()]
    for layer in LAYERS:
        each = [fast_cka(reps[i][layer], reps[j][layer]) for i, j in ((0, 1), (0, 2), (1, 2))]
        found = numbers["cka-clients"][layer]
        assert found["mean"] == pytest.approx(np.mean(each), rel=1e-4)
        assert found["variance"] == pytest.approx(np.var(each), rel=1e-2, abs=1e-9)
        assert found["pairs"] == 3


def test_a_resumed_run_has_the_numbers_of_one_that_was_not_interrupted(run):
    whole = run({"num-rounds": 3, "diagnostics": "all"})
    resumed = resume(run({"num-rounds": 2, "diagnostics": "all"}), num_rounds=3)
    assert without_times(RunReader(resumed).history) == without_times(RunReader(whole).history)
    in_clients = [without_times(list(RunReader(each).clients())) for each in (resumed, whole)]
    assert in_clients[0] == in_clients[1]


@pytest.mark.parametrize("method", ["fedreco", "local", "fedpac", "ditto"])
def test_methods_without_a_whole_global_model_are_measured_as_far_as_there_is_one(run, method):
    numbers, of_clients = measured(
        run(PERSONAL | {"method": method, "diagnostics": "all"}, num_clients=2)
    )
    stages = list(numbers["cka-clients"])
    assert stages[-2:] == ["features", "logits"]  # simulated clients' own heads are at hand
    assert of_clients["deviation-bound"].keys() == {"client-0000", "client-0001"}
    if method == "local":  # there is no global model at all
        assert "cka-global" not in numbers
        assert "drift" not in numbers
    elif method == "ditto":  # there is a whole one
        assert list(numbers["cka-global"]) == stages
        assert "global" in numbers["deviation-bound"]
    else:  # there is a feature extractor
        assert list(numbers["cka-global"]) == stages[:-1]
        assert "global" in numbers["effective-rank"]
        assert "global" not in numbers["deviation-bound"]
        assert numbers["drift"]["mean"] > 0


def test_clients_of_another_architecture_are_compared_at_features_and_logits(run, monkeypatch):
    add_small_cnn(monkeypatch)
    models = {"method": "fedreco", "client-models": "cnn-fedreco, small-cnn"}
    folder = run(PERSONAL | models | {"diagnostics": "all"}, num_clients=2)
    numbers, of_clients = measured(folder)
    assert list(numbers["cka-clients"]) == ["features", "logits"]
    assert of_clients["cka-global"]["fc1"].keys() == {"client-0000"}
    assert of_clients["cka-global"]["features"].keys() == {"client-0000", "client-0001"}
    assert of_clients["drift"].keys() == {"client-0000"}
    config = resolve_config(SMALL | PERSONAL | models)
    reps = [
        reps_of(config, own_model(folder, client, 1), name, reps=["logits"])[1]["logits"]
        for client, name in (("client-0000", "cnn-fedreco"), ("client-0001", "small-cnn"))
    ]
    found = numbers["cka-clients"]["logits"]["mean"]
    assert found == pytest.approx(cka_as_printed(*reps), rel=1e-4)


# --- the command -----------------------------------------------------------------------------


def diagnose(*words: str | Path) -> int:
    return main(["diagnose", *map(str, words)])


def test_the_command_measures_saved_personal_models(run, capsys, tmp_path):
    folder = run(PERSONAL | {"method": "fedreco", "num-rounds": 1}, num_clients=2)
    output = tmp_path / "out"
    assert diagnose(folder, "--output", output) == 0
    written = json.loads((output / "numbers.json").read_text())
    assert written["models"] == ["client-0000", "client-0001"]
    assert written["probe"] == {"source": "digits", "samples": 359}
    config = resolve_config(SMALL | {"method": "fedreco"})
    reps = [
        reps_of(config, own_model(folder, client, 1), reps=["logits"])[1]["logits"]
        for client in written["models"]
    ]
    found = written["diagnostics"]["cka-clients"]["logits"]["mean"]
    assert found == pytest.approx(cka_as_printed(*reps), rel=1e-4)
    for picture in ("cka.png", "features.png"):
        assert (output / picture).read_bytes().startswith(b"\x89PNG")
    assert diagnose(folder, "--output", output) == 2  # which is not overwritten
    assert str(output) in capsys.readouterr().err


def test_the_command_compares_checkpoints_and_only_the_user_can_read_what_it_writes(run):
    folder = run({"num-rounds": 2})
    [first] = (folder / "checkpoints").glob("round-00001-*")
    os.umask(0o022)
    assert diagnose(folder, first, "--only", "drift", "--samples", "100") == 0
    made = folder / "diagnostics-models"
    for path in [made, *made.iterdir()]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    numbers = json.loads((made / "numbers.json").read_text())["diagnostics"]
    expected = distance(checkpoint(folder, 1), final_model(folder))
    assert numbers["drift"]["mean"] == pytest.approx(expected, rel=1e-6)


def test_the_command_refuses_in_one_line_what_it_cannot_measure(run, capsys, tmp_path):
    folder = run({"num-rounds": 1})
    [first] = (folder / "checkpoints").glob("round-00001-*")
    changed = tmp_path / first.name
    changed.write_bytes(first.read_bytes()[:-3] + b"???")
    other = run({"num-rounds": 1, "model": "cnn-fedcka"}) / "model.safetensors"
    untrained = shutil.copytree(folder, tmp_path / "untrained")
    (untrained / "history.jsonl").write_text("")  # as of a run that was stopped in round 1
    (untrained / "summary.json").write_text('{"status": "stopped"}')
    edited = shutil.copytree(folder, tmp_path / "edited")
    model = edited / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-8] + bytes(8))
    for words, expected in (
        ([tmp_path], tmp_path),
        ([untrained], untrained),
        ([edited], model),
        ([folder, "client-0007"], "client-0007"),
        ([folder, changed], changed),
        ([folder, other], other),
        ([folder, "--only", "drifd"], "drift"),
        ([folder, "--samples", "1"], "--samples"),
        ([folder, folder / "model.safetensors", "--only", "cka-clients"], "cka-clients"),
        ([folder, "--only", "drift"], "--only"),  # no client stores a model
    ):
        assert diagnose(*words) == 2, words
        line = capsys.readouterr().err.strip()
        assert str(expected) in line
        assert "\n" not in line
    assert not (folder / "diagnostics-models").exists()


def test_data_that_no_longer_fits_the_run_is_named(run, capsys, tmp_path):
    images = {"x_train": random_images(6, 28, 28), "x_test": random_images(3, 28, 28)}
    keys = {
        "source": make_npz(tmp_path / "mine.npz", **images),
        "image-size": "0",
        "data-fraction": 1.0,
    }
    folder = run(keys | {"partition": "iid", "num-rounds": 1}, num_clients=2)
    for changes in (
        {"y_train": np.array([0, 1, 2, 3, 1, 2]), "y_test": np.array([2, 1, 3])},
        {"x_train": random_images(6, 30, 30), "x_test": random_images(3, 30, 30)},
    ):
        make_npz(tmp_path / "mine.npz", **images | changes)
        forget_sources()
        assert diagnose(folder) == 2
        assert str(tmp_path / "mine.npz") in capsys.readouterr().err
