"""`keel presets`: the papers' settings."""

from keel.cli.arguments import JsonOption, NameArgument
from keel.tables import Row, show, show_one
from protocol.config import presets as known_presets
from protocol.config import refuse_unknown, resolve_config


def presets(name: NameArgument = None, as_json: JsonOption = False) -> None:
    """List the papers' settings, or show one with its keys."""
    if name is None:
        show([preset_row(each) for each in known_presets()], as_json, "Presets")
        return
    refuse_unknown("preset", name, list(known_presets()))
    keys: list[Row] = [{"key": k, "value": v} for k, v in known_presets()[name].items()]
    show_one(preset_row(name), {"keys": keys}, as_json)


def preset_row(name: str) -> Row:
    """Method, data, model, clients and rounds."""
    config = resolve_config({"preset": name})
    return {
        "name": name,
        "method": config.rounds.method,
        "data": config.data.source,
        "model": config.model.model,
        "clients": config.rounds.num_clients,
        "rounds": config.rounds.num_rounds,
    }
