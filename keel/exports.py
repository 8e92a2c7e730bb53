"""Tables for spreadsheets and papers: text that is safe in a CSV file, and LaTeX with booktabs."""

import csv
import io
import unicodedata
from collections.abc import Iterable, Sequence


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
Groups = Sequence[tuple[str, int]]  # name and number of columns


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


def latex_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], groups: Sequence[Groups] = ()
) -> str:
    """A booktabs table: the first column left, the others right. `rows` is LaTeX already.

    groups: rows of headings above `header`, for the columns after the first.
    """
    lines = ["% \\usepackage{booktabs}", f"\\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}"]
    lines.append("\\toprule")
    for names in groups:
        spans = [f"\\multicolumn{{{n}}}{{c}}{{{latex(name)}}}" for name, n in names]
        lines.append(" & ".join(["", *spans]) + r" \\")
        start, rules = 2, []
        for _, n in names:
            rules.append(f"\\cmidrule(lr){{{start}-{start + n - 1}}}")
            start += n
        lines.append("".join(rules))
    lines += [" & ".join(map(latex, header)) + r" \\", "\\midrule"]
    lines += [" & ".join(row) + r" \\" for row in rows]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"
