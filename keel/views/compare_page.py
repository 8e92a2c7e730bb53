"""What the page that compares runs shows: curves with bands over seeds, tables, exports."""

import csv
import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from keel.views.charts import Curve, Figure, curves, smoothed
from keel.views.exports import harmless, latex, latex_table
from keel.views.run_page import points_of, seconds_of
from keel.views.store import NOT_A_SETTING, Entry, number, text_of
from server_app.history import CURVES, HistoryReader, Line
from server_app.summary import HEADLINE

MAX_RUNS = 120
AXES = {"round": "round", "bytes": "MB sent and received", "seconds": "seconds"}
HEADLINE_CHOICE = "headline"
MAX_LABEL_KEYS = 4

Run = tuple[Entry, HistoryReader]


@dataclass(frozen=True)
class View:
    """The choices on the page. curve: HEADLINE_CHOICE, `key.name` of CURVES, or `loss.TERM`."""

    x: str = "round"
    curve: str = HEADLINE_CHOICE
    smoothing: float = 0.0
    log_x: bool = False
    log_y: bool = False
    by_seed: bool = False


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the seed, with what is shown of them."""

    label: str
    runs: Sequence[Run]


def differing_keys(entries: Sequence[Entry]) -> list[str]:
    """The config keys, except seeds and paths, whose values differ between the runs."""
    keys = sorted({key for entry in entries for key in entry.config} - NOT_A_SETTING)
    return [key for key in keys if len({str(entry.config.get(key)) for entry in entries}) > 1]


def grouped(runs: Sequence[Run], by_seed: bool = False) -> list[Group]:
    """The runs by setting, in the order given, labelled by what distinguishes them.

    by_seed: each run is a group of its own.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run[0].id if by_seed else run[0].setting, []).append(run)
    heads = [group[0][0] for group in groups.values()]
    chosen = {key for head in heads for key in head.overrides}
    keys = differing_keys(heads)
    keys = sorted(keys, key=lambda key: (key != "method", key not in chosen, key))
    names = []
    for head in heads:
        own = [key for key in keys if not foreign(key, head)][:MAX_LABEL_KEYS]
        parts = [
            head.method if key == "method" else f"{key} {text_of(head.config.get(key), 40)}"
            for key in own
        ]
        names.append(", ".join(parts) or head.method)
    found = []
    for i, group in enumerate(groups.values()):
        name = names[i]
        if by_seed or names.count(name) > 1:
            name += f", {heads[i].name}"
        found.append(Group(name, group))
    return found


def foreign(key: str, entry: Entry) -> bool:
    """Whether a key is an option of another method than the run's."""
    table, dot, _ = key.partition(".")
    return bool(dot) and table not in (entry.config.get("method"), "privacy")


def values_of(lines: Sequence[Line], view: View) -> list[tuple[int, float]]:
    """(round, value) of the chosen curve; accuracies in percent."""
    key, _, name = view.curve.partition(".")
    if view.curve == HEADLINE_CHOICE:
        pairs = [(key, "accuracy" if key == "global" else "mean") for key in HEADLINE]
        points = next((p for pair in pairs if (p := points_of(lines, *pair))), [])
        return [(r, 100 * v) for r, v in points]
    if key == "loss":
        return points_of(lines, "losses", name)
    return [(r, 100 * v) for r, v in points_of(lines, key, name)]


def x_of(lines: Sequence[Line], axis: str) -> dict[int, float]:
    """Round to position on the axis: bytes and seconds add up."""
    total, found = 0.0, {}
    for line in lines:
        if axis == "bytes":
            keys = ("bytes_down", "bytes_up", "evaluation_bytes_down", "evaluation_bytes_up")
            total += sum(number(line.get(key)) or 0 for key in keys) / 1e6
        else:
            total = total + seconds_of(line) if axis == "seconds" else float(line["round"])
        found[line["round"]] = total
    return found


def curve_of(group: Group, view: View) -> Curve:
    """Mean over the group's runs at the rounds that all of them have, with ± one deviation."""
    values = [dict(values_of(reader.lines, view)) for _, reader in group.runs]
    places = [x_of(reader.lines, view.x) for _, reader in group.runs]
    pairs = [(v, p) for v, p in zip(values, places, strict=True) if v]
    if not pairs:
        return Curve(group.label, [], [])
    rounds = sorted(set.intersection(*(set(v) for v, _ in pairs)))
    smooth = [smoothed([v[r] for r in rounds], view.smoothing) for v, _ in pairs]
    each = list(zip(*smooth, strict=True))
    mean = [statistics.fmean(several) for several in each]
    spread = [statistics.stdev(several) if len(several) > 1 else 0.0 for several in each]
    x = [statistics.fmean(p[r] for _, p in pairs) for r in rounds]
    note = [f"± {s:.2f} ({len(pairs)} seeds)" for s in spread] if len(pairs) > 1 else None
    return Curve(group.label, x, mean, spread if len(pairs) > 1 else None, note)


