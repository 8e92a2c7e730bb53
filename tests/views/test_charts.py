"""Figures: valid for Plotly, small, and without markup from run directories."""

import math
import random
import re
from dataclasses import replace

import pytest
from views_fixtures import HOSTILE

from keel.views.charts import (
    Curve,
    curves,
    heat_map,
    histogram,
    kept_points,
    smoothed,
    stacked,
    static_file,
)


def test_every_figure_is_one_that_plotly_accepts():
    graph_objects = pytest.importorskip("plotly.graph_objects")
    for figure in (
        curves([Curve("a", [1, 2], [3.0, 4.0], [0.1, 0.2], ["x", "y"])], "round", "y", True, True),
        curves([Curve("a", [1, 2], [3.0, 3.0], references=[(2, 5.0)])], "MB", "y"),
        stacked([1, 2], {"a": [1, 0], "b": [0, 0]}, "round", "MB"),
        heat_map([[1.0, None]], [1, 2], ["c"], "round", "client", "%"),
        histogram([1.0, 1.0, 2.0], "x", "n"),
    ):
        graph_objects.Figure(figure).to_json()  # ValueError for what Plotly does not know


def test_the_legend_of_many_curves_leaves_them_most_of_the_chart():
    figure = curves([Curve(f"run {i}", [1, 2], [3.0, 4.0]) for i in range(120)], "round", "y")
    assert figure["layout"]["legend"]["maxheight"] <= 0.25


def test_a_papers_value_is_a_dotted_line_of_the_curves_colour_up_to_its_round():
    both = [Curve(name, [0, 40, 80], [1.0, 2.0, 3.0], references=[(80, 9.5)]) for name in "ab"]
    first, line = curves(both[:1], "round", "y")["data"][::-1]
    assert (line["x"], line["y"], line["line"]["dash"]) == ([0.0, 80.0], [9.5, 9.5], "dot")
    assert line["line"]["color"] == first["line"]["color"]
    assert line["legendgroup"] == first["legendgroup"]
    several = [Curve(name, [0, 40, 80], [1.0, 2.0, 3.0], references=[(80, 9)]) for name in "abcde"]
    assert curves(several, "round", "y")["data"][0]["x"] == [70.0, 80.0]  # or they cover the chart


def test_curves_differ_in_colour_or_dash_and_in_symbol():
    data = curves([Curve(str(i), [1, 2], [1.0, 2.0]) for i in range(14)], "round", "y")["data"]
    assert len({(t["line"]["color"], t["line"]["dash"]) for t in data}) == 14
    assert len({(t["line"]["color"], t["marker"]["symbol"]) for t in data}) == 14


def test_a_curve_without_points_keeps_its_colour_and_a_place_gives_another():
    full, empty = Curve("a", [1, 2], [1.0, 2.0]), Curve("b", [], [])
    alone = curves([empty, full], "round", "y")["data"][0]
    assert alone["line"]["color"] == curves([full] * 2, "round", "y")["data"][1]["line"]["color"]
    placed = curves([replace(full, place=9)], "round", "y")["data"][0]
    assert placed["line"] == curves([full] * 10, "round", "y")["data"][9]["line"]


def test_large_values_are_powers_of_ten_and_not_financial_letters():
    assert curves([Curve("a", [1], [4e12])], "round", "y")["layout"]["yaxis"]["exponentformat"] == (
        "power"
    )


def test_the_axis_of_a_few_clients_has_no_halves():
    few = stacked([1, 2], {"late": [2, 1], "failed": [3, 0]}, "round", "clients")
    assert few["layout"]["yaxis"]["dtick"] == 1
    assert histogram([1.0, 1.0, 2.0], "x", "clients")["layout"]["yaxis"]["dtick"] == 1
    for many in ([50, 1], [0.5, 1.0]):
        assert "dtick" not in stacked([1, 2], {"a": many}, "round", "y")["layout"]["yaxis"]


def test_a_part_keeps_its_colour_where_another_is_zero():
    both = stacked([1], {"failed": [1], "late": [1]}, "round", "clients")["data"]
    (late,) = stacked([1], {"failed": [0], "late": [1]}, "round", "clients")["data"]
    assert late["marker"] == both[1]["marker"] != both[0]["marker"]


def test_a_long_curve_keeps_its_ends_and_its_extremes():
    rng = random.Random(1)
    y = [rng.random() for _ in range(10_000)]
    y[1234], y[8765] = 5.0, -5.0
    kept = kept_points(y, 600)
    assert len(kept) <= 602
    assert {0, 1234, 8765, 9999} <= set(kept)
    assert kept_points(y[:600], 600) == list(range(600))


def test_a_note_stays_with_its_point_on_a_long_curve():
    x = list(range(1, 1001))
    curve = Curve("a", x, [value % 7.0 for value in x], note=list(map(str, x)))
    (trace,) = curves([curve], "MB", "y")["data"]
    assert len(trace["x"]) < 1000
    assert trace["customdata"] == [f" {value:g}" for value in trace["x"]]


