"""Names of the curves of a run, in recipes and comparisons."""

from server_app.history import WHOSE

# Accuracy of the global model on the source's test set, of the global model on the clients' test
# parts, of the personal models on those. A curve `a.b` is line["a"]["b"] of history.jsonl.
# A score of `metrics` is one of `global.NAME`, `local_global.NAME`, `personal.NAME`.
CURVES = ("global.accuracy", "local_global.mean", "personal.mean")


def check_curve_name(text: object) -> str:
    """One of CURVES, or a score's name after `global.` and the like; else ValueError."""
    key, dot, name = str(text).partition(".")
    if text in CURVES or (dot and key in WHOSE and name not in ("", "accuracy", "mean")):
        return str(text)
    raise ValueError(
        f"expected {', '.join(CURVES)}, or a score of metrics after global., local_global. or "
        "personal., such as global.macro-f1"
    )
