"""The model of a finished run, for inference: needs neither the data nor a running Flower.

model = load_model("~/.keel/runs/20260101-120000-fedintr-digits")
names = model.predict(images)          # uint8 [N, H, W], [N, H, W, C] or [N, C, H, W]
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from client_app.method import Method
from client_app.methods import method_of
from client_app.node_config import own_architecture
from client_app.samples import Pixels
from client_app.setup import build_network
from client_app.state import newest_state
from data.decoding import Preparation, open_image
from data.npz import channels_last
from data.plain import write_plain
from models import StagedModel
from protocol.arrays import Arrays
from protocol.files import digest, round_of, versions_in
from protocol.messages import DatasetSpec
from protocol.processes import check_not_forked
from protocol.text import in_one_line, num_of
from server_app.run_directory import read_arrays
from server_app.run_reader import MODEL_FILE, RunReader

log = logging.getLogger("keel.server")

IMAGES_AT_A_TIME = 100
FAR_FROM_USUAL = 16  # times what is usual: floats up to 255 of a model whose white is 1.0
OWN_STATE = "state/own/"  # prefix in a checkpoint of the state of the method's server half


class NoPersonalModel(ValueError):
    """A client of the run, or each of them, stores no model of its own."""


@dataclass(frozen=True)
class TrainedModel:
    """A network in eval mode, how its input is prepared, and the names of its outputs."""

    network: StagedModel
    preparation: Preparation
    pixels: Pixels
    class_names: tuple[str, ...]

    def probabilities(self, images: np.ndarray) -> Tensor:
        """[N, num_classes] for images [N, H, W], [N, H, W, C] or [N, C, H, W] of any size.

        uint8, floats of which 1.0 is white, or uint16 where the model was trained on images of 16
        bits. They are prepared as in training. ValueError for other arrays, and where it is not
        clear which axis is which.
        """
        found = images.dtype if isinstance(images, np.ndarray) else type(images).__name__
        if isinstance(images, np.ndarray) and (self.is_of_arrays or images.dtype.kind == "f"):
            return self.of_arrays(images)
        if found not in (np.uint8, np.uint16):
            raise ValueError(f"images are {found}: expected a NumPy array of uint8 or uint16")
        check_not_forked()
        x, shape = images, images.shape
        has_colours_last = x.ndim == 4 and shape[-1] in (1, 3)
        has_colours_first = x.ndim == 4 and shape[1] in (1, 3)
        is_grey = x.ndim == 3 and shape[-1] not in (1, 3)
        if has_colours_last + has_colours_first + is_grey != 1 or 0 in shape[1:]:
            hint = "; of one image, pass image[None]" if x.ndim == 3 else ""
            raise ValueError(
                f"images are {list(shape)}: expected [N, H, W], [N, H, W, C] or [N, C, H, W] with "
                f"C = 1 or 3{hint}"
            )
        if has_colours_first:
            x = x.transpose(0, 2, 3, 1)
        if x.ndim == 4 and x.shape[-1] == 1:
            x = x[..., 0]
        prepare = self.preparation.pixels
        parts = []
        for start in range(0, max(len(x), 1), IMAGES_AT_A_TIME):
            some = x[start : start + IMAGES_AT_A_TIME]
            pixels = [prepare(image, f"images[{start + i}]") for i, image in enumerate(some)]
            shape = (len(some), *self.network.input_shape)
            parts.append(self.of_pixels(np.array(pixels, dtype=np.uint8).reshape(shape)))
        return torch.cat(parts)

    @property
    def is_of_arrays(self) -> bool:
        """Whether its images have channels that no picture has."""
        return self.preparation.channels not in (1, 3)

    def of_arrays(self, images: np.ndarray) -> Tensor:
        """The same for floats, and for any number of channels."""
        is_float = images.dtype.kind == "f"
        try:
            x = channels_last(images.astype(np.float32) if is_float else images, True)
        except ValueError as error:
            raise ValueError(f"images: the array {error}") from error
        own, (channels, *size) = 1 if x.ndim == 3 else x.shape[-1], self.network.input_shape
        if own not in (1, channels):
            found = num_of("channel", own)
            raise ValueError(f"images have {found}, those of the model {channels}")
        usual = max(m + s for m, s in zip(self.pixels.mean, self.pixels.std, strict=True))
        if is_float and x.size and x.max() > FAR_FROM_USUAL * max(usual, 1):
            text = "the images reach %g, those of training %.2g on average: is 1.0 white in them?"
            log.warning(text, x.max(), max(self.pixels.mean))
        parts = []
        for start in range(0, max(len(x), 1), IMAGES_AT_A_TIME):
            some = x[start : start + IMAGES_AT_A_TIME]
            pixels = np.empty((len(some), channels, *size), np.float32 if is_float else np.uint8)
            write_plain(some, pixels)
            parts.append(self.of_pixels(pixels))
        return torch.cat(parts)

    def of_file(self, path: str) -> Tensor:
        """[num_classes] for an image file; ImageFileError naming it if it cannot be read."""
        if self.is_of_arrays:
            num = num_of("channel", self.preparation.channels)
            raise ValueError(f"{path}: the model takes arrays of {num}, no image files")
        pixels = self.preparation.pixels(open_image(path), path)
        return self.of_pixels(pixels[None].copy())[0]

    @torch.no_grad()
    def of_pixels(self, pixels: np.ndarray) -> Tensor:
        """[N, num_classes] for prepared pixels, uint8 [N, C, H, W]."""
        return torch.softmax(self.network(self.pixels.normalise(torch.from_numpy(pixels))), dim=1)

    def predict(self, images: np.ndarray) -> list[str]:
        """The most probable class's name for each image."""
        return [self.class_names[i] for i in self.probabilities(images).argmax(1).tolist()]