def test_a_band_goes_there_along_its_upper_edge_and_back_along_its_lower_one():
    spread = [0.5, None, 1.0]
    figure = curves([Curve("a", [1, 2, 3], [1.0, 2.0, 4.0], spread)], "round", "y")
    band = figure["data"][0]
    assert (band["x"], band["y"]) == ([1, 3, 3, 1], [1.5, 5.0, 3.0, 0.5])


def test_few_rounds_have_a_tick_each():
    def ticks(num_rounds, x="round"):
        curve = Curve("a", range(1, num_rounds + 1), [1.0] * num_rounds)
        return curves([curve], x, "y")["layout"]["xaxis"].get("dtick")

    assert (ticks(1), ticks(8), ticks(9), ticks(8, "MB")) == (None, 1, None, None)


def test_smoothing_is_the_bias_corrected_moving_average():
    values = [3.0, -1.0, 4.0, 1.5]
    for t, found in enumerate(smoothed(values, 0.6)):
        weights = [0.6 ** (t - i) for i in range(t + 1)]
        expected = sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights)
        assert math.isclose(found, expected)
    assert smoothed(values, 0.0) == values


def test_bars_add_up_where_rounds_share_a_bar():
    figure = stacked(range(1, 1801), {"a": [1.0] * 1800}, "round", "MB")
    assert figure["data"][0]["x"][:2] == [1, 9]
    assert sum(figure["data"][0]["y"]) == 1800
    assert figure["layout"]["yaxis"]["title"]["text"] == "MB in 8 rounds"


def test_every_value_is_in_one_bin():
    (trace,) = histogram([0.0, 0.9, 1.0, 3.9, 4.0], "x", "n", num_bins=4)["data"]
    assert trace["y"] == [2, 1, 0, 2]
    assert trace["x"] == [0.5, 1.5, 2.5, 3.5]
    assert trace["width"] == [1.0] * 4


def test_equal_values_are_one_bar_around_the_value():
    figure = histogram([100.0] * 11 + [100.0 - 1e-9], "accuracy (%)", "clients")
    (trace,) = figure["data"]
    assert (trace["x"], trace["y"]) == ([100.0], [12])
    assert figure["layout"]["xaxis"]["tickvals"] == [100.0]  # no accuracy is above


def test_names_that_begin_alike_are_rows_and_curves_of_their_own():
    clients = [f"st-josephs-hospital-department-of-radiology-{i}" for i in range(4)]
    figure = heat_map([[1.0]] * 4, [1], clients, "round", "client", "%")
    assert figure["data"][0]["y"] == clients
    shown = figure["layout"]["yaxis"]["labelalias"]
    assert list(shown) == clients
    assert shown[clients[2]] == "st-josephs-h…radiology-2"
    assert len(set(shown.values())) == 4
    assert max(map(len, shown.values())) == 24
    data = curves([Curve(f"{'a' * 150}{i}", [1], [1.0]) for i in range(3)], "round", "y")["data"]
    assert len({trace["uid"] for trace in data}) == 3


def test_what_a_viewer_has_hidden_stays_so_when_another_part_comes_before_it():
    """Plotly knows a trace by its uid."""
    before = stacked([1], {"failed": [0], "late": [1]}, "round", "clients")["data"]
    after = stacked([1, 2], {"failed": [0, 1], "late": [1, 0]}, "round", "clients")["data"]
    assert before[0]["uid"] == after[1]["uid"] != after[0]["uid"]


def test_a_uid_is_a_name_in_css_whatever_the_curve_is_called():
    """Plotly removes the traces that are gone by a selector made of it, or fails."""
    curve = Curve("fedavg, lr 0.1 (failed 1/3)", [1, 2], [1.0, 2.0], [1.0, 1.0], None, [(2, 3.0)])
    data = curves([curve, curve], "round", "y")["data"]
    data += stacked([1], {"a client's, 50 %": [1]}, "round", "clients")["data"]
    uids = [trace["uid"] for trace in data]
    assert all(re.fullmatch("[a-z0-9-]+", uid) for uid in uids)
    assert len(set(uids)) == len(uids) == 7


def test_bars_of_one_kind_are_named():
    assert stacked([1], {"late": [1]}, "round", "clients")["layout"]["showlegend"]


def test_names_keep_no_markup():
    for figure in (
        curves([Curve(HOSTILE, [1], [1.0])], "round", "y"),
        heat_map([[1.0]], [1], [HOSTILE], "round", "client", "%"),
        stacked([1], {HOSTILE: [1]}, "round", "MB"),
    ):
        assert "<img" not in str(figure)
        assert "\\x1b" not in str(figure)


def test_plotlys_script_comes_from_its_package():
    assert static_file("plotly.js").stat().st_size > 1_000_000
