"""A small Hugging Face hub on loopback: the requests that huggingface_hub makes, and no more."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(slots=True, kw_only=True)
class LoopbackHub:
    """repos: model id -> the folder it serves; gated: ids whose files are forbidden; holds: ends
    of file names that are sent by half, and the rest when `released` is set."""

    repos: dict[str, Path]
    gated: set[str] = field(default_factory=set)
    holds: tuple[str, ...] = ()
    holding: threading.Event = field(default_factory=threading.Event)  # half a file is out
    released: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    requests: list[str] = field(default_factory=list)  # "GET /path", in order of arrival

    def environment(self, cache: Path) -> dict[str, str]:
        """What a process must have in its environment to use this hub, and a cache of its own."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }


@contextmanager
def serve(
    repos: dict[str, Path], gated: set[str] | None = None, host: str = "127.0.0.1"
) -> Iterator[LoopbackHub]:
    hub = LoopbackHub(repos=repos, gated=gated or set())
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer((host, 0), handler)
    hub.url = f"http://{host}:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LoopbackHub

    def do_GET(self) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        path = self.path.split("?")[0]
        for repo_id, folder in self.hub.repos.items():
            if path in (f"/api/models/{repo_id}", f"/api/models/{repo_id}/revision/main"):
                return self._json({"id": repo_id, "sha": COMMIT, "siblings": []})
            if path.startswith(f"/api/models/{repo_id}/tree/"):
                return self._json([_entry(folder, file) for file in _files(folder)])
            if path.startswith(f"/{repo_id}/resolve/"):
                return self._file(repo_id, folder / path.split("/", 5)[5])
        return self._refuse(404, "RepoNotFound")

    do_HEAD = do_GET

    def log_message(self, *args: object) -> None:
        """Silent."""

    def _json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _file(self, repo_id: str, file: Path) -> None:
        if repo_id in self.hub.gated:
            return self._refuse(403, "GatedRepo")
        if not file.is_file():
            return self._refuse(404, "EntryNotFound")
        body = file.read_bytes()
        return self._send(200, body, {"ETag": f'"{_etag(body)}"', "X-Repo-Commit": COMMIT})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            half = len(body) // 2 if self.path.endswith(self.hub.holds) else len(body)
            self.wfile.write(body[:half])
            if half < len(body):
                self.hub.holding.set()
                self.hub.released.wait(60)
            self.wfile.write(body[half:])


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _entry(folder: Path, file: Path) -> dict[str, object]:
    body = file.read_bytes()
    path = file.relative_to(folder).as_posix()
    return {"type": "file", "path": path, "size": len(body), "oid": _etag(body)}


def _etag(body: bytes) -> str:
    return hashlib.sha1(body, usedforsecurity=False).hexdigest()