def load_model(directory: str | Path, client: str = "") -> TrainedModel:
    """The final global model of a run, or the personal model of one of its clients.

    ValueError, one line, where no round has finished or the run has no such model. A run that has
    rounds left is named in a warning.
    """
    if not isinstance(client, str):
        raise ValueError(f"client = {client!r}: expected a name, such as client-0000")
    check_not_forked()
    run = RunReader(Path(directory).expanduser())
    model = read_model(run, client)
    check_rounds(run)
    return model


def check_rounds(run: RunReader) -> None:
    """ValueError if a run has a model but no finished round; a warning if it has rounds left."""
    done, num_rounds = run.last_round, run.config["num-rounds"]
    if not done:
        raise ValueError(
            f"{run.directory}: no round has finished, so its model is not trained; continue the "
            f"run with `keel resume {run.directory.name}`"
        )
    if done < num_rounds:
        text = "%s has finished %d of %s: its model is not final"
        log.warning(text, run.directory, done, num_of("round", num_rounds))


def read_model(run: RunReader, client: str = "") -> TrainedModel:
    """Read the run's model, of whichever round. ValueError if it cannot be read.

    NoPersonalModel if the client has none.
    """
    path = run.directory / MODEL_FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist: the run has not ended, or it was removed")
    check_is_as_written(path, run.manifest)
    arrays, about = read_arrays(path)
    config = run.run_config
    data = spec_of(about)
    name, method = config.model.model, method_of(config)
    if method.is_personal and not (method.is_stateful or method.has_global_model):
        raise NoPersonalModel(
            f"{run.directory} has no model to load: {config.rounds.method} has no global model, "
            "and makes each client's at its evaluation without storing it"
        )
    if client:
        arrays = personal_arrays(run, client, method, arrays)
        name = about.get(f"model of {client}", name)
        if about.get("client-models"):  # of too many simulated clients to list
            name = own_architecture(config, {"partition-id": int(client.rpartition("-")[2])})
    elif not method.has_global_model:
        raise ValueError(
            f"{config.rounds.method} has no global model: name a client, such as client-0000 "
            "(--client, or load_model(..., client=...))"
        )
    with torch.device("cpu"):  # a notebook may have set another default, of the type, too
        network = build_network(config, data.image_shape, data.num_classes, name).float()
    try:
        network.load_state_dict(arrays)
    except RuntimeError as error:
        raise ValueError(
            f"{run.directory}: its model does not fit its config: {in_one_line(error, 200)}"
        ) from error
    channels, height, width = data.image_shape
    preparation = Preparation(channels, width, height, data.window)
    return TrainedModel(network.eval(), preparation, Pixels(data.mean, data.std), data.class_names)


