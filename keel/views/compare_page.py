"""What the page that compares runs shows: curves with bands over seeds, tables, exports."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import pandas as pd

from keel.exports import csv_text, latex
from keel.saved_runs import (
    DATA_DIGEST,
    FINISHED,
    SITE_COUNTS,
    differing_keys,
    method_text,
    setting_of,
)
from keel.views.charts import Curve, Figure, curves
from keel.views.run_page import headline
from keel.views.store import ShownRun, fields_of, part_of
from protocol.options import typed
from protocol.text import in_one_line
from server_app.history import CURVES, LOWER_IS_BETTER, WHOSE, score_curves

AXES = {"round": "round", "MB": "MB sent and received", "spent": "seconds"}
HEADLINE_CHOICE = "headline"
MAX_LABEL_KEYS = 4


@dataclass(frozen=True)
class View:
    """The choices on the page. curve: HEADLINE_CHOICE, `key/name` of CURVES,
    `key/scores/NAME`, or `losses/TERM`.
    """

    x: str = "round"
    curve: str = HEADLINE_CHOICE
    smoothing: float = 0.0
    log_x: bool = False
    log_y: bool = False
    by_seed: bool = False

    @property
    def kind(self) -> str:
        """accuracy (in percent), loss, or the name of a score of `metrics`."""
        if self.curve.startswith("losses/"):
            return "loss"
        return self.curve.rpartition("/")[2] if "/scores/" in self.curve else "accuracy"

    @property
    def unit(self) -> str:
        """What follows the kind in headings."""
        return " (%)" if self.kind == "accuracy" else ""

    def shown(self, value: float) -> str:
        """A value of the curve, as tables show it."""
        if pd.isna(value):
            return ""
        return f"{value:.2f}" if self.unit else f"{value:.4g}"


def view_of(query: Mapping[str, str]) -> View:
    """The choices in a query; what is unknown has its default."""
    smoothing = 0.0
    with suppress(ValueError):
        smoothing = min(0.99, max(0.0, float(query.get("smooth", "0"))))
    curve = query.get("curve", HEADLINE_CHOICE)
    known = {HEADLINE_CHOICE, *(f"{key}/{name}" for key, name, _ in CURVES)}
    key, _, name = curve.partition("/scores/")
    known |= {curve} if name and key in WHOSE else set()
    return View(
        x=query["x"] if query.get("x") in AXES else "round",
        curve=curve if curve in known or curve.startswith("losses/") else HEADLINE_CHOICE,
        smoothing=smoothing,
        log_x=query.get("logx") == "1",
        log_y=query.get("logy") == "1",
        by_seed=query.get("single") == "1",
    )


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the seed.

    counted: the runs that are averaged, one a seed: the finished ones, or all if none has
    finished. unfinished: how many seeds have not finished, such as `failed 1/3`.
    """

    label: str
    runs: Sequence[ShownRun]
    counted: Sequence[ShownRun]
    num_seeds: int
    unfinished: str


def group_of(label: str, runs: Sequence[ShownRun]) -> Group:
    """The runs as a group; of several with a seed one counts, finished rather than new."""
    by_seed: dict[object, ShownRun] = {}
    for run in sorted(runs, key=lambda run: (run.state == FINISHED, run.last_change)):
        by_seed[run.config["seed"]] = run
    found = [run for run in runs if run in by_seed.values()]
    states = Counter(in_one_line(run.state.partition(":")[0], 40) for run in found)
    states.pop(FINISHED, None)
    return Group(
        label,
        runs,
        counted=[run for run in found if run.state == FINISHED] or found,
        num_seeds=len(found),
        unfinished=", ".join(f"{word} {n}/{len(found)}" for word, n in sorted(states.items())),
    )


def grouped(runs: Iterable[ShownRun], by_seed: bool = False) -> list[Group]:
    """The runs by setting, in the order of their labels, which say what distinguishes them.

    by_seed: each run is a group of its own.
    """
    groups: dict[str, list[ShownRun]] = {}
    for run in runs:
        key = str(run.directory) if by_seed else fields_of(run)["setting"]
        groups.setdefault(key, []).append(run)
    heads = [group[0] for group in groups.values()]
    chosen = {key for head in heads for key in head.overrides}
    keys = differing_keys([setting_of(head) for head in heads], frozenset())
    first = ("method", DATA_DIGEST, SITE_COUNTS)
    keys = sorted(keys, key=lambda key: (key not in first, key != "method", key not in chosen, key))
    labels = [label_of(head, keys) for head in heads]
    found = []
    for label, group in zip(labels, groups.values(), strict=True):
        is_unique = labels.count(label) == 1 and not by_seed
        name = label if is_unique else f"{label}, {in_one_line(group[0].name, 80)}"
        found.append(group_of(name, group))
    return sorted(found, key=lambda group: group.label)


def label_of(run: ShownRun, keys: Iterable[str]) -> str:
    """The values of the first of these keys that the run uses."""
    setting = setting_of(run)
    parts = [
        method_text(run.config) if key == "method" else f"{key} {typed(setting[key])}"
        for key in [key for key in keys if key in setting][:MAX_LABEL_KEYS]
    ]
    return in_one_line(", ".join(parts) or method_text(run.config), 120)


def points_of(run: ShownRun, view: View) -> pd.DataFrame:
    """By round where the chosen curve was measured: `value` (accuracies in percent), MB, spent."""
    frame = run.frame
    if view.curve == HEADLINE_CHOICE:
        values = headline(frame)
    elif view.curve in frame:
        values = frame[view.curve].dropna() * (100 if view.unit else 1)
    else:
        values = pd.Series(dtype=float)
    return frame[["MB", "spent"]].assign(value=values).dropna()


