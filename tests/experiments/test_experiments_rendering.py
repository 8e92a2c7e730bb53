"""The tables of the report: which number is the best, and which columns there are."""

from types import SimpleNamespace

from keel.experiments.rendering import Section, template_environment


def section(means, paper=None, is_time=False):
    results = {}
    for name, mean in means.items():
        cell = SimpleNamespace(
            column=SimpleNamespace(name="c"), take=SimpleNamespace(is_time=is_time), paper=paper
        )
        results[name, "c"] = SimpleNamespace(cell=cell, mean=mean)
    return Section(None, None, "", results, [], [])


def ranks(found):
    return {row: found.rank(result) for (row, _), result in found.results.items()}


def test_the_best_of_a_column_and_the_second_are_marked():
    means = {"a": 50.0, "b": None, "c": 70.0, "d": 60.0}
    assert ranks(section(means)) == {"a": "", "b": "", "c": "best", "d": "second"}
    assert ranks(section(means, is_time=True)) == {"a": "best", "b": "", "c": "", "d": "second"}
    assert ranks(section({"a": 1.0, "b": None})) == {"a": "", "b": ""}
    assert ranks(section({"a": 1.0, "b": 1.0, "c": 0.0})) == {
        **{"a": "best", "b": "best", "c": "second"}
    }


def test_a_sweep_without_numbers_of_a_paper_has_no_columns_for_them():
    assert not section({"a": 1.0}).has_paper_numbers
    assert section({"a": 1.0}, paper=2.0).has_paper_numbers


def test_the_report_has_a_viewport_and_a_dark_scheme():
    template = template_environment().get_template("report.html.j2")
    page = template.render(sections=[], date="today", output="here")
    assert '<meta name="viewport"' in page
    assert "prefers-color-scheme: dark" in page
