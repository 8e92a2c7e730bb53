"""The model of a finished run, for inference: needs neither the data nor a running Flower.

model = load_model("~/.keel/runs/20260101-120000-fedintr-digits")
names = model.predict(images)          # uint8 [N, H, W], [N, H, W, C] or [N, C, H, W]
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from client_app.methods import method_of
from client_app.node_config import own_architecture
from client_app.samples import Pixels
from client_app.setup import build_network
from client_app.state import StateFolder
from models import StagedModel
from protocol.config import RunConfig
from protocol.files import digest
from protocol.messages import Arrays, DatasetSpec
from protocol.processes import check_not_forked
from protocol.text import in_one_line, num_of, shortened
from server_app.history import DAMAGE, HISTORY_FILE, Line, whole_lines
from server_app.run_directory import read_arrays
from server_app.summary import (
    has_finished,
    lost_rounds,
    newest_version,
    read_manifest,
    read_run_config,
    round_of,
)

log = logging.getLogger("keel.server")

IMAGES_AT_A_TIME = 100
END = 2**31  # after every round
OWN_STATE = "state/own/"  # prefix in a checkpoint of the state of the method's server half


class NoPersonalModel(ValueError):
    """A client of the run, or each of them, stores no model of its own."""


@dataclass(frozen=True)
class TrainedModel:
    """A network in eval mode, the normalisation of its input and the names of its outputs."""

    network: StagedModel
    pixels: Pixels
    class_names: tuple[str, ...]

    @torch.no_grad()
    def probabilities(self, images: np.ndarray) -> Tensor:
        """[N, num_classes] for uint8 images [N, H, W], [N, H, W, C] or [N, C, H, W] of any size.

        Colours are converted as in training. ValueError for other arrays, and where it is not clear
        which axis is which.
        """
        found = images.dtype if isinstance(images, np.ndarray) else type(images).__name__
        if found != np.uint8:
            raise ValueError(f"images are {found}: expected a NumPy array of uint8, 0..255")
        check_not_forked()
        x = np.ascontiguousarray(images)
        if x.ndim == 3 and x.shape[-1] not in (1, 3):
            x = x[:, None]
        has_colours_last = x.ndim == 4 and x.shape[-1] in (1, 3)
        has_colours_first = x.ndim == 4 and x.shape[1] in (1, 3)
        if has_colours_last and not has_colours_first:
            x = x.transpose(0, 3, 1, 2)
        if has_colours_last == has_colours_first or 0 in x.shape[1:]:
            hint = "; of one image, pass image[None]" if x.ndim == 3 else ""
            raise ValueError(
                f"images are {list(images.shape)}: expected [N, H, W], [N, H, W, C] or "
                f"[N, C, H, W] with C = 1 or 3{hint}"
            )
        starts = range(0, max(len(x), 1), IMAGES_AT_A_TIME)
        # copies: torch warns of arrays that it may not write to, such as Pillow's and memory maps
        parts = (torch.from_numpy(np.array(x[i : i + IMAGES_AT_A_TIME])) for i in starts)
        return torch.cat([self._probabilities(part) for part in parts])

    def _probabilities(self, x: Tensor) -> Tensor:
        """The same of a few images [N, C, H, W]."""
        channels, size, _ = self.network.input_shape
        x = x.float()
        if x.shape[1] != channels:
            x = x.expand(-1, 3, -1, -1) if channels == 3 else grey(x)
        if x.shape[2:] != (size, size):
            x = F.interpolate(x, (size, size), mode="bilinear", antialias=True).clamp(0, 255)
        return torch.softmax(self.network(self.pixels.normalise(x)), dim=1)

    def predict(self, images: np.ndarray) -> list[str]:
        """The most probable class's name for each image."""
        return [self.class_names[i] for i in self.probabilities(images).argmax(1).tolist()]


def grey(x: Tensor) -> Tensor:
    """[N, 1, H, W] of colours [N, 3, H, W], 0..255, with the weights of Pillow's mode L."""
    weights = x.new_tensor([19595.0, 38470.0, 7471.0])[:, None, None]
    return ((x * weights).sum(1, keepdim=True) + 32768).div(65536).floor()


