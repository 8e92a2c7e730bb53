"""What the page that compares runs shows: curves with bands over seeds, tables, exports."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from keel.runs import FINISHED, differing_keys, uses
from keel.views.charts import PALETTE, Curve, Figure, curves, smoothed
from keel.views.exports import csv_text, latex, latex_table
from keel.views.run_page import BYTES_DOWN, BYTES_UP, points_of, seconds_of
from keel.views.store import NOT_A_SETTING, Entry, History, number, text_of
from protocol.catalogue import method_names
from protocol.options import typed
from server_app.history import CURVES, HEADLINE, Line

MAX_RUNS = 120
AXES = {"round": "round", "bytes": "MB sent and received", "seconds": "seconds"}
HEADLINE_CHOICE = "headline"
MAX_LABEL_KEYS = 4

Run = tuple[Entry, History]


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
    """Runs that differ only in the seed.

    counted: the runs that are averaged: the finished ones, or all if none has finished. repeats:
    further runs of a seed, which do not count. unfinished: how many runs have not finished, such as
    `failed 1/3`.
    """

    label: str
    runs: Sequence[Run]
    counted: Sequence[Run]
    repeats: Sequence[Entry]
    num_seeds: int
    unfinished: str


def group_of(label: str, runs: Sequence[Run]) -> Group:
    """The runs as a group; of several with a seed one counts, finished rather than new."""
    states = {entry.id: entry.state for entry, _ in runs}
    by_seed: dict[str, Run] = {}
    for run in sorted(runs, key=lambda run: (states[run[0].id] == FINISHED, run[0].changed)):
        by_seed[text_of(run[0].config.get("seed"))] = run
    chosen = {entry.id for entry, _ in by_seed.values()}
    found = [run for run in runs if run[0].id in chosen]
    others = Counter(text_of(states[each].partition(":")[0], 40) for each in chosen)
    others.pop(FINISHED, None)
    return Group(
        label,
        runs,
        counted=[run for run in found if states[run[0].id] == FINISHED] or found,
        repeats=[entry for entry, _ in runs if entry.id not in chosen],
        num_seeds=len(found),
        unfinished=", ".join(f"{word} {n}/{len(found)}" for word, n in sorted(others.items())),
    )


def grouped(runs: Sequence[Run], by_seed: bool = False) -> list[Group]:
    """The runs by setting, in the order given, labelled by what distinguishes them.

    by_seed: each run is a group of its own.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run[0].id if by_seed else run[0].setting, []).append(run)
    heads = [group[0][0] for group in groups.values()]
    chosen = {key for head in heads for key in head.overrides}
    keys = differing_keys([head.config for head in heads], NOT_A_SETTING)
    keys = sorted(keys, key=lambda key: (key != "method", key not in chosen, key))
    names = []
    for head in heads:
        own = [key for key in keys if uses(head.config, key)][:MAX_LABEL_KEYS]
        parts = [
            head.method if key == "method" else f"{key} {text_of(typed(head.config.get(key)), 40)}"
            for key in own
        ]
        names.append(", ".join(parts) or head.method)
    found = []
    for i, group in enumerate(groups.values()):
        name = names[i]
        if by_seed or names.count(name) > 1:
            name += f", {heads[i].name}"
        found.append(group_of(name, group))
    return found


def values_of(lines: Sequence[Line], view: View) -> list[tuple[int, float]]:
    """(round, value) of the chosen curve; accuracies in percent."""
    key, _, name = view.curve.partition(".")
    if view.curve == HEADLINE_CHOICE:
        points = next((p for pair in HEADLINE if (p := points_of(lines, *pair))), [])
        return [(r, 100 * v) for r, v in points]
    if key == "loss":
        return points_of(lines, "losses", name)
    return [(r, 100 * v) for r, v in points_of(lines, key, name)]


def x_of(lines: Sequence[Line], axis: str) -> dict[int, float]:
    """Round to position on the axis: bytes and seconds add up."""
    total, found = 0.0, {}
    for line in lines:
        if axis == "bytes":
            total += sum(number(line.get(key)) or 0 for key in (*BYTES_DOWN, *BYTES_UP)) / 1e6
        else:
            total = total + seconds_of(line) if axis == "seconds" else float(line["round"])
        found[line["round"]] = total
    return found


def curve_of(group: Group, view: View) -> Curve:
    """Mean over the runs that have a round, with ± one deviation where several have it."""
    label = f"{group.label} ({group.unfinished})" if group.unfinished else group.label
    found = []  # of each run: round to (place, value)
    for _, reader in group.counted:
        points, places = values_of(reader.lines, view), x_of(reader.lines, view.x)
        smooth = smoothed([value for _, value in points], view.smoothing)
        found.append({r: (places[r], v) for (r, _), v in zip(points, smooth, strict=True)})
    found = [each for each in found if each]
    x, mean, spread, note = [], [], [], []
    for r in sorted(set().union(*found)):
        there, values = zip(*(each[r] for each in found if r in each), strict=True)
        x.append(statistics.fmean(there))
        mean.append(statistics.fmean(values))
        spread.append(statistics.stdev(values) if len(values) > 1 else None)
        of_all = "" if len(values) == len(found) else f"{len(values)} of "
        band = "" if spread[-1] is None else f"± {as_shown(spread[-1], view)} "
        note.append(f"{band}({of_all}{len(found)} seeds)")
    if len(found) < 2:
        return Curve(label, x, mean)
    return Curve(label, x, mean, spread, note)


