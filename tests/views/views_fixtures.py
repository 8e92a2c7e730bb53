"""A client of the pages without a server, and run directories with every kind of damage."""

import asyncio
from pathlib import Path
from typing import Any

import httpx

from keel.views.guard import Guard
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
        self.cookies = {Guard(TOKEN).cookie: TOKEN}

    def get(self, path: str, method: str = "GET", **options: Any) -> httpx.Response:
        """One request. Options: headers, cookies."""

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            cookies = options.pop("cookies", self.cookies)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1:8777", cookies=cookies
            ) as client:
                return await client.request(method, path, **options)

        return asyncio.run(send())

    def id_of(self, name: str) -> str:
        """The id of the run of this name."""
        return next(row["id"] for row in self.store.rows() if row["name"] == name)


def damaged_runs(base: Path) -> list[str]:
    """Make run directories that are damaged in every way; returns their names."""

    def run(name: str, **keys: Any) -> Path:
        return make_run(base / name, {"method": "fedavg"}, 3, ["a", "b"], **keys)

    with (run("half-written", num_written=2, status="running") / "history.jsonl").open("a") as file:
        file.write('{"round": 3, "participants": ["cli')
    (run("no-summary") / "summary.json").unlink()
    (run("no-history") / "history.jsonl").unlink()
    for name in ("config.json", "summary.json", "roster.json", "history.jsonl", "clients.jsonl"):
        (run(f"empty-{name}") / name).write_text("")
        (run(f"wrong-{name}") / name).write_text('{"config": 3, "round": 1}\n')
        (run(f"binary-{name}") / name).write_bytes(bytes(range(256)))
    return sorted(path.name for path in base.iterdir())
