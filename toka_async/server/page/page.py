"""Serves the page at `/`: its files, and its data. The files hold no data, so they need no API key."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from aiohttp import ETag, web

from toka_async.server.http.document import Operation
from toka_async.server.http.files import BATCHES
from toka_async.server.http.query import Query
from toka_async.server.http.respond import SERVICE, json_response
from toka_async.server.http.routes import Routes
from toka_async.server.page.history import ReplicaHistory
from toka_async.server.page.page_state import PageState, page_state

FOLDER = Path(__file__).parents[2] / "page"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
STATE = "/page/state"
LATEST = 10**12 - 1  # milliseconds
STATE_QUERY = {"after": {"type": "integer", "minimum": 1, "maximum": LATEST}}
# Code comes only from files of this server, so what a model writes can never run.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)

HISTORY: web.AppKey[ReplicaHistory] = web.AppKey("history", ReplicaHistory)


@dataclass(frozen=True, slots=True)
class Asset:
    body: bytes
    media_type: str
    etag: ETag

    async def answer(self, request: web.Request) -> web.Response:
        headers = {"ETag": f'"{self.etag.value}"', "Cache-Control": "no-cache", "Content-Security-Policy": POLICY}
        if any(known.value in (self.etag.value, "*") for known in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        return web.Response(body=self.body, content_type=self.media_type, charset="utf-8", headers=headers)


async def state(request: web.Request) -> web.Response:
    """Answers the page's request of every second; `after`: the newest point that the page has."""
    query = Query(request, STATE_QUERY)
    after = -1 if query.text("after") is None else query.number("after", 1, LATEST)
    service, history, has_batches = request.app[SERVICE], request.app[HISTORY], request.app[BATCHES] is not None
    if service.engine.busy:
        await history.refresh()
    return json_response(page_state(service, history, after, has_batches=has_batches))


def page_routes() -> Routes:
    """Returns a route for each file, and the one for the data."""
    made: Routes = {
        ("GET", STATE): (
            state,
            Operation(
                name="getPageState",
                summary="What the page shows; of its history what is later than `after`",
                query=STATE_QUERY,
                answer=PageState,
            ),
        )
    }
    for path in sorted(FOLDER.iterdir()):
        if (media_type := TYPES.get(path.suffix)) is None:
            continue
        body = path.read_bytes()
        asset = Asset(body, media_type, ETag(hashlib.sha256(body).hexdigest()[:32]))
        is_page = path.name == "index.html"
        words = path.name.replace("-", ".").split(".")
        operation = Operation(
            name="getPage" + ("" if is_page else "".join(word.capitalize() for word in words)),
            summary="A page for people: what the server does, and a prompt to try" if is_page else "A file of the page",
            answer=media_type,
            empty=(304,),
        )
        made["GET", "/" if is_page else f"/page/{path.name}"] = (asset.answer, operation)
    return made


def open_page(app: web.Application) -> None:
    """Starts the history of the app's engine."""
    engine = app[SERVICE].engine
    app[HISTORY] = ReplicaHistory(engine.replicas, lambda: engine.metrics.first_tokens)


def page_paths(routes: Routes) -> frozenset[str]:
    """Selects the paths of files, which need no key."""
    return frozenset(path for _, path in routes) - {STATE}
