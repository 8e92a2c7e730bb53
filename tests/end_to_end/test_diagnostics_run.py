"""Diagnostics as part of a run, and as a command over saved models."""

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import server_app.federation
import torch
from client_fixtures import add_small_cnn
from data_fixtures import make_npz, random_images
from printed_formulas import cka_as_printed, covariances
from run_fixtures import (
    NUM_CLIENTS,
    SMALL,
    final_model,
    history_of,
    resume,
    same_bits,
    without_times,
)
from safetensors.torch import load_file
from server_app.exchange import Exchange
from server_app.federation import prepare

import keel.cli.main
import server_app.diagnostics.comparison
import server_app.inline
from client_app.methods import method_of
from client_app.setup import build_network, forget_sources, model_for, open_source
from protocol.config import DIAGNOSTICS, resolve_config
from server_app.diagnostics.comparison import (
    DEVIATIONS,
    FEATURES,
    SIMILARITIES,
    chosen_diagnostics,
    probe_of,
)
from server_app.diagnostics.monitor import Monitor
from server_app.inline import simulation
from server_app.run_directory import read_arrays, save_arrays
from strategies import Average

Run = Callable[..., Path]
LAYERS = ["conv1", "conv2", "fc1", "fc2", "features", "logits"]  # of cnn-fedreco
PERSONAL = {"local-test-fraction": 0.2, "num-rounds": 1, "local-epochs": 1}
guide = (Path(__file__).parents[2] / "docs/how-to/diagnostics.md").read_text()