def chart(groups: Iterable[Group], view: View) -> Figure:
    """The chosen curve of every group."""
    y = "loss" if view.curve.startswith("loss.") else "accuracy (%)"
    found = [curve_of(group, view) for group in groups]
    return curves(found, AXES[view.x], y, view.log_x, view.log_y)


def choices(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """(value, description) of the curves that some run has."""
    found = [(HEADLINE_CHOICE, "accuracy (personal, else global)")]
    for key, name, description in CURVES:
        if any(points_of(reader.lines[-1:], key, name) for _, reader in runs):
            found.append((f"{key}.{name}", description))
    terms = dict.fromkeys(t for _, r in runs for line in r.lines[-1:] for t in line["losses"])
    return found + [(f"loss.{term}", f"loss: {text_of(term, 60)}") for term in terms]


HEADER = ("group", "seeds", "rounds", "final (%)", "± sd", "best (%)", "MB", "seconds")


def result_rows(groups: Sequence[Group], view: View) -> list[list[str]]:
    """A row of HEADER for each group: means over its runs."""
    rows, best_of = [], min if view.curve.startswith("loss.") else max
    for group in groups:
        found = [values_of(reader.lines, view) for _, reader in group.runs]
        final = [points[-1][1] for points in found if points]
        best = [best_of(value for _, value in points) for points in found if points]
        ends = [
            [max(x_of(reader.lines, axis).values(), default=0.0) for _, reader in group.runs]
            for axis in ("round", "bytes", "seconds")
        ]
        rounds = "–".join(dict.fromkeys(f"{value:.0f}" for value in (min(ends[0]), max(ends[0]))))
        rows.append(
            [
                *(group.label, str(len(group.runs)), rounds),
                f"{statistics.fmean(final):.2f}" if final else "",
                f"{statistics.stdev(final):.2f}" if len(final) > 1 else "",
                f"{statistics.fmean(best):.2f}" if best else "",
                *(f"{statistics.fmean(ends[1]):.1f}", f"{statistics.fmean(ends[2]):.1f}"),
            ]
        )
    return rows


def as_latex(groups: Sequence[Group], view: View) -> str:
    """The table of results."""
    return latex_table(HEADER, [[latex(cell) for cell in row] for row in result_rows(groups, view)])


def config_rows(groups: Sequence[Group]) -> list[list[str]]:
    """A row for each config key that differs between the groups: the key, and each one's value."""
    heads = [group.runs[0][0] for group in groups]
    return [
        [key, *(text_of(head.config.get(key, ""), 80) for head in heads)]
        for key in differing_keys(heads)
    ]


def as_csv(groups: Sequence[Group], view: View) -> str:
    """The table of results, a blank line, and every point of every curve."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(HEADER)
    writer.writerows([harmless(cell) for cell in row] for row in result_rows(groups, view))
    writer.writerow([])
    writer.writerow(["group", "run", "seed", "round", "MB", "seconds", view.curve])
    for group in groups:
        for entry, reader in group.runs:
            sent, spent = x_of(reader.lines, "bytes"), x_of(reader.lines, "seconds")
            seed = text_of(entry.config.get("seed", ""))
            for r, value in values_of(reader.lines, view):
                about = [harmless(group.label), harmless(entry.name), harmless(seed)]
                writer.writerow([*about, r, f"{sent[r]:.6g}", f"{spent[r]:.6g}", f"{value:.6g}"])
    return out.getvalue()


def view_of(query: Mapping[str, str]) -> View:
    """The choices in a query; what is unknown has its default."""
    smoothing = 0.0
    with suppress(ValueError):
        smoothing = min(0.99, max(0.0, float(query.get("smooth", "0"))))
    curve = query.get("curve", HEADLINE_CHOICE)
    known = {HEADLINE_CHOICE, *(f"{key}.{name}" for key, name, _ in CURVES)}
    return View(
        x=query["x"] if query.get("x") in AXES else "round",
        curve=curve if curve in known or curve.startswith("loss.") else HEADLINE_CHOICE,
        smoothing=smoothing if smoothing == smoothing else 0.0,
        log_x=query.get("logx") == "1",
        log_y=query.get("logy") == "1",
        by_seed=query.get("single") == "1",
    )