def note(view: View) -> str:
    """What each curve of `chart` shows."""
    if view.by_seed:
        return "One curve for each run."
    return (
        "Mean over the seeds that finished, or over all where none did; the band is ± one standard "
        "deviation."
    )


def chart(groups: Iterable[Group], view: View) -> Figure:
    """The chosen curve of every group."""
    y = "loss" if is_loss(view) else "accuracy (%)"
    groups = list(groups)
    found = [
        replace(curve_of(group, view), place=place)
        for group, place in zip(groups, places_of(groups), strict=True)
    ]
    figure = curves(found, AXES[view.x], y, view.log_x, view.log_y)
    # a viewer's zoom and hidden curves stay while this does
    figure["layout"]["uirevision"] = f"{view.x} {view.curve} {view.log_x} {view.log_y}"
    return figure


def places_of(groups: Sequence[Group]) -> Sequence[int]:
    """`Curve.place` of each group, by its method: independent of the order and age of the runs.

    If two groups share a method, by their order. A method whose colour is taken gets the next one.
    """
    methods = [str(group.runs[0][0].config.get("method")) for group in groups]
    if len(set(methods)) < len(methods):
        return range(len(methods))
    known = ["fedavg", *method_names(), *sorted(methods)]  # first, as in the papers' tables
    found: dict[str, int] = {}
    for method in sorted(methods, key=known.index):
        first = known.index(method) % len(PALETTE)
        places = [*range(first, len(PALETTE)), *range(first), *range(len(PALETTE), MAX_RUNS)]
        found[method] = next(place for place in places if place not in found.values())
    return [found[method] for method in methods]


def choices(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """(value, description) of the curves that some run has."""
    found = [(HEADLINE_CHOICE, "accuracy (personal, else global)")]
    for key, name, description in CURVES:
        if any(points_of(reader.lines, key, name) for _, reader in runs):
            found.append((f"{key}.{name}", description))
    terms = dict.fromkeys(t for _, r in runs for line in r.lines for t in line["losses"])
    return found + [(f"loss.{term}", f"loss: {text_of(term, 60)}") for term in terms]


def is_loss(view: View) -> bool:
    """Whether the chosen curve is a loss: no percentage, and the lowest is the best."""
    return view.curve.startswith("loss.")


def as_shown(value: float, view: View) -> str:
    """A value of the chosen curve, as tables show it."""
    return f"{value:.4g}" if is_loss(view) else f"{value:.2f}"


def header(view: View) -> list[str]:
    """The headings of the table of results."""
    unit = "" if is_loss(view) else " (%)"
    about = ["group", "seeds", "not finished", "rounds", "round of final"]
    return [*about, f"final{unit}", "± sd", f"best{unit}", "MB", "seconds"]


def result_rows(groups: Sequence[Group], view: View) -> list[list[str]]:
    """A row under `header` for each group: means over the runs that count.

    The final and best values are up to the last round that all of them have.
    """
    rows, best_of = [], min if is_loss(view) else max
    for group in groups:
        found = [dict(values_of(reader.lines, view)) for _, reader in group.counted]
        found = [each for each in found if each]
        common = sorted(set.intersection(*map(set, found))) if found else []
        final = [each[common[-1]] for each in found] if common else []
        best = [best_of(each[r] for r in common) for each in found] if common else []
        last_rounds, sent_mb, spent_s = (
            [max(x_of(reader.lines, axis).values(), default=0.0) for _, reader in group.counted]
            for axis in ("round", "bytes", "seconds")
        )
        fewest, most = f"{min(last_rounds):.0f}", f"{max(last_rounds):.0f}"
        rows.append(
            [
                group.label,
                str(group.num_seeds),
                group.unfinished,
                fewest if fewest == most else f"{fewest}–{most}",
                str(common[-1]) if common else "",
                as_shown(statistics.fmean(final), view) if final else "",
                as_shown(statistics.stdev(final), view) if len(final) > 1 else "",
                as_shown(statistics.fmean(best), view) if best else "",
                f"{statistics.fmean(sent_mb):.1f}",
                f"{statistics.fmean(spent_s):.1f}",
            ]
        )
    return rows


def as_latex(groups: Sequence[Group], view: View) -> str:
    """The table of results."""
    rows = [[latex(cell) for cell in row] for row in result_rows(groups, view)]
    return latex_table(header(view), rows)


def config_rows(groups: Sequence[Group]) -> list[list[str]]:
    """A row for each config key that differs between groups that use it, with their values."""
    configs = [group.runs[0][0].config for group in groups]
    return [
        [key, *(text_of(typed(c.get(key, "")), 80) if uses(c, key) else "" for c in configs)]
        for key in differing_keys(configs, NOT_A_SETTING)
    ]


def as_csv(groups: Sequence[Group], view: View) -> str:
    """The table of results, a blank line, and every point of every curve."""
    rows: list[Sequence[object]] = [header(view), *result_rows(groups, view), []]
    rows.append(["group", "run", "seed", "state", "round", "MB", "seconds", view.curve])
    for group in groups:
        for entry, reader in group.runs:
            sent, spent = x_of(reader.lines, "bytes"), x_of(reader.lines, "seconds")
            seed, state = text_of(entry.config.get("seed", "")), text_of(entry.state)
            about = [group.label, entry.name, seed, state]
            for r, value in values_of(reader.lines, view):
                rows.append([*about, r, f"{sent[r]:.6g}", f"{spent[r]:.6g}", f"{value:.6g}"])
    return csv_text(rows)


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
