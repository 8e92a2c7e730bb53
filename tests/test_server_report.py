"""What the reporter holds in memory does not grow with the number of clients."""

from server_app.history import without_clients


def test_a_line_is_kept_without_what_it_says_of_single_clients():
    score = {"mean": 0.5, "worst_decile": 0.25, "clients": {"client-0000": 0.5}}
    line = {
        "round": 3,
        "participants": ["client-0000"],
        "left_out": {"client-0001": "late"},
        "losses": {"supervised": 1.0},
        "personal": score,
        "local_global": score,
        "global": {"accuracy": 0.5, "loss": 1.0},
    }
    short = {"mean": 0.5, "worst_decile": 0.25}
    kept = {k: v for k, v in line.items() if k != "participants"}
    assert without_clients(line) == {**kept, "personal": short, "local_global": short}
    assert score["clients"]  # the line itself, which goes to history.jsonl, stays whole
