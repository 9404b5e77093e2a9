"""A hub on this machine: repositories of files, behind the part of the hub's interface that huggingface_hub uses to
list and fetch them."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "c" * 40
TAGGED = "d" * 40


class LocalHub:
    """Repositories by name and revision.

    Attributes:
        repositories: By (repository, commit), the folder that holds its files.
        names: Commits by the revisions' names.
        fetched: The files whose content was sent, in order.
    """

    def __init__(self, repositories: Mapping[tuple[str, str], Path]) -> None:
        self.repositories = dict(repositories)
        self.names = {"main": COMMIT, "v1": TAGGED, "refs/pr/5": TAGGED, COMMIT: COMMIT, TAGGED: TAGGED}
        self.fetched: list[str] = []

    def folder(self, repository: str, revision: str) -> tuple[Path | None, str]:
        """The folder of a revision, None if there is none, and its commit."""
        commit = self.names.get(revision, "")
        return self.repositories.get((repository, commit)), commit


def _handler(hub: LocalHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path):
                return self._listing(match[1], match[2], match[3] or "main")
            if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([0-9a-f]{40}|main|v1|refs/pr/5)/(.+)", path):
                return self._file(*match.groups())
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})

        def _listing(self, repository: str, what: str | None, revision: str) -> None:
            known = any(name == repository for name, _ in hub.repositories)
            folder, commit = hub.folder(repository, revision.removesuffix("/"))
            if folder is None:
                code = "RevisionNotFound" if known else "RepoNotFound"
                return self._send(404, b'{"error": "not found"}', {"X-Error-Code": code})
            files = sorted(p for p in folder.rglob("*") if p.is_file())
            names = [str(p.relative_to(folder)) for p in files]
            if what == "tree":
                content = [
                    {"type": "file", "path": n, "size": p.stat().st_size, "oid": _etag(p)}
                    for n, p in zip(names, files, strict=True)
                ]
                return self._send(200, json.dumps(content).encode())
            about = {"_id": "1", "id": repository, "sha": commit, "siblings": [{"rfilename": n} for n in names]}
            return self._send(200, json.dumps(about).encode())

        def _file(self, repository: str, revision: str, name: str) -> None:
            folder, commit = hub.folder(repository, revision)
            if folder is None or not (folder / name).is_file():
                return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            if self.command == "GET":
                hub.fetched.append(name)
            headers = {"X-Repo-Commit": commit, "ETag": f'"{_etag(folder / name)}"'}
            return self._send(200, (folder / name).read_bytes(), headers)

        def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    return Handler


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def served(hub: LocalHub, cache: Path, patch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """Make huggingface_hub ask this hub, and keep files in `cache`."""
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    for name, value in {"ENDPOINT": address, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": False}.items():
        patch.setattr(constants, name, value)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
