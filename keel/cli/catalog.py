"""`keel methods`, `models`, `datasets`, `presets`, `keys`: listings generated from the registries.

What is measured (models' speed, methods' traffic) is cached under $KEEL_HOME/cache until torch or
the code that it depends on changes.
"""

import dataclasses
import hashlib
import json
import platform
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keel.tables import add_column, is_too_wide, markdown, print_table, terminal_console
from protocol.catalogue import method_names, method_stem
from protocol.config import (
    RunConfig,
    app_folder,
    default_config,
    keel_home,
    refuse_unknown,
    resolve_config,
)
from protocol.config import presets as known_presets
from protocol.config_keys import DataConfig, ModelConfig, PrivacyConfig, RoundsConfig, TrainConfig
from protocol.files import write_atomically
from protocol.models import MODELS
from protocol.options import key_of, parse_options, typed
from protocol.processes import num_cores
from protocol.server_optimizers import SERVER_OPTIMIZERS
from server_app.history import duration

Row = dict[str, Any]
T = typing.TypeVar("T")
NameArgument = Annotated[str | None, typer.Argument(metavar="[NAME]", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
MeasureOption = Annotated[bool, typer.Option("--measure", help="Measure all, or NAME again.")]

# Files in data-dir that a download creates or the user provides.
DATA_FILES = {
    "fashion-mnist": ("fashion-mnist", "FashionMNIST/raw"),
    "mnist": ("mnist", "MNIST/raw"),
    "cifar10": ("cifar-10-batches-py",),
    "cifar100": ("cifar-100-python",),
    "svhn": ("train_32x32.mat",),
    "tiny-imagenet": ("tiny-imagenet-200",),
}


def methods(
    name: NameArgument = None,
    as_json: JsonOption = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the README's table.")] = False,
) -> None:
    """List the methods, or show one with its options."""
    if name is None:
        rows = method_rows()
        if markdown:
            print(markdown_table(rows))
            return
        show(rows, as_json, "Methods", traffic_how, ["client state"], ["extra forwards"])
        return
    refuse_unknown("method", name, list(method_names()))
    from client_app.methods import documentation, method_class

    spec = method_class(name)
    facts = {
        "method": name,
        "summary": documentation(name).partition("\n")[0],
        "paper": spec.paper,
        "regularises": spec.regularises,
        "traffic": traffic_of_all()[name],
        "extra forwards": spec.extra_forwards,
        "file": f"client_app/methods/{method_stem(name)}.py",
        "capabilities": capabilities(name) if as_json else in_words(capabilities(name)),
    }
    show_one(facts, {"options": option_rows(spec, f"{name}.")}, as_json)


traffic_how = (
    "Traffic: bytes sent and received in a round, relative to FedAvg, on cnn-fedintr. "
    "Extra forwards: additional forward passes per training step, without caching."
)


def method_rows() -> list[Row]:
    """One row per method."""
    from client_app.methods import method_class

    traffic = traffic_of_all()
    return [
        {
            "name": name,
            "paper": spec.paper,
            "regularises": spec.regularises,
            "client state": spec.client_state,
            "stateful": spec.is_stateful,
            "personal": spec.is_personal,
            "traffic": traffic[name],
            "extra forwards": spec.extra_forwards,
        }
        for name, spec in ((name, method_class(name)) for name in method_names())
    ]


def markdown_table(rows: Iterable[Row]) -> str:
    """The README's table of methods."""
    texts = ("paper", "regularises", "client state")
    lines = [
        [
            f"`{row['name']}`" + (" (personal)" if row["personal"] else ""),
            *(row[column] for column in texts),
            f"{row['traffic']:.2f}",
            row["extra forwards"],
        ]
        for row in rows
    ]
    return markdown(["method", *texts, "traffic", "extra forwards"], lines)


def capabilities(name: str) -> Row:
    """The method's capability flags with its default options."""
    from client_app.method import Method
    from client_app.methods import method_class

    options = parse_options(method_class(name), default_config(), prefix=f"{name}.")
    flags = [flag for flag in Method.__annotations__ if flag.startswith(FLAG_PREFIXES)]
    return {flag: getattr(options, flag) for flag in (*flags, "default_weighting", "shared_part")}


FLAG_PREFIXES = ("is_", "has_", "sends_", "supports_")


def in_words(flags: Row) -> str:
    """Capability flags in a line: what holds, what the method supports, and what it does not."""

    def named(prefixes: tuple[str, ...], value: bool) -> str:
        """The flags with one of these prefixes and this value, without `is_` and `supports_`."""
        names = [n for n, is_on in flags.items() if is_on is value and n.startswith(prefixes)]
        return ", ".join(re.sub("^(is|supports)_", "", n).replace("_", " ") for n in names)

    parts = {
        "": named(("is_", "has_", "sends_"), value=True),
        "supports ": named(("supports_",), value=True),
        "does not support ": named(("supports_",), value=False),
        "weighted ": {"examples": "by examples", "uniform": "uniformly"}[
            flags["default_weighting"]
        ],
        "shares ": flags["shared_part"],
    }
    return "; ".join(words + found for words, found in parts.items() if found)


def option_rows(options: type, prefix: str) -> list[Row]:
    """One row per option: key, type, default, allowed values, description and source."""
    types, defaults = typing.get_type_hints(options), default_config()
    return [
        {
            "option": prefix + key_of(field),
            "type": types[field.name].__name__,
            "default": defaults.get(prefix + key_of(field)),
            "range": field.metadata["constraint"].describe(types[field.name]),
            "description": field.metadata["description"],
            "source": field.metadata["source"],
        }
        for field in dataclasses.fields(options)
    ]


def traffic_of_all() -> dict[str, float]:
    """Every method's `traffic`, from the cache."""
    key = [digest_of("strategies/*.py", "models/*.py", "client_app/methods/*.py"), method_names()]
    return cached("traffic", key, lambda: {name: traffic(name) for name in method_names()})


def traffic(name: str) -> float:
    """Bytes of the arrays sent and received in a round, relative to FedAvg's, on cnn-fedintr."""
    from client_app.methods import method_of
    from models import build_model
    from protocol.messages import RosterEntry, TrainReply
    from strategies import strategy_for

    config = resolve_config({"method": name, "model": "cnn-fedintr"})

    def build(**more: Any) -> Any:
        return build_model("cnn-fedintr", num_classes=10, channels=3, image_size=32, **more)

    def size_bytes(arrays: Mapping[str, Any]) -> int:
        return sum(array.numel() * array.element_size() for array in arrays.values())

    own = build(**dataclasses.asdict(method_of(config).model_parts()))
    strategy = strategy_for(config, own)
    model = strategy.initial_arrays(own)
    # FedPAC sends nothing alongside the model in round 1, so let one client take part in it
    strategy.roster = {2: RosterEntry("a", [1] * 10, [], [], "cnn-fedintr", 0, "", 0)}
    strategy.current = strategy.sent = model
    expected = strategy.expected(model)
    beside = {name: array * 0 + 1 for name, array in strategy.expected_extra().items()}
    strategy.next_arrays(model, [TrainReply("a", 1, expected, beside, {"num-examples": 10.0})])
    exchanged = (model, strategy.extra(), strategy.own_extra.get("a", {}), expected, beside)
    return round(sum(map(size_bytes, exchanged)) / (2 * size_bytes(build().state_dict())), 4)


def models(
    name: NameArgument = None, as_json: JsonOption = False, measure: MeasureOption = False
) -> None:
    """List the models, or show one with its layers and its speed on this machine."""
    if name is None:
        rows = [model_row(each, measure, needed=measure) for each in MODELS]
        caption = f"{measured_how}; {not_measured}, `keel models NAME` one."
        show(rows, as_json, "Models", caption, ["device"], ["norms", "input"])
        return
    refuse_unknown("model", name, list(MODELS))
    show_one(model_row(name, measure), {"layers": layer_rows(name)}, as_json)
    if not as_json:
        terminal_console().print(
            "Width: entries of one image's representation if the model is split after this layer.\n"
            "Fits: models that may train together in FedReCo at this split (equal widths)."
        )


measured_how = (
    "ms per image of a forward pass and of an SGD step with batch size 64, on this machine"
)
not_measured = "–: not measured yet; --measure measures all"


def model_row(name: str, again: bool = False, needed: bool = True) -> Row:
    """Norms, input, parameters and speed of a model; measured if `needed`, else if known."""
    spec, speed = MODELS[name], model_speed(name, again, needed)
    size = spec.image_size
    return {
        "name": name,
        "norms": ", ".join(norm or "none" for norm in spec.norms) or "none",
        "input": f"{spec.channels} x {size} x {size}" if size else "as the data",
        "parameters": sum(row["parameters"] for row in all_layers()[name]),
        "forward ms": speed and speed["forward_ms"],
        "step ms": speed and speed["step_ms"],
        "device": speed and speed["device"],
    }


def model_speed(name: str, again: bool = False, needed: bool = True) -> Row | None:
    """What `keel.model_speed.measure` found on this machine, from the cache.

    None if that was not measured before and is not `needed`.
    """

    def compute() -> Row | None:
        if not needed:
            return None
        from keel.model_speed import measure

        Console(stderr=True).print(f"measuring {name} ...", style="dim")
        return measure(name)

    key = [platform.node(), version("torch"), digest_of("models/*.py")]
    return cached(f"speed-{name}", key, compute, again)


def layer_rows(name: str) -> list[Row]:
    """One row per stage, with the models whose representation has the same width there."""
    layers = all_layers()
    widths = {
        other: {(row["layer"], row["width"]) for row in rows if row["width"]}
        for other, rows in layers.items()
        if other != name
    }
    return [
        row | {"fits": [other for other in widths if (row["layer"], row["width"]) in widths[other]]}
        for row in layers[name]
    ]


def all_layers() -> dict[str, list[Row]]:
    """The rows of `layers_of` of every model, from the cache."""
    key = [version("torch"), digest_of("models/*.py"), list(MODELS)]
    return cached("layers", key, lambda: {each: layers_of(each) for each in MODELS})


def layers_of(name: str) -> list[Row]:
    """Every stage's output for one image, parameters, and width where the model is split there.

    The last stage is called "features": split there, the representation is the classifier's input,
    whichever stage that is.
    """
    import torch

    from keel.model_speed import build, input_of

    model = build(name, "cpu").eval()  # "meta" would import torch's compiler, which takes 2 s
    with torch.no_grad():
        _, outputs = model.run(torch.zeros(1, *input_of(name)), model.stage_names)
    rows = [
        {
            "layer": stage,
            "shape": list(output.shape[1:]),
            "parameters": sum(p.numel() for p in model.stages[stage].parameters()),
            "width": output.numel(),
        }
        for stage, output in zip(model.stage_names, outputs, strict=True)
    ]
    rows[-1] |= {"layer": "features", "width": model.feature_width}
    head = sum(p.numel() for p in model.classifier.parameters())
    classifier = {"layer": "classifier", "shape": [model.num_classes], "parameters": head}
    return [*rows, classifier | {"width": None}]


def datasets(
    name: NameArgument = None,
    as_json: JsonOption = False,
    image_size: Annotated[
        int, typer.Option(help="Pixels to which images are resized; 0: their own size.")
    ] = 0,
) -> None:
    """List the data sets, or show one: its classes and pixel statistics."""
    from data.readers import READERS
    from data.sources import load_source

    resolve_config({"image-size": image_size})
    data_dir, cache_dir = keel_home() / "data", keel_home() / "cache"
    rows = {
        each: {
            "name": each,
            "train": reader.published and reader.published.num_train,
            "test": reader.published and reader.published.num_test,
            "classes": reader.published and reader.published.num_classes,
            "shape": reader.published and list(reader.published.image_shape),
            "description": reader.description,
            "here": availability(each, data_dir, cache_dir),
        }
        for each, reader in READERS.items()
    }
    if name is None:
        caption = f"data-dir is {data_dir} by default."
        show(list(rows.values()), as_json, "Data sets", caption, ["description"], ["shape"])
        return
    if name in rows and rows[name]["here"] != "yes":
        show_one(rows[name], {}, as_json)
        return
    source = load_source(name, data_dir, cache_dir, image_size)
    facts: Row = {
        "name": source.name,
        "shape": list(source.image_shape),
        "mean": [round(value, 4) for value in source.mean],
        "std": [round(value, 4) for value in source.std],
    }
    published = rows[name]["shape"] if name in rows else None
    if published and published != facts["shape"]:
        facts |= {"shape as published": published}
    counts = [
        {
            "class": class_name,
            "train": int((source.train.labels == label).sum()),
            "test": int((source.test.labels == label).sum()),
        }
        for label, class_name in enumerate(source.class_names)
    ]
    show_one(facts, {"classes": counts}, as_json)


def availability(name: str, data_dir: Path, cache_dir: Path) -> str:
    """Whether the data set can be used here without a download, else how to get it."""
    from data.cache import is_cached
    from data.readers import DEBIAN_DATASETS

    if name.endswith(":PATH"):
        return "your own images"
    if name not in DATA_FILES:
        return "yes"
    files = [data_dir / file for file in DATA_FILES[name]]
    if is_cached(name, cache_dir) or any(
        path.exists() for path in (*files, DEBIAN_DATASETS / name)
    ):
        return "yes"
    place = f"data-dir/{DATA_FILES[name][0]}"
    return f"put it in {place}" if name == "tiny-imagenet" else f"download, or put it in {place}"


def presets(
    name: NameArgument = None, as_json: JsonOption = False, measure: MeasureOption = False
) -> None:
    """List the papers' settings, or show one with its keys and its expected time here."""
    if name is None:
        rows = [preset_row(each, measure, needed=measure) for each in known_presets()]
        caption = f"{estimated_how} {not_measured}, `keel presets NAME` one."
        drop_first = ["method", "model", "expected time"]
        show(rows, as_json, "Presets", caption, ["expected seconds"], drop_first)
        return
    refuse_unknown("preset", name, list(known_presets()))
    keys: list[Row] = [{"key": k, "value": v} for k, v in known_presets()[name].items()]
    show_one(preset_row(name, measure), {"keys": keys}, as_json)
    if not as_json:
        terminal_console().print(estimated_how)


estimated_how = (
    "Expected time is an estimate: the model's measured ms per image (scaled by the image's area) "
    "times training samples, epochs and rounds, plus the method's extra forward passes and the "
    "evaluation of the test set, divided by the number of cores of this machine (1 on a GPU)."
)


def preset_row(name: str, again: bool = False, needed: bool = True) -> Row:
    """Method, data, model, clients, rounds and expected time; measured if `needed`."""
    config = resolve_config({"preset": name})
    speed = model_speed(config.model.model, again, needed)
    seconds = expected_seconds(config, speed) if speed else None
    return {
        "name": name,
        "method": config.rounds.method,
        "data": config.data.source,
        "model": config.model.model,
        "clients": config.rounds.num_clients,
        "rounds": config.rounds.num_rounds,
        "expected time": None if seconds is None else duration(seconds),
        "expected seconds": None if seconds is None else round(seconds),
    }


def expected_seconds(config: RunConfig, speed: Row) -> float:
    """An estimate of a run's time on this machine; `estimated_how` describes it."""
    from client_app.methods import method_class
    from data.readers import READERS

    rounds, data, spec = config.rounds, config.data, MODELS[config.model.model]
    info = READERS[data.source].published
    assert info is not None
    pixels = data.image_size or spec.image_size or info.image_shape[1]
    area = (pixels / (spec.image_size or 32)) ** 2
    extra = re.match(r"\d+", method_class(rounds.method).extra_forwards)
    step_ms = speed["step_ms"] + int(extra[0] if extra else 1) * speed["forward_ms"]
    share = data.data_fraction * rounds.fraction_train * (1 - data.local_test_fraction)
    training_ms = info.num_train * share * config.train.local_epochs * step_ms
    evaluation_ms = info.num_test * speed["forward_ms"] / rounds.evaluate_every
    workers = num_cores() if speed["device"].startswith("cpu") else 1
    return float(rounds.num_rounds * area * (training_ms + evaluation_ms) / workers / 1e3)


def keys(name: NameArgument = None, as_json: JsonOption = False) -> None:
    """List the config keys with type, default, range and meaning; NAME: a key or its beginning.

    The options of a method are listed only if you name it: `keel keys METHOD`.
    """
    groups = [*CONFIG_GROUPS, *((options, f"{n}.") for n, options in SERVER_OPTIMIZERS.items())]
    if name is not None:
        from client_app.methods import method_class

        groups += [(method_class(method), f"{method}.") for method in method_names()]
    rows = [row for options, prefix in groups for row in option_rows(options, prefix)]
    rows = [{"key": row.pop("option"), **row} for row in rows]
    if name is not None:
        found = [row for row in rows if row["key"].startswith(name)]
        if not found:
            refuse_unknown("config key", name, [row["key"] for row in rows])
        rows = found
    if as_json or terminal_console().is_terminal:
        show(rows, as_json, "Config keys", "Set one with `keel run KEY=VALUE`.", ["source"])
        return
    for row in rows:  # a line each, to be searched
        print(f"{row['key']}={typed(row['default'])}  ({row['range']}) {row['description']}")


CONFIG_GROUPS: list[tuple[type, str]] = [
    (RoundsConfig, ""),
    (DataConfig, ""),
    (ModelConfig, ""),
    (TrainConfig, ""),
    (PrivacyConfig, "privacy."),
]


# --- output and cache ------------------------------------------------------------------------


def show(
    rows: Sequence[Row],
    as_json: bool,
    title: str,
    caption: str = "",
    hidden: Sequence[str] = (),
    drop_first: Sequence[str] = (),
) -> None:
    """Rows with equal keys as JSON, or as a table without the hidden columns.

    Where the terminal is too narrow, the columns `drop_first` are left out, those without a value
    before the others; options are then listed, one below the other.
    """
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    columns = [column for column in rows[0] if column not in hidden]

    def build(shown: Sequence[str]) -> Table:
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.padding = (0, 1, 0, 0)
        for name in shown:
            is_number = all(isinstance(row[name], int | float | None) for row in rows)
            justify: Literal["left", "right"] = "right" if is_number else "left"
            cells = [cell(name, row[name]) for row in rows]
            add_column(table, name, cells, justify, is_whole=name == shown[0])
        for row in rows:
            table.add_row(*(escape(cell(name, row[name])) for name in shown))
        return table

    if "description" in columns and is_too_wide(build(columns)):
        list_options(rows, columns)
    else:
        drop_first = sorted(drop_first, key=lambda name: any(row[name] is not None for row in rows))
        print_table(build, columns, drop_first)
    if caption:
        terminal_console().print(caption, highlight=False)


def list_options(rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Each option's key, default and range in a line, its description and source indented below."""
    console = terminal_console()
    for row in rows:
        key = (f"{row[columns[0]]}={typed(row['default'])}", "bold")
        console.print(Text.assemble(key, f"  ({row['range']})"))
        about = [row[name] for name in ("description", "source") if name in columns and row[name]]
        console.print(Padding("; ".join(about), (0, 0, 0, 4)), markup=False)


def show_one(facts: Row, tables: Mapping[str, Sequence[Row]], as_json: bool) -> None:
    """Facts, one per line, then tables; or everything as one JSON object."""
    if as_json:
        print(json.dumps(facts | dict(tables), indent=2))
        return
    console = terminal_console()
    for key, value in facts.items():
        console.print(Text.assemble((f"{key}: ", "bold"), text_of(value)), soft_wrap=True)
    for title, rows in tables.items():
        if rows:
            show(rows, False, title)


def cell(column: str, value: Any) -> str:
    """A cell of a table; values of config keys are shown as they are typed."""
    return typed(value) if column in ("default", "value") else text_of(value)


def text_of(value: Any) -> str:
    """A text for people: yes and no, thousands separated, lists with commas, a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} = {text_of(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        separator = " x " if all(isinstance(v, int) for v in value) else ", "
        return separator.join(text_of(v) for v in value)
    return str(value)


def digest_of(*patterns: str) -> str:
    """A digest of the source files that match."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in patterns for path in app_folder.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cached(name: str, key: Any, compute: Callable[[], T], again: bool = False) -> T:
    """The stored result of `compute` for this key; calls it if there is none, or with `again`.

    None is not stored.
    """
    path = keel_home() / "cache" / f"{name}.json"
    key = json.loads(json.dumps(key))
    if not again:
        with suppress(OSError, ValueError, LookupError, TypeError):  # none yet, or damaged
            stored = json.loads(path.read_text())
            if stored["key"] == key:
                return typing.cast(T, stored["value"])
    value = compute()
    if value is not None:
        with suppress(OSError):  # a home that is not writable
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps({"key": key, "value": value}).encode())
    return value
