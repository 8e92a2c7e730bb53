"""`keel methods`: the methods, with what they send and store."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from keel.cli.arguments import JsonOption, NameArgument
from keel.cli.keys import option_rows
from keel.tables import Row, markdown, show, show_one
from protocol.catalogue import method_names, method_stem
from protocol.config import default_config, refuse_unknown, resolve_config
from protocol.options import parse_options

ABOUT_COLUMNS = (
    "Traffic: bytes sent and received in a round, relative to FedAvg, on cnn-fedintr. "
    "Extra forwards: additional forward passes per training step, without caching."
)
FLAG_PREFIXES = ("is_", "has_", "sends_", "supports_")


def methods(
    name: NameArgument = None,
    as_json: JsonOption = False,
    in_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table of the documentation.")
    ] = False,
) -> None:
    """List the methods, or show one with its options."""
    if name is None:
        rows = [method_row(each) for each in method_names()]
        if in_markdown:
            print(markdown_table(rows))
        else:
            show(rows, as_json, "Methods", ABOUT_COLUMNS, ["client state"])
        return
    refuse_unknown("method", name, list(method_names()))
    from client_app.methods import documentation, method_class

    spec = method_class(name)
    facts = {
        "method": name,
        "summary": documentation(name).partition("\n")[0],
        "paper": spec.paper,
        "regularises": spec.regularises,
        "traffic": traffic(name),
        "extra forwards": spec.extra_forwards,
        "file": f"client_app/methods/{method_stem(name)}.py",
        "capabilities": capabilities(name) if as_json else in_words(capabilities(name)),
    }
    show_one(facts, {"options": option_rows(spec, f"{name}.")}, as_json)


def method_row(name: str) -> Row:
    """A method as a row of the list."""
    from client_app.methods import method_class

    spec = method_class(name)
    return {
        "name": name,
        "paper": spec.paper,
        "regularises": spec.regularises,
        "client state": spec.client_state,
        "stateful": spec.is_stateful,
        "personal": spec.is_personal,
        "traffic": traffic(name),
        "extra forwards": spec.extra_forwards,
    }


def markdown_table(rows: Iterable[Row]) -> str:
    """The table of methods in docs/how-to/choose-a-method.md."""
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


def in_words(flags: Row) -> str:
    """Capability flags in a line: those that hold, the weighting and what is shared."""
    names = [name.removeprefix("is_").replace("_", " ") for name, on in flags.items() if on is True]
    weighting = {"examples": "by examples", "uniform": "uniformly"}[flags["default_weighting"]]
    return f"{', '.join(names)}; weighted {weighting}; shares {flags['shared_part']}"


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
