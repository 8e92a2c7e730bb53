"""Run directories with every kind of damage, and a client of the pages without a server."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from keel.views.server import create_app
from keel.views.store import Store
from tests.tools.run_directories import make_run

TOKEN = "a-token"
HOSTILE = '<img src=x onerror="alert(1)">\x1b[31m../../etc/passwd'


class Pages:
    """GETs pages of `keel ui` over these roots, with the token's cookie."""

    def __init__(self, *roots: Path) -> None:
        self.store = Store(roots)
        self.app = create_app(self.store, TOKEN)
        self.cookies = {self.app.cookie: TOKEN}

    def get(self, path: str, method: str = "GET", **options: Any) -> httpx.Response:
        """One request. Options: headers, cookies."""

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=True)
            cookies = options.pop("cookies", self.cookies)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1:8777", cookies=cookies
            ) as client:
                return await client.request(method, path, **options)

        return asyncio.run(send())

    def id_of(self, name: str) -> str:
        """The id of the run of this name."""
        return next(entry.id for entry in self.store.runs().values() if entry.name == name)


def damaged_runs(base: Path) -> list[str]:
    """Make run directories that are damaged in every way; returns their names."""

    def run(name: str, **keys: Any) -> Path:
        return make_run(base / name, {"method": "fedavg"}, 3, **keys)

    run("half-written", num_written=2, status="running")
    with (base / "half-written" / "history.jsonl").open("a") as file:
        file.write('{"round": 3, "participants": ["cli')
    (run("no-summary") / "summary.json").unlink()
    (run("no-history") / "history.jsonl").unlink()
    for name in ("config", "summary", "roster"):
        (run(f"empty-{name}") / f"{name}.json").write_text("")
        (run(f"deep-{name}") / f"{name}.json").write_text("[" * 100_000)
        (run(f"wrong-{name}") / f"{name}.json").write_text('{"config": 3, "round": "x"}')
        (run(f"binary-{name}") / f"{name}.json").write_bytes(bytes(range(256)))
    strange = {"round": 1, "losses": {"a": "b"}, "seconds": {"x": None}, "left_out": {"c": 1}}
    lines = ["7", "null", "[[", "{}", '{"round": 1e999}', "[" * 100_000, json.dumps(strange)]
    (run("wrong-history") / "history.jsonl").write_text("\n".join(lines) + "\n")
    (run("binary-history") / "history.jsonl").write_bytes(bytes(range(256)) * 20)
    linked = run("linked")
    (linked / "run.log").unlink()
    (linked / "run.log").symlink_to("/etc/passwd")
    return sorted(path.name for path in base.iterdir())