def load_model(directory: str | Path, client: str = "") -> TrainedModel:
    """The final global model of a run, or the personal model of one of its clients.

    ValueError, one line, where no round has finished or the run has no such model. A run that has
    rounds left is named in a warning.
    """
    if not isinstance(client, str):
        raise ValueError(f"client = {client!r}: expected a name, such as client-0000")
    check_not_forked()
    path = Path(directory).expanduser()
    model = read_model(path, client)
    check_rounds(path)
    return model


def check_rounds(path: Path) -> None:
    """ValueError if a run has a model but no finished round; a warning if it has rounds left."""
    if not (path / HISTORY_FILE).exists():  # a model that was copied without it
        return
    history, _ = whole_lines(path)
    done = history[-1]["round"] if history else 0
    num_rounds = read_run_config(path).rounds.num_rounds
    if lost := lost_rounds(path, done, num_rounds):
        log.warning("%s: %s", path, lost)
        return
    if not history:
        raise ValueError(
            f"{path}: no round has finished, so its model is not trained; continue the run with "
            f"`keel resume {path.name}`"
        )
    if done < num_rounds:
        log.warning(
            "%s has finished %d of %s: its model is not final",
            path,
            done,
            num_of("round", num_rounds),
        )


def read_model(path: Path, client: str = "") -> TrainedModel:
    """As `load_model`, whichever round the model is of. ValueError if it cannot be read.

    NoPersonalModel if the client has none.
    """
    if not (path / "model.safetensors").is_file():
        why = "it is not a run that has ended"
        if has_finished(path):
            why = (
                "the run has finished: the file was deleted, or the run was restored from an "
                "archive, which has no models; put back a copy, or run it again"
            )
        raise ValueError(f"{path} has no model.safetensors: {why}")
    check_is_as_written(path)
    arrays, about = read_arrays(path / "model.safetensors")
    config = read_run_config(path)
    data = spec_of(about, path / "model.safetensors")
    name, method = config.model.model, method_of(config)
    if method.is_personal and not (method.is_stateful or method.has_global_model):
        raise NoPersonalModel(
            f"{path} has no model to load: {config.rounds.method} has no global model, and makes "
            "each client's at its evaluation without storing it"
        )
    if client:
        if method.is_tuned_for_evaluation() and method.depends_on_num_rounds():
            raise NoPersonalModel(
                f"client = {client!r}: the personal heads were tuned for the last evaluation "
                f"({config.rounds.method}.final-head-epochs > 0) and are not stored"
            )
        lines, _ = whole_lines(path)  # a later state is of a round that was interrupted
        done = lines[-1]["round"] if lines else END
        check_is_newest(newest_version(path / "clients" / client, done), client, lines)
        state = StateFolder(path / "clients" / client, END, reads_only=True).load(done + 1)
        own = stored_model(state, arrays, lambda: head_from_server(path, client, lines))
        if own is None:
            lost = lost_rounds(path, done, config.rounds.num_rounds) if lines else ""
            why = why_not_stored(path, client, config, state, lost)
            raise NoPersonalModel(f"client = {client!r}: {why}")
        if method.is_tuned_for_evaluation():
            log.warning(
                "%s's model is as training left it: the fine-tuning for evaluation is not stored",
                client,
            )
        arrays, name = own, about.get(f"model of {client}", name)
        if about.get("client-models"):  # of too many simulated clients to list
            name = own_architecture(config, {"partition-id": int(client.rpartition("-")[2])})
    elif not method.has_global_model:
        example = min((p.name for p in (path / "clients").glob("*")), default="client-0000")
        raise ValueError(
            f"{config.rounds.method} has no global model: name a client, such as {example} "
            "(--client, or load_model(..., client=...))"
        )
    with torch.device("cpu"):  # a notebook may have set another default, of the type, too
        network = build_network(config, data.image_shape, data.num_classes, name).float()
    try:
        network.load_state_dict(arrays)
    except RuntimeError as error:
        raise ValueError(
            f"{path}: its model does not fit its config: {in_one_line(error, 200)}"
        ) from error
    return TrainedModel(network.eval(), Pixels(data.mean, data.std), data.class_names)