def personal_arrays(run: RunReader, client: str, method: Method, received: Arrays) -> Arrays:
    """The personal model of a client, from its newest state. NoPersonalModel if it has none.

    received: the global model's arrays.
    """
    name = run.config["method"]
    if method.is_tuned_for_evaluation() and method.depends_on_num_rounds():
        raise NoPersonalModel(
            f"client = {client!r}: the personal heads were tuned for the last evaluation "
            f"({name}.final-head-epochs > 0) and are not stored"
        )
    folder, done = run.directory / "clients" / client, run.last_round
    trained = max((x["round"] for x in run.clients() if client in x["participants"]), default=0)
    for newest in versions_in(folder, done)[-1:]:  # a later one is of a round that was interrupted
        check_is_newest(newest, trained, run)
    state = newest_state(folder, done + 1)
    own = stored_model(state, received, server_head(run, client, trained))
    if own is None:
        why = "there is no personal model of it in the run directory"
        if not (method.is_personal and method.is_stateful):
            why = f"{name} stores no personal models: leave out the client"
        raise NoPersonalModel(f"client = {client!r}: {why}")
    if method.is_tuned_for_evaluation():
        log.warning(
            "%s's model is as training left it: the fine-tuning for evaluation is not stored",
            client,
        )
    return own


def spec_of(about: Mapping[str, str]) -> DatasetSpec:
    """What a model's metadata says of its images and classes."""
    channels, height, width = (int(n) for n in about["shape"].split(","))
    mean, std = (tuple(map(float, about[key].split(","))) for key in ("mean", "std"))
    window = tuple(int(bound) for bound in about.get("window", "").split(",") if bound)
    classes = tuple(about["classes"].split("\n"))
    return DatasetSpec((channels, height, width), classes, mean, std, window)


def check_is_as_written(path: Path, manifest: Mapping[str, Any]) -> None:
    """ValueError if a model.safetensors does not have the digest in the run's manifest."""
    expected = manifest.get("files", {}).get(path.name)
    if expected and (found := digest(path.read_bytes())) != expected:
        raise ValueError(
            f"{path} is not as the run wrote it: its digest is {found}, manifest.json has "
            f"{expected}: restore it from a backup"
        )


def check_is_newest(version: Path, trained: int, run: RunReader) -> None:
    """ValueError if a client has trained in a later round than this state or checkpoint.

    The run was then stopped between two of them.
    """
    if round_of(version) < trained:
        raise ValueError(
            f"{version} is older than round {trained}, in which the client trained: `keel resume "
            f"{run.directory.name}` repeats the rounds since then"
        )


def stored_model(
    state: Mapping[str, Arrays], received: Arrays, server_head: Arrays | None = None
) -> Arrays | None:
    """The personal model in client state: whole, or a head for the received model; else None.

    server_head: parts of the head that the server combines.
    """
    whole = state.get("model") or state.get("personal")
    if whole or "head" not in state:
        return whole
    return received | state["head"] | (server_head or {})


def server_head(run: RunReader, client: str, trained: int) -> Arrays:
    """The head that the server combined for this client (FedPAC); {} where it makes none.

    trained: the last round in which the client took part.
    """
    prefix, head = f"{OWN_STATE}{client}/head.", dict[str, Tensor]()
    for newest in versions_in(run.directory / "checkpoints", run.last_round)[-1:]:
        if digest(newest.read_bytes()) not in newest.name:
            raise ValueError(f"{newest} is damaged: restore it from a backup")
        arrays, _ = read_arrays(newest)
        head = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
        if head:
            check_is_newest(newest, trained, run)
    return head