def curve_of(group: Group, view: View) -> Curve:
    """Mean over the runs that have a round, with ± one deviation where several have it."""
    label = f"{group.label} ({group.unfinished})" if group.unfinished else group.label
    parts = []
    for run in group.counted:
        points = points_of(run, view)
        # corrected for its start; weight 0 changes nothing
        points["value"] = points["value"].ewm(alpha=1 - view.smoothing).mean()
        parts.append(points.rename_axis("round").reset_index())
    every = pd.concat(parts).groupby("round", as_index=False)
    mean, spread, count = every.mean(), every["value"].std()["value"], every["value"].count()
    x, y = list(mean[view.x]), list(mean["value"])
    num = sum(len(part) > 0 for part in parts)
    if num < 2:
        return Curve(label, x, y)
    notes = [
        f"({n} of {num} seeds)" if pd.isna(s) else f"± {view.shown(s)} ({n} of {num} seeds)"
        for s, n in zip(spread, count["value"], strict=True)
    ]
    return Curve(label, x, y, [None if pd.isna(s) else s for s in spread], notes)


def chart(groups: Iterable[Group], view: View) -> Figure:
    """The chosen curve of every group."""
    y = view.kind + view.unit

    found = [curve_of(group, view) for group in groups]
    figure = curves(found, AXES[view.x], y, view.log_x, view.log_y)
    # a viewer's zoom and hidden curves stay while this does
    figure["layout"]["uirevision"] = str([view.x, view.curve, view.log_x, view.log_y, len(found)])
    return figure


def choices(runs: Iterable[ShownRun]) -> list[tuple[str, str]]:
    """(value, description) of the curves that some run has."""
    runs = list(runs)
    frames = [run.frame for run in runs]
    found = [(HEADLINE_CHOICE, "accuracy (personal, else global)")]
    for key, name, description in CURVES:
        if any(f"{key}/{name}" in frame for frame in frames):
            found.append((f"{key}/{name}", description))
    scores = dict.fromkeys(pair for run in runs for pair in score_curves(run.history))
    found += [(f"{key}/scores/{name}", description) for key, name, description in scores]
    terms = dict.fromkeys(term for frame in frames for term in part_of(frame, "losses"))
    return found + [(f"losses/{term}", f"loss: {in_one_line(term, 60)}") for term in terms]


def header(view: View) -> list[str]:
    """The headings of the table of results."""
    unit = view.unit
    about = ["group", "seeds", "not finished", "rounds", "round of final"]
    return [*about, f"final{unit}", "± sd", f"best{unit}", "MB", "seconds"]


def result_rows(groups: Iterable[Group], view: View) -> list[list[str]]:
    """A row under `header` for each group: means over the runs that count.

    The final and best values are up to the last round that all of them have.
    """
    rows = []
    for group in groups:
        values = {run.directory: points_of(run, view)["value"] for run in group.counted}
        # a column for each run, the rounds that all have; a run without the curve does not count
        common = pd.DataFrame({k: v for k, v in values.items() if len(v)}).dropna()
        final = common.iloc[-1] if len(common) else pd.Series(dtype=float)
        best = common.min() if view.kind in LOWER_IS_BETTER else common.max()
        lengths = sorted({run.last_round for run in group.counted})
        frames = [run.frame for run in group.counted]
        spent = [
            sum(frame[name].max() for frame in frames if len(frame)) / len(frames)
            for name in ("MB", "spent")
        ]
        rows.append(
            [
                group.label,
                str(group.num_seeds),
                group.unfinished,
                "–".join(map(str, dict.fromkeys([lengths[0], lengths[-1]]))),
                str(common.index[-1]) if len(common) else "",
                view.shown(final.mean()),
                view.shown(final.std()),
                view.shown(best.mean()),
                *(f"{value:.1f}" for value in spent),
            ]
        )
    return rows


def config_rows(groups: Sequence[Group]) -> list[list[str]]:
    """A row for each key of the setting that differs between groups that have it."""
    settings = [setting_of(group.runs[0]) for group in groups]
    return [
        [key, *(in_one_line(typed(s[key]), 80) if key in s else "" for s in settings)]
        for key in differing_keys(settings, frozenset())
    ]


def as_latex(groups: Sequence[Group], view: View) -> str:
    """The table of results."""
    names = [latex(name) for name in header(view)]
    cells = [[latex(cell) for cell in row] for row in result_rows(groups, view)]
    frame, layout = pd.DataFrame(cells, columns=names), "l" + "r" * (len(names) - 1)
    text: str = frame.style.hide(axis="index").to_latex(hrules=True, column_format=layout)
    return "% \\usepackage{booktabs}\n" + text


def as_csv(groups: Sequence[Group], view: View) -> str:
    """The table of results, a blank line, and every point of every curve."""
    rows: list[Sequence[object]] = [header(view), *result_rows(groups, view), []]
    rows.append(["group", "run", "seed", "state", "round", "MB", "seconds", view.curve])
    for group in groups:
        for run in group.runs:
            about = [group.label, in_one_line(run.name), run.config["seed"], in_one_line(run.state)]
            for r, *numbers in points_of(run, view).itertuples():
                rows.append([*about, r, *(f"{value:.6g}" for value in numbers)])
    return csv_text(rows)
