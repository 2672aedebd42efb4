"""Who may ask: checks the key of every request, or the page that it comes from, and says whose account it counts in.

Answers browsers that ask whether a page may send a request (CORS). Knows aiohttp; knows nothing of what is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import hdrs, web

from toka_async.openai.errors import ApiError
from toka_async.server.access.errors import Handler
from toka_async.server.access.keys import Key, Keys
from toka_async.server.access.origins import Origins, is_loopback
from toka_async.server.limits.account import Account
from toka_async.server.limits.accounts import Accounts

API_KEY = "X-Api-Key"  # the header of clients that do not send `Authorization: Bearer`
OPEN = frozenset({"/health", "/ping"})  # for load balancers, which have no keys
CORS_AGE = "600"  # seconds that a browser remembers an answer to its question
EXPOSED = "Retry-After, X-Request-Id"  # headers of answers that pages of allowed origins get to see
METHODS = "GET, HEAD, POST, DELETE"


@dataclass(slots=True)
class Guard:
    """Of one server. source: the keys as of now. open_paths: of the routes that need no key.

    num_unauthorized: requests, ever. num_foreign: requests of web pages, or for names, that are not allowed; ever.
    """

    source: Callable[[], Keys]
    accounts: Accounts
    open_paths: frozenset[str]
    origins: Origins = field(default_factory=Origins)
    num_unauthorized: int = 0
    num_foreign: int = 0

    def check(self, request: web.Request) -> None:
        """Raises ApiError: 401 without a key where there are keys, else 403 for a page that may not use this server."""
        if self.source():
            self.key(request)
            return
        if not self.origins.accepts(request.method, request.headers):
            raise self._foreign(
                "a web page of another origin may not use this server: name its origin in auth.allowed_origins"
            )
        host = request.headers.get(hdrs.HOST)
        if not self.origins.is_own_host(host) and is_loopback(request.protocol.sockname):
            raise self._foreign(
                f"this server is not known as {(host or '')[:128]!r}: name it in auth.allowed_hosts, or use API keys"
            )

    def check_preflight(self, request: web.Request) -> None:
        """Raises ApiError (403) when a page of that origin may not use this server, with or without a key."""
        if not self.origins.allows(request.headers.get(hdrs.ORIGIN)):
            raise self._foreign("web pages of this origin may not use this server: see auth.allowed_origins")

    def _foreign(self, message: str) -> ApiError:
        self.num_foreign += 1
        return ApiError(403, message, code="origin_not_allowed")

    def key(self, request: web.Request) -> Key | None:
        """Whose request it is; None where none is asked for. Raises ApiError (401) when it may not be answered."""
        resource = request.match_info.route.resource
        keys = self.source()
        if not keys or (resource is not None and resource.canonical in self.open_paths):
            return None
        key = self._given(request, keys)
        if key is None:
            self.num_unauthorized += 1
            raise unauthorized(is_missing=not key_text(request))
        return key

    def _given(self, request: web.Request, keys: Keys) -> Key | None:
        text = key_text(request)
        return keys.find(text) if text else None

    def shown(self, request: web.Request) -> frozenset[str] | None:
        """The owners whose accounts are in the metrics that a request gets; None: all.

        Where there are keys, one sees itself only, and who has none sees nobody, unless its line in the file says more.
        """
        keys = self.source()
        key = self._given(request, keys)
        if not keys or (key is not None and key.sees_all):
            return None
        return frozenset() if key is None else frozenset({f"key {key.name}", f"batches of key {key.name}"})

    def account(self, key: Key | None) -> Account:
        """What a key's requests count in."""
        if key is None:
            return self.accounts.total
        limits = (key.max_requests, key.max_tokens, key.max_waiting)
        return self.accounts.open(f"key {key.name}", *limits, cache_owner=f"key {key.owner}")

    def owner_account(self, owner: str) -> Account | None:
        """Of the key that is that owner; None when there is none (any more)."""
        key = self.source().of_owner(owner)
        return None if key is None else self.account(key)


GUARD: web.AppKey[Guard] = web.AppKey("guard", Guard)


def key_text(request: web.Request) -> str:
    """The key that a request says, in either of two headers; empty: none."""
    scheme, _, text = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    return text.strip() if scheme.lower() == "bearer" else request.headers.get(API_KEY, "").strip()


def unauthorized(*, is_missing: bool) -> ApiError:
    message = "an API key is needed" if is_missing else "the API key is wrong"
    return ApiError(401, f"{message}: send the header 'Authorization: Bearer KEY'", code="invalid_api_key")


def account_of(request: web.Request) -> Account:
    """What a request counts in. Raises ApiError (401)."""
    guard = request.app[GUARD]
    return guard.account(guard.key(request))


def viewer_of(request: web.Request) -> str | None:
    """Whose files and batches the request is about; None: everybody's. Raises ApiError (401)."""
    key = request.app[GUARD].key(request)
    return None if key is None else key.owner


@web.middleware
async def check_sender(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Lets those in who may ask, and answers browsers that ask for a page."""
    guard = request.app[GUARD]
    if request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers:
        guard.check_preflight(request)
        return preflight_answer(request)
    guard.check(request)
    return await handler(request)


def preflight_answer(request: web.Request) -> web.Response:
    """What a page of an allowed origin may send: whatever it asks for."""
    headers = {
        hdrs.ACCESS_CONTROL_ALLOW_METHODS: METHODS,
        hdrs.ACCESS_CONTROL_MAX_AGE: CORS_AGE,
        "Access-Control-Allow-Private-Network": "true",
    }
    if wanted := request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS):
        headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = wanted
    return web.Response(status=204, headers=headers)


async def add_cors_headers(request: web.Request, response: web.StreamResponse) -> None:
    """To every response that a page of an allowed origin may see, before it is sent."""
    origins = request.app[GUARD].origins
    if not origins.allowed:
        return
    response.headers[hdrs.VARY] = hdrs.ORIGIN
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is not None and origins.allows(origin):
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = EXPOSED