@pytest.fixture
def run(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """conftest's small runs, without diagnostics' pictures either."""
    monkeypatch.setattr(server_app.federation, "plot_rounds", lambda *what: None)
    return run


def checkpoint(folder: Path, number: int) -> dict[str, torch.Tensor]:
    [path] = (folder / "checkpoints").glob(f"round-{number:05d}-*.safetensors")
    return {k[6:]: v for k, v in load_file(path).items() if k.startswith("model/")}


def state_of(folder: Path, client: str, number: int) -> dict[str, torch.Tensor]:
    [path] = (folder / "clients" / client).glob(f"round-{number:05d}-*.safetensors")
    return load_file(path)


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


# --- in a run --------------------------------------------------------------------------------


def test_off_by_default_and_then_nothing_is_built(run, monkeypatch):
    monkeypatch.setattr(Monitor, "__init__", lambda *what: pytest.fail("built"))
    folder = run({"num-rounds": 1})
    assert all("diagnostics" not in line for line in history_of(folder))
    assert not (folder / "diagnostics").exists()


def test_a_run_with_diagnostics_trains_the_same_model_and_measures_when_due(run):
    plain = run({"num-rounds": 5})
    keys = {"num-rounds": 5, "diagnostics": "drift, vci", "diagnostics-every": 2}
    watched = run(keys)
    assert same_bits(final_model(plain), final_model(watched))
    history = history_of(watched)
    assert [line["round"] for line in history if "diagnostics" in line] == [2, 4, 5]
    measured = [line.pop("diagnostics") for line in history if "diagnostics" in line]
    assert without_times(history) == without_times(history_of(plain))
    for numbers in measured:
        assert numbers.keys() == {"drift", "vci"}
        assert numbers["vci"]["clients"].keys() == {f"client-{i:04d}" for i in range(NUM_CLIENTS)}


def test_the_numbers_are_those_of_the_models_of_the_round(run):
    """With one client its model of round 2 is the global one after it, and both are kept."""
    overrides = {"diagnostics": "all", "num-rounds": 2}
    folder = run(overrides, num_clients=1)
    numbers = history_of(folder)[-1]["diagnostics"]
    config = resolve_config(SMALL | overrides)
    w_g, w = checkpoint(folder, 1), checkpoint(folder, 2)

    _, before = reps_of(config, w_g)
    _, after = reps_of(config, w)
    assert list(numbers["cka-global"]) == LAYERS
    for layer in LAYERS:
        found = numbers["cka-global"][layer]["clients"]["client-0000"]
        assert found == pytest.approx(fast_cka(before[layer], after[layer]), rel=1e-4)
    printed = cka_as_printed(before["logits"], after["logits"])
    assert numbers["cka-global"]["logits"]["mean"] == pytest.approx(printed, rel=1e-4)
    assert numbers["cka-global"]["logits"]["variance"] == 0

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

    distance = sum((w[name] - w_g[name]).double().square().sum() for name in w).sqrt().item()
    origin = sum(w_g[name].double().square().sum() for name in w).sqrt().item()
    assert numbers["drift"]["mean"] == pytest.approx(distance, rel=1e-6)
    assert numbers["relative-drift"]["mean"] == pytest.approx(distance / origin, rel=1e-6)
    assert "cka-clients" not in numbers  # one has no other to be like


def test_clients_are_compared_pair_by_pair_on_what_they_sent(run, monkeypatch):
    sent = {}
    measure = Monitor.measure

    def spy(self, server_round, w_g, replies, folder):
        sent.update({reply.client: reply.arrays for reply in replies})
        return measure(self, server_round, w_g, replies, folder)

    monkeypatch.setattr(Monitor, "measure", spy)
    overrides = {"diagnostics": "cka-clients", "num-rounds": 1, "local-epochs": 2}
    numbers = history_of(run(overrides, num_clients=3))[-1]["diagnostics"]["cka-clients"]
    config = resolve_config(SMALL | overrides)
    reps = [reps_of(config, arrays)[1] for arrays in sent.values()]
    for layer in LAYERS:
        each = [fast_cka(reps[i][layer], reps[j][layer]) for i, j in ((0, 1), (0, 2), (1, 2))]
        assert numbers[layer]["mean"] == pytest.approx(np.mean(each), rel=1e-4)
        assert numbers[layer]["variance"] == pytest.approx(np.var(each), rel=1e-2, abs=1e-9)
        assert numbers[layer]["pairs"] == 3

    monkeypatch.setattr(server_app.diagnostics.comparison, "MAX_PAIRED", 2)
    numbers = history_of(run(overrides, num_clients=3))[-1]["diagnostics"]["cka-clients"]
    assert numbers["logits"]["pairs"] == 1
    found = numbers["logits"]["mean"]
    assert found == pytest.approx(fast_cka(reps[0]["logits"], reps[1]["logits"]), rel=1e-4)


def test_a_resumed_run_has_the_numbers_of_one_that_was_not_cut(run):
    whole = run({"num-rounds": 3, "diagnostics": "all"})
    cut = run({"num-rounds": 2, "diagnostics": "all", "diagnostics-every": 1})
    resume(cut, num_rounds=3)
    assert without_times(history_of(cut)) == without_times(history_of(whole))


@pytest.mark.parametrize("method", ["fedreco", "local", "fedrep", "fedpac", "fedcr", "ditto"])
def test_methods_without_a_whole_global_model_are_measured_as_far_as_there_is_one(run, method):
    folder = run(PERSONAL | {"method": method, "diagnostics": "all"}, num_clients=2)
    numbers = history_of(folder)[-1]["diagnostics"]
    stages = list(numbers["cka-clients"])
    assert stages[-2:] == ["features", "logits"]  # simulated clients' own heads are at hand
    assert numbers["deviation-bound"]["clients"].keys() == {"client-0000", "client-0001"}
    if method == "local":  # there is no global model at all
        assert "cka-global" not in numbers
        assert "drift" not in numbers
        assert "global" not in numbers["vci"]
    elif method == "ditto":  # there is a whole one
        assert list(numbers["cka-global"]) == stages
        assert "global" in numbers["deviation-bound"]
    else:  # there is a body
        assert list(numbers["cka-global"]) == stages[:-1]
        assert "global" in numbers["effective-rank"]
        assert "global" not in numbers["deviation-bound"]
        assert numbers["drift"]["mean"] > 0


def test_fedreco_is_measured_by_the_clients_own_models_not_by_their_gradients(run):
    overrides = PERSONAL | {"method": "fedreco", "num-rounds": 2, "fedreco.eta-u": 0.05}
    folder = run(overrides | {"diagnostics": "cka-global,drift"}, num_clients=2)
    numbers = history_of(folder)[-1]["diagnostics"]
    config = resolve_config(SMALL | overrides)
    u_0 = checkpoint(folder, 1)
    for client in ("client-0000", "client-0001"):
        kept = state_of(folder, client, 2)
        own = {k.removeprefix("model/"): v for k, v in kept.items()}
        distance = sum((own[k] - u_0[k]).double().square().sum() for k in u_0).sqrt().item()
        assert numbers["drift"]["clients"][client] == pytest.approx(distance, rel=1e-6)
        _, ours = reps_of(config, own, reps=["features"])
        _, theirs = reps_of(config, u_0, reps=["features"])
        expected = fast_cka(ours["features"], theirs["features"])
        found = numbers["cka-global"]["features"]["clients"][client]
        assert found == pytest.approx(expected, rel=1e-4)


def test_clients_of_another_architecture_are_compared_at_features_and_logits(run, monkeypatch):
    add_small_cnn(monkeypatch)
    models = {"method": "fedreco", "client-models": "cnn-fedreco, small-cnn"}
    folder = run(PERSONAL | models | {"diagnostics": "all"}, num_clients=2)
    numbers = history_of(folder)[-1]["diagnostics"]
    assert list(numbers["cka-clients"]) == ["features", "logits"]
    assert numbers["cka-global"]["fc1"]["clients"].keys() == {"client-0000"}
    assert numbers["cka-global"]["features"]["clients"].keys() == {"client-0000", "client-0001"}
    assert numbers["drift"]["clients"].keys() == {"client-0000"}
    config = resolve_config(SMALL | PERSONAL | models)
    reps = []
    for client, name in (("client-0000", "cnn-fedreco"), ("client-0001", "small-cnn")):
        kept = state_of(folder, client, 1)
        own = {k.removeprefix("model/"): v for k, v in kept.items()}
        reps.append(reps_of(config, own, name, reps=["logits"])[1]["logits"])
    found = numbers["cka-clients"]["logits"]["mean"]
    assert found == pytest.approx(cka_as_printed(*reps), rel=1e-4)


def test_a_monitor_holds_one_models_weights_at_a_time():
    """What is kept of each client is small: the views of its reps, none of its weights."""
    comparison = server_app.diagnostics.comparison.Comparison
    config = resolve_config(SMALL)
    source = open_source(config)
    model = model_for(config, source)
    probe = probe_of(config, source, torch.device("cpu"), 300)
    arrays = {k: v.clone() for k, v in model.state_dict().items()}
    compared = comparison(DIAGNOSTICS, probe, lambda name: model, config.model.model, arrays)
    others = {k: v + 0.01 * torch.randn(v.shape) for k, v in arrays.items()}
    compared.add("client-0000", config.model.model, others)
    theirs = {a.data_ptr() for a in others.values()}
    held = [t for views in compared.views.values() for t in views.values()]
    assert held
    assert all(t.data_ptr() not in theirs and t.numel() <= 256**2 for t in held)


# --- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [{"diagnostics": "vcy"}, {"diagnostics-every": 0}])
def test_what_makes_no_sense_is_refused_with_what_is_allowed(keys):
    with pytest.raises(ValueError, match=r"diagnostics") as caught:
        resolve_config(keys)
    line = str(caught.value)
    assert "\n" not in line
    assert "vci" in line or ">= 1" in line


def test_names_are_taken_with_blanks_and_in_one_order():
    assert chosen_diagnostics(" vci ,cka-global,") == ("cka-global", "vci")
    assert chosen_diagnostics("drift, all") == DIAGNOSTICS
    assert chosen_diagnostics("") == ()
    assert set(DIAGNOSTICS) == {*SIMILARITIES, *FEATURES, *DEVIATIONS, "drift", "relative-drift"}


def test_real_sites_that_send_no_weights_cannot_be_measured():
    config = resolve_config(SMALL | {"method": "fedreco", "diagnostics": "all"})
    source = open_source(config)
    model = build_network(config, source.image_shape, source.num_classes)
    with pytest.raises(ValueError, match="measured in simulation only"):
        Monitor(config, method_of(config), source, model, {}, {"site-a": config.model.model}, False)


@pytest.mark.parametrize("method", ["fedavg", "fedreco"])
def test_the_first_global_model_is_on_the_cpu_also_with_diagnostics(method, tmp_path, monkeypatch):
    """It was on the GPU, and the clients' updates on the CPU."""
    monkeypatch.setattr(server_app.federation, "device_for", lambda name: torch.device("meta"))
    keys = (
        SMALL | PERSONAL | {"method": method, "diagnostics": "drift", "output-dir": str(tmp_path)}
    )
    with ExitStack() as held:
        run = prepare(simulation(3), resolve_config(keys), keys, None, held)
        assert {array.device.type for array in run.start.arrays.values()} == {"cpu"}
        assert run.model.classifier.weight.device.type == "meta"


# --- the command -----------------------------------------------------------------------------


def command(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    return keel.cli.main.main(["diagnose", *map(str, words)])


def test_the_command_measures_saved_personal_models(run, monkeypatch, capsys, tmp_path):
    folder = run(PERSONAL | {"method": "fedreco", "num-rounds": 1}, num_clients=2)
    output = tmp_path / "out"
    assert command(monkeypatch, folder, "--output", output) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(output)
    written = json.loads((output / "numbers.json").read_text())
    assert written["models"] == ["client-0000", "client-0001"]
    assert written["probe"] == {"source": "digits", "samples": 359}
    config = resolve_config(SMALL | {"method": "fedreco"})
    reps = []
    for client in written["models"]:
        kept = state_of(folder, client, 1)
        own = {k.removeprefix("model/"): v for k, v in kept.items()}
        reps.append(reps_of(config, own, reps=["logits"])[1]["logits"])
    found = written["diagnostics"]["cka-clients"]["logits"]["mean"]
    assert found == pytest.approx(cka_as_printed(*reps), rel=1e-4)
    for picture in ("cka.png", "features.png"):
        assert (output / picture).read_bytes().startswith(b"\x89PNG")
    assert command(monkeypatch, folder, "--output", output) == 2
    assert "exists and is not overwritten" in capsys.readouterr().err


def test_only_the_user_can_read_what_the_command_writes_in_a_run_directory(run, monkeypatch):
    folder = run({"num-rounds": 1})
    [model] = (folder / "checkpoints").glob("round-00001-*")
    before = os.umask(0o022)
    try:
        assert command(monkeypatch, folder, model, "--only", "drift", "--samples", "100") == 0
    finally:
        os.umask(before)
    made = folder / "diagnostics-models"
    for path in [made, *made.iterdir()]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_run_whose_device_is_absent_is_measured_on_the_cpu(run, monkeypatch, caplog):
    """Such as a GPU run on a machine without one; `keel predict` reads its model there, too."""
    folder = run({"num-rounds": 1})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["config"]["device"] = "cuda:99"
    path.write_text(json.dumps(config))
    assert command(monkeypatch, folder, "--only", "vci") == 0
    assert "device = 'cuda:99'" in caplog.text
    assert ": measured on the CPU" in caplog.text


def test_the_command_compares_checkpoints_of_methods_that_keep_nothing(run, monkeypatch, tmp_path):
    folder = run({"num-rounds": 2})
    [first] = (folder / "checkpoints").glob("round-00001-*")
    output = tmp_path / "out"
    words = ["--only", "drift,cka-global", "--samples", "100", "--output", output]
    assert command(monkeypatch, folder, first, *words) == 0
    numbers = json.loads((output / "numbers.json").read_text())["diagnostics"]
    w, w_g = checkpoint(folder, 1), final_model(folder)
    distance = sum((w[name] - w_g[name]).double().square().sum() for name in w).sqrt().item()
    assert numbers["drift"]["mean"] == pytest.approx(distance, rel=1e-6)
    config = resolve_config(SMALL)
    logits = [reps_of(config, a, reps=["logits"], count=100)[1]["logits"] for a in (w, w_g)]
    found = numbers["cka-global"]["logits"]["mean"]
    assert found == pytest.approx(cka_as_printed(*logits), rel=1e-4)


def test_the_command_refuses_in_one_line_what_it_cannot_measure(run, monkeypatch, capsys, tmp_path):
    folder = run({"num-rounds": 1})
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    other = run({"num-rounds": 1, "model": "cnn-fedcka"}) / "model.safetensors"
    output = folder / "diagnostics-models"
    untrained = tmp_path / "untrained"
    shutil.copytree(folder, untrained)
    (untrained / "history.jsonl").write_text("")  # as of a run that was stopped in round 1
    (untrained / "summary.json").write_text('{"status": "stopped"}')
    for words, expected in (
        ([tmp_path], "not a run directory"),
        ([untrained, "--output", tmp_path / "output"], "no round has finished"),
        ([folder, "client-0007"], "neither a client"),
        ([folder, damaged], "damaged"),
        ([folder, other], "does not fit the run's cnn-fedreco: array"),
        ([folder, "--only", "drifd"], "did you mean drift?"),
        ([folder, "--samples", "1"], "at least 2"),
    ):
        assert command(monkeypatch, *words) == 2, words
        line = capsys.readouterr().err.strip()
        assert expected in line
        assert "\n" not in line
    assert not output.exists()


def test_the_command_refuses_a_global_model_that_was_changed(run, monkeypatch, capsys, tmp_path):
    """It measured any model of the right shape as the run's."""
    folder, output = run({"num-rounds": 2}), tmp_path / "out"
    [first] = (folder / "checkpoints").glob("round-00001-*")
    model = folder / "model.safetensors"
    arrays, about = read_arrays(model)
    save_arrays(model, {name: array + 1 for name, array in arrays.items()}, about)
    assert command(monkeypatch, folder, first, "--output", output) == 2
    assert "is not as the run wrote it" in capsys.readouterr().err
    assert not output.exists()


def test_the_command_refuses_a_model_to_compare_that_was_changed(
    run, monkeypatch, capsys, tmp_path
):
    """It measured a checkpoint, or another run's model, in which one bit had flipped."""
    folder, other, output = run({"num-rounds": 1}), run({"num-rounds": 1}), tmp_path / "out"
    [first] = (folder / "checkpoints").glob("round-00001-*")
    for model in (first, other / "model.safetensors"):
        content = bytearray(model.read_bytes())
        content[-3] ^= 64
        model.write_bytes(content)
        assert command(monkeypatch, folder, model, "--output", output) == 2
        line = capsys.readouterr().err
        assert str(model) in line
        assert "digest" in line
        assert not output.exists()


@pytest.mark.parametrize("names", [[], ["client-0001"]])
def test_the_command_names_a_client_state_that_is_damaged(
    run, monkeypatch, capsys, tmp_path, names
):
    """The client was left out, or said to have no model."""
    method = {"method": "fedreco", "local-test-fraction": 0.2}
    folder, output = run({"num-rounds": 1, **method}), tmp_path / "out"
    [state] = (folder / "clients" / "client-0001").glob("round-*")
    state.write_bytes(state.read_bytes()[:-1])
    assert command(monkeypatch, folder, *names, "--output", output) == 2
    assert f"{state} is damaged: restore it from a backup" in capsys.readouterr().err
    assert not output.exists()


def test_the_command_says_that_no_client_stores_a_model(run, monkeypatch, capsys, caplog, tmp_path):
    """It wrote a file without numbers, or with the global model's only, and said nothing."""
    folder, output = run({"num-rounds": 1}), tmp_path / "out"
    assert command(monkeypatch, folder, "--only", "drift,cka-global", "--output", output) == 2
    line = capsys.readouterr().err.strip()
    assert "no client of the run stores a model" in line
    assert "\n" not in line
    assert not output.exists()
    assert command(monkeypatch, folder, "--only", "drift,vci", "--output", output) == 0
    assert "only the global model is measured: no client" in caplog.text
    numbers = json.loads((output / "numbers.json").read_text())["diagnostics"]
    assert numbers.keys() == {"vci"}
    assert numbers["vci"].keys() == {"global"}
    one = [folder, folder / "model.safetensors", "--only", "cka-clients"]
    assert command(monkeypatch, *one) == 2
    assert "cka-clients needs two models" in capsys.readouterr().err


def test_the_command_says_why_a_model_cannot_be_read(run, monkeypatch, capsys, tmp_path):
    """Of another user's file it was said that there is none."""
    folder = run({"num-rounds": 1})
    own, theirs, opened = folder / "model.safetensors", tmp_path / "theirs", Path.open
    theirs.touch()
    for refused, words in ((own, [folder]), (theirs, [folder, theirs])):

        def refusing(path, *how, refused=refused, **options):  # root may read all
            if path == refused:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return opened(path, *how, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", refusing)
            assert command(patch, *words) == 1
        assert capsys.readouterr().err == f"error: {refused}: Permission denied\n"


@pytest.mark.parametrize(
    "changes",
    [
        {"y_train": np.array([0, 1, 2, 3, 1, 2]), "y_test": np.array([2, 1, 3])},
        {"x_train": random_images(6, 30, 30), "x_test": random_images(3, 30, 30)},
    ],
    ids=["classes", "size"],
)
def test_data_that_no_longer_fits_the_run_is_named(run, monkeypatch, capsys, tmp_path, changes):
    images = {"x_train": random_images(6, 28, 28), "x_test": random_images(3, 28, 28)}
    keys = {"source": make_npz(tmp_path / "mine.npz", **images), "data-fraction": 1.0}
    folder = run(keys | {"partition": "iid", "num-rounds": 1}, num_clients=2)
    make_npz(tmp_path / "mine.npz", **images | changes)
    forget_sources()
    assert command(monkeypatch, folder) == 2
    line = capsys.readouterr().err.strip()
    assert f"npz:{tmp_path / 'mine.npz'} has changed since the run" in line


# --- the guide -------------------------------------------------------------------------------


def test_the_guides_table_names_every_measure():
    assert tuple(re.findall(r"^\| `([a-z-]+)` \|", guide, re.M)) == DIAGNOSTICS


def test_updates_are_averaged_and_measured_with_the_runs_threads_whatever_the_servers_are(
    run, monkeypatch
):
    """Under Flower a server has torch's number, inline its clients': the last bits would differ."""
    seen, ask = [], Exchange.ask

    def ask_as_a_server(*what, **options):
        replies = ask(*what, **options)
        torch.set_num_threads(3)
        return replies

    def noting(function):
        return lambda *what: seen.append(torch.get_num_threads()) or function(*what)

    monkeypatch.setattr(Exchange, "ask", ask_as_a_server)
    for owner, name in ((Average, "aggregate_train"), (Monitor, "measure")):
        monkeypatch.setattr(owner, name, noting(getattr(owner, name)))
    before = torch.get_num_threads()
    try:
        run({"diagnostics": "cka-global", "threads": 1, "num-rounds": 1})
        assert (seen, torch.get_num_threads()) == ([1, 1], 3)
    finally:
        torch.set_num_threads(before)


def test_the_command_can_be_repeated_after_it_failed_to_write(run, monkeypatch, capsys, tmp_path):
    """Its directory was left, and refused the next call."""
    folder, output = run({"num-rounds": 2}), tmp_path / "out"
    [first] = (folder / "checkpoints").glob("round-00001-*")
    words = [folder, first, "--only", "drift", "--samples", "100", "--output", output]

    def full(*what):
        raise OSError(errno.ENOSPC, "No space left on device", str(output / "cka.png"))

    with monkeypatch.context() as patch:
        patch.setattr("keel.model_diagnostics.plot_models", full)
        assert command(patch, *words) == 1
    assert capsys.readouterr().err == f"error: {output}/cka.png: No space left on device\n"
    assert not output.exists()
    assert command(monkeypatch, *words) == 0
