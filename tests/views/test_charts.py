"""Figures: their numbers, and no markup from run directories. Plotly checks their form."""

import math

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from views_fixtures import HOSTILE

from keel.views.charts import Curve, curves, heat_map, histogram, kept_points, stacked


def table(*columns, names=None):
    values = dict(zip(names or "abcd", columns, strict=False))
    return pd.DataFrame(values, index=pd.RangeIndex(1, len(columns[0]) + 1, name="round"))


def test_a_papers_value_is_a_dotted_line_of_the_curves_colour_up_to_its_round():
    curve = Curve("a", [0, 40, 80], [1.0, 2.0, 3.0], references=[(80, 9.5)])
    reference, line = curves([curve], "round", "y")["data"]
    assert (reference["x"], reference["y"]) == ([0, 80], [9.5, 9.5])
    assert reference["line"] == {"color": line["line"]["color"], "dash": "dot"}
    assert reference["legendgroup"] == line["legendgroup"]


def test_curves_differ_in_colour_or_dash_and_in_symbol():
    data = curves([Curve(str(i), [1, 2], [1.0, 2.0]) for i in range(14)], "round", "y")["data"]
    assert len({(t["line"]["color"], t["line"]["dash"]) for t in data}) == 14
    assert len({(t["line"]["color"], t["marker"]["symbol"]) for t in data}) == 14


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=300))
def test_a_long_curve_keeps_its_ends_and_its_extremes(y):
    kept = kept_points(y, 20)
    assert len(kept) <= 22
    assert {0, len(y) - 1} <= set(kept)
    assert {min(y), max(y)} <= {y[i] for i in kept}


def test_a_band_goes_there_along_its_upper_edge_and_back_along_its_lower_one():
    spread = [0.5, None, 1.0]
    figure = curves([Curve("a", [1, 2, 3], [1.0, 2.0, 4.0], spread)], "round", "y")
    band = figure["data"][0]
    assert (band["x"], band["y"]) == ([1, 3, 3, 1], [1.5, 5.0, 3.0, 0.5])


@pytest.mark.parametrize("num_rounds", [1, 250, 1800])
def test_bars_add_up_where_rounds_share_a_bar(num_rounds):
    figure = stacked(table([1.0] * num_rounds, [0.0] * num_rounds), "MB")
    [bars] = figure["data"]  # a part that is 0 has none
    assert sum(bars["y"]) == num_rounds
    assert len(bars["x"]) <= 250
    assert bars["x"][0] == 1


def test_a_heat_map_has_the_tables_numbers_and_gaps():
    values = table([0.25, math.nan], [1.0, 2.0])
    [trace] = heat_map(values, "client", "round", "%")["data"]
    assert trace["z"] == [[0.25, 1.0], [None, 2.0]]
    assert (trace["x"], trace["y"]) == (["a", "b"], ["1", "2"])


def test_names_keep_no_markup():
    for figure in (
        curves([Curve(HOSTILE, [1], [1.0])], "round", "y"),
        heat_map(table([1.0], names=[HOSTILE]), "client", "round", "%"),
        stacked(table([1.0], names=[HOSTILE]), "MB"),
        histogram([1.0], "x", "clients"),
    ):
        assert "<img" not in str(figure)
        assert "\\x1b" not in str(figure)