def why_not_stored(
    path: Path, client: str, config: RunConfig, state: Mapping[str, Arrays], lost: str
) -> str:
    """Why there is no model of this client in its client state. lost: see `lost_rounds`."""
    method = method_of(config)
    if not method.is_personal:
        return f"{config.rounds.method} trains a global model only: leave out the client"
    if not method.is_stateful:
        return (
            f"with {config.rounds.method} a client's model is made from the global one at each "
            "evaluation and is not stored: leave out the client"
        )
    if state:
        return (
            f"its client state has the groups {', '.join(map(repr, state))}: a personal model is "
            "read from 'model', 'personal' or 'head'"
        )
    if lost:
        return lost
    others = sorted(p.name for p in (path / "clients").glob("*") if p.name != client)
    more = f", which has state of {shortened(others)}" if others else ""
    return f"there is no personal model of it under {path / 'clients'}{more}"


def spec_of(about: Mapping[str, str], path: Path) -> DatasetSpec:
    """What a model's metadata says of its images and classes; ValueError if it is damaged."""
    try:
        channels, height, width = (int(n) for n in about["shape"].split(","))
        mean, std = (tuple(map(float, about[key].split(","))) for key in ("mean", "std"))
        if not (len(mean) == len(std) == channels and min(std) > 0):
            raise ValueError(f"expected a mean and a std above 0 for each of {channels} channels")
        names = tuple(about["classes"].split("\n"))
    except DAMAGE as error:
        fault = f"it has no key {error}" if isinstance(error, KeyError) else in_one_line(error, 200)
        raise ValueError(f"{path} has damaged metadata: {fault}; restore it") from error
    return DatasetSpec((channels, height, width), names, mean, std)


def check_is_as_written(path: Path) -> None:
    """ValueError if model.safetensors does not have the digest in the run's manifest."""
    model = path / "model.safetensors"
    try:
        expected = read_manifest(path).get("files", {}).get(model.name)
    except ValueError:  # a model that was copied without it, or a damaged one
        return
    if expected and (found := digest(model.read_bytes())) != expected:
        raise ValueError(
            f"{model} is not as the run wrote it: its digest is {found}, manifest.json has "
            f"{expected}: restore it from a backup"
        )


def check_is_newest(version: Path | None, client: str, history: Sequence[Line]) -> None:
    """ValueError if this client has trained since: its state is older than the global model.

    version: a client state or checkpoint of a run that was stopped between two of them.
    """
    trained = max((line["round"] for line in history if client in line["participants"]), default=0)
    if version and round_of(version) < trained:
        run = version.parents[1] if version.parent.name == "checkpoints" else version.parents[2]
        raise ValueError(
            f"client = {client!r}: it trained in round {trained}, and {version} is older: "
            f"`keel resume {run.name}` repeats the rounds since then"
        )


def stored_model(
    state: Mapping[str, Arrays], received: Arrays, server_head: Callable[[], Arrays] = dict
) -> Arrays | None:
    """The personal model in client state: whole, or a head for the received model; else None.

    server_head: parts of the head that the server combines.
    """
    whole = state.get("model") or state.get("personal")
    if whole or "head" not in state:
        return whole
    return received | state["head"] | server_head()


def head_from_server(directory: Path, client: str, history: Sequence[Line]) -> Arrays:
    """The head that the server combined for this client (FedPAC); {} where it makes none."""
    newest = newest_version(directory / "checkpoints", END)
    if newest is None:
        raise ValueError(f"{directory / 'checkpoints'} is empty: it may have had {client}'s head")
    damage = f"{newest} is damaged and may have {client}'s head: restore it"
    if digest(newest.read_bytes()) not in newest.name:
        raise ValueError(damage)
    prefix = f"{OWN_STATE}{client}/head."
    try:
        with safe_open(newest, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            head = {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    except SafetensorError as error:  # damaged before its digest was taken
        raise ValueError(damage) from error
    if head:
        check_is_newest(newest, client, history)
    return head
