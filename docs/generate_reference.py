"""Generated pages: the reference (commands, methods, config keys) from the code, and the notebooks.

An mkdocs hook: `on_files` adds them to the site. Called with a folder, it writes them there.
"""

import json
import sys
from pathlib import Path
from typing import Any

repository = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(repository))

import typer  # noqa: E402
from typer.cli import get_docs_for_click  # noqa: E402

from client_app.methods import documentation, method_class  # noqa: E402
from keel.cli import main as command_line  # noqa: E402
from keel.cli.keys import CONFIG_GROUPS, option_rows  # noqa: E402
from keel.tables import markdown as table  # noqa: E402
from protocol import catalogue, config  # noqa: E402
from protocol.server_optimizers import SERVER_OPTIMIZERS  # noqa: E402


def code(value: object) -> str:
    """A config value as one writes it on the command line; an empty string is marked as such."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text}`" if text else "(empty)"


def options_table(options: type, prefix: str = "") -> str:
    """Key, type, default, allowed values and meaning of each option; "" if there is none."""
    rows = [
        (
            f"`{row['option']}`",
            row["type"],
            code(row["default"]),
            row["range"],
            row["description"] + (f" ({row['source']})" if row["source"] else ""),
        )
        for row in option_rows(options, prefix)
    ]
    return table(("key", "type", "default", "allowed", "meaning"), rows) if rows else ""


def config_page() -> str:
    """Every key that is not a method's."""
    titles = (
        *("The run, aggregation and evaluation", "Data", "Model", "Local training"),
        "Differential privacy",
    )
    parts = [
        "# Config keys",
        "Any key can be set on the command line: `keel run KEY=VALUE ...`. A preset overrides the "
        "defaults; keys given explicitly override the preset. A method's options are on the page "
        "[Methods](methods.md).",
    ]
    for title, (options, prefix) in zip(titles, CONFIG_GROUPS, strict=True):
        parts += [f"## {title}", options_table(options, prefix)]
    parts.append("## Server optimizers")
    parts.append("`server-optimizer` selects one of these.")
    for name, options in SERVER_OPTIMIZERS.items():
        parts += [f"### {name}", options.__doc__ or "", options_table(options, f"{name}.")]
    parts += ["## Presets", "`keel presets NAME` shows the keys that a preset sets."]
    rows = (
        [f"`{name}`", *(str(keys.get(k, "")) for k in ("method", "source", "num-rounds"))]
        for name, keys in config.presets().items()
    )
    parts.append(table(("preset", "method", "source", "rounds"), rows))
    return "\n\n".join(part for part in parts if part)


flag_words = {
    "is_personal": "personal: evaluated with each client's own model",
    "is_stateful": "stateful: stores client state between rounds",
    "supports_mixed_architectures": "clients may train different architectures",
    "supports_privacy": "supports differential privacy (`privacy.epsilon`)",
    "supports_server_optimizer": "works with every server optimizer",
}


def methods_page() -> str:
    """Every method with its documentation, capabilities and options."""
    parts = [
        "# Methods",
        "Select one with `keel run method=NAME`. The text is the documentation at the top of the "
        "method's file in `client_app/methods/`, which names the paper, the equations and the "
        "differences from them.",
    ]
    for name in catalogue.method_names():
        spec, text = method_class(name), documentation(name)
        abilities = [words for flag, words in flag_words.items() if getattr(spec, flag)]
        parts += [f"## {name}", text.partition("\n")[0]]
        parts.append("\n".join(f"- {words}" for words in abilities))
        rest = text.partition("\n")[2].strip()
        parts.append(f"```text\n{rest}\n```" if rest else "")
        parts.append(options_table(spec, f"{name}."))
    return "\n\n".join(part for part in parts if part)


def commands_page() -> str:
    """Every command with its arguments and options."""
    parts = [
        "# Commands",
        "`keel COMMAND --help` shows the same in a terminal. Exit codes: 0 finished, 1 failed, "
        "2 refused before anything was trained, 130 interrupted.",
    ]
    for name in command_line.COMMANDS:
        command = command_line.load(name)
        context = typer.Context(command, info_name=name)
        parts.append(get_docs_for_click(obj=command, ctx=context, indent=1, name=f"keel {name}"))
    return "\n\n".join(parts)


NOTEBOOKS = {
    "notebook.md": "keel-in-a-notebook.ipynb",
    "own-code-notebook.md": "own-code-in-a-notebook.ipynb",
}
PAGES = {"commands.md": commands_page, "methods.md": methods_page, "config.md": config_page}


def notebook_page(name: str) -> str:
    """The cells of a notebook: text as it is, code in blocks."""
    notebook = json.loads((repository / "docs" / name).read_text())
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join([*parts, f"[The notebook itself]({name})"])


def on_files(files: Any, config: Any) -> Any:
    """mkdocs' hook: add the generated pages."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        files.append(File.generated(config, f"reference/{name}", content=page()))
    for name, notebook in NOTEBOOKS.items():
        files.append(File.generated(config, name, content=notebook_page(notebook)))
    return files


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (target / name).write_text(page())
