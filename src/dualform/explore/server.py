"""The local server: the page, its files, and every view as JSON. It runs nothing it is sent."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from urllib.parse import parse_qs

import click
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from dualform.errors import DualformError
from dualform.explore.cards import shorten
from dualform.explore.guard import RequestGuard, is_loopback, refused
from dualform.explore.jobs import WORKERS, Jobs, ViewJob, follow, unforeseen
from dualform.explore.page import asset, json_text, served_page
from dualform.explore.views import Explorer, Json

ASSETS = {"app.js": "text/javascript", "app.css": "text/css"}
NDJSON = "application/x-ndjson"
MOST_FIELDS = 20_000


class ExplorerRoutes:
    """The routes of the explorer, for one run or several."""

    def __init__(self, explorers: Sequence[Explorer]) -> None:
        self._explorers, self._jobs = explorers, Jobs()

    def page(self, request: Request) -> Response:
        """The page itself."""
        return HTMLResponse(served_page())

    def file(self, request: Request) -> Response:
        """A file of the front end."""
        name = request.path_params["name"]
        if name not in ASSETS:
            return refused(404, f"there is no file '{shorten(name, 40)}'.")
        return Response(asset(name), media_type=ASSETS[name])

    def suspects(self, request: Request) -> Response:
        """All suspects as CSV."""
        text = self._explorer(request).suspects_csv()
        headers = {"Content-Disposition": 'attachment; filename="suspects.csv"'}
        return Response(text, media_type="text/csv", headers=headers)

    async def view(self, request: Request) -> Response:
        """A view: as JSON when it is done, or line by line with news of how far it is."""
        explorer, name, query = (
            self._explorer(request),
            request.path_params["view"],
            request.url.query,
        )
        try:
            parameters = parse_qs(
                query, keep_blank_values=True, max_num_fields=MOST_FIELDS, errors="strict"
            )
        except ValueError as error:
            raise DualformError(f"the parameters cannot be read: {error}.") from error

        def make() -> Json:
            found = explorer.view(name, parameters)
            return found | {"runs": len(self._explorers)} if name == "run" else found

        job = self._jobs.join((request.url.path, query), make)
        if NDJSON in request.headers.get("accept", ""):
            return StreamingResponse(_news_and_result(job), media_type=NDJSON)
        return await _result(request, job)

    def _explorer(self, request: Request) -> Explorer:
        number: int = request.path_params["run"]
        if number >= len(self._explorers):
            raise DualformError(f"run {number} is not here; there are {len(self._explorers)}.")
        return self._explorers[number]


def make_app(explorers: Sequence[Explorer], token: str | None = None) -> Starlette:
    """The server as an ASGI application; with a token, only who knows it is let in.

    >>> from dualform.explore import Exhibit
    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> [route.path for route in make_app([Explorer(Exhibit(run, model, x))]).routes]
    ['/', '/assets/{name}', '/api/{run:int}/suspects.csv', '/api/{run:int}/{view}']
    """
    site = ExplorerRoutes(explorers)
    return Starlette(
        routes=[
            Route("/", site.page),
            Route("/assets/{name}", site.file),
            Route("/api/{run:int}/suspects.csv", site.suspects),
            Route("/api/{run:int}/{view}", site.view),
        ],
        middleware=[Middleware(RequestGuard, token=token)],
        exception_handlers={
            404: lambda request, error: refused(404, f"there is nothing at {request.url.path}."),
            DualformError: lambda request, error: refused(400, str(error)),
            Exception: lambda request, error: refused(500, unforeseen(error)),
        },
    )


def serve(
    explorers: Sequence[Explorer],
    host: str = "127.0.0.1",
    port: int = 0,
    browser: bool = True,
) -> None:
    """Serves until interrupted; prints the address once it is there, and opens it in a browser.

    Bound to another machine's reach, the address carries a token that nobody can guess.
    """
    listener = _listener(host, port)
    token = None if is_loopback(host) else secrets.token_urlsafe(16)
    where = f"[{host}]" if ":" in host else host
    address = f"http://{where}:{listener.getsockname()[1]}/"
    address += f"?token={token}" if token else ""
    print(f"The explorer is at {address} (stop it with Ctrl+C).", flush=True)
    if browser:
        click.launch(address)
    app = make_app(explorers, token)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // WORKERS))  # each view has its share
    config = uvicorn.Config(app, log_level="warning", server_header=False, lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])


def _listener(host: str, port: int) -> socket.socket:
    """A socket that listens: from here on a browser that is opened finds somebody."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=256)
    except OSError as error:
        raise DualformError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; give another port, "
            "or 0 for any that is free."
        ) from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # otherwise 40 ms an answer
    return listener


async def _news_and_result(job: ViewJob) -> AsyncIterator[str]:
    """News and result, a line each; a reader who goes away is one less to work for."""
    try:
        async for news in follow(job):
            yield json_text(news) + "\n"
    finally:
        job.leave()


async def _result(request: Request, job: ViewJob) -> Response:
    """The result alone."""
    try:
        async for news in follow(job):
            if "result" in news:
                return Response(json_text(news["result"]), media_type="application/json")
            if "error" in news:
                return refused(400, news["error"])
            if await request.is_disconnected():
                break
        return refused(400, "cancelled.")
    finally:
        job.leave()
