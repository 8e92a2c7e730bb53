"""Tables for spreadsheets and papers: text that is safe in a CSV file, and LaTeX with booktabs."""

import csv
import io
import unicodedata
from collections.abc import Iterable


def word_of(letter: str) -> str:
    """LaTeX's word for a Greek letter: alpha, Delta."""
    _, case, *_, word = unicodedata.name(letter).replace("LAMDA", "LAMBDA").split()
    return word.capitalize() if case == "CAPITAL" else word.lower()


GREEK = "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ"  # pdflatex stops with an error at these
LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{c: f"\\{c}" for c in "&%$#_{}"},
    **{c: f"{{{c}}}" for c in "[*"},  # else the \\ of the row above takes it as its argument
    # printed as other characters in LaTeX's default encoding
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
    "±": r"$\pm$",
    "–": "--",
    "‹": r"$<$",
    "›": r"$>$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "∞": r"$\infty$",
    "→": r"$\to$",
    **{letter: f"$\\{word_of(letter)}$" for letter in GREEK},
}


def harmless(cell: str) -> str:
    """Text that a spreadsheet does not take for a formula."""
    try:
        float(cell)
    except ValueError:
        return f"'{cell}" if cell[:1] in tuple("=+-@\t") else cell
    return cell


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """The rows as CSV, their cells `harmless`; None is empty."""
    out = io.StringIO()
    csv.writer(out).writerows(
        ["" if cell is None else harmless(str(cell)) for cell in row] for row in rows
    )
    return out.getvalue()


def latex(text: str) -> str:
    """Text as LaTeX shows it."""
    return "".join(LATEX.get(c, c) for c in text)
