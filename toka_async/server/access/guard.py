"""Checks the key of every request, or the page that it comes from, and notes whose account the request counts in.

Answers browsers that ask whether a page may send a request (CORS). Knows aiohttp, and nothing of what is asked.
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


@dataclass(frozen=True, slots=True)
class RequestSender:
    """The sender of a request. key: None where none is needed. account: where the request counts."""

    key: Key | None
    account: Account


@dataclass(slots=True)
class Guard:
    """Decides who may use one server. source: returns the keys as of now. open_paths: of the routes that need no key.
    admin_paths: of those that need an admin's key, if there are such keys.

    num_unauthorized: requests without a valid key, ever. num_foreign: requests of web pages, or for host names, that
    are not allowed, ever.
    """

    source: Callable[[], Keys]
    accounts: Accounts
    open_paths: frozenset[str]
    origins: Origins = field(default_factory=Origins)
    admin_paths: frozenset[str] = frozenset()
    num_unauthorized: int = 0
    num_foreign: int = 0

    def identify(self, request: web.Request) -> RequestSender:
        """Finds out who sends a request; this is the only look at its key.

        Raises ApiError: 401 without a key where there are keys, else 403 for a page that may not use this server; 403
            for a key that is no admin's where one is needed.
        """
        keys = self.source()
        if not keys:
            self._check_page(request)
            return RequestSender(None, self.accounts.total)
        text, resource = read_key(request), request.match_info.route.resource
        key, path = keys.find(text) if text else None, None if resource is None else resource.canonical
        if key is None and path not in self.open_paths:
            self.num_unauthorized += 1
            raise make_unauthorized(is_missing=not text)
        if key is not None and not key.is_admin and path in self.admin_paths and keys.have_admins:
            self.num_unauthorized += 1
            raise ApiError(403, f"{path} needs a key of auth.admin_keys", code="admin_key_needed")
        return RequestSender(key, self._open_account(key))

    def _check_page(self, request: web.Request) -> None:
        if not self.origins.accepts(request.method, request.headers):
            raise self._count_foreign(
                "a web page of another origin may not use this server: name its origin in auth.allowed_origins"
            )
        host = request.headers.get(hdrs.HOST)
        if not self.origins.is_own_host(host) and is_loopback(request.protocol.sockname):
            raise self._count_foreign(
                f"this server is not known as {(host or '')[:128]!r}: name it in auth.allowed_hosts, or use API keys"
            )

    def check_preflight(self, request: web.Request) -> None:
        """Raises ApiError (403) when a page of that origin may not use this server, with or without a key."""
        if not self.origins.allows(request.headers.get(hdrs.ORIGIN)):
            raise self._count_foreign("web pages of this origin may not use this server: see auth.allowed_origins")

    def _count_foreign(self, message: str) -> ApiError:
        self.num_foreign += 1
        return ApiError(403, message, code="origin_not_allowed")

    def list_shown_owners(self, request: web.Request) -> frozenset[str] | None:
        """Lists the owners whose accounts are in the metrics for a request; None for all.

        With keys, a sender sees its own account, and one without a key sees none, unless the key's line in the file
        says more.
        """
        key = request[SENDER].key
        if not self.source() or (key is not None and key.sees_all):
            return None
        return frozenset() if key is None else frozenset({f"key {key.name}", f"batches of key {key.name}"})

    def _open_account(self, key: Key | None) -> Account:
        """Opens the account that a key's requests count in."""
        if key is None:
            return self.accounts.total
        limits = (key.max_requests, key.max_tokens, key.max_waiting)
        return self.accounts.open(f"key {key.name}", *limits, cache_owner=f"key {key.owner}")

    def open_owner_account(self, owner: str) -> Account | None:
        """Opens the account of an owner by name; None when no key has that owner (any more)."""
        key = self.source().find_owner(owner)
        return None if key is None else self._open_account(key)


GUARD: web.AppKey[Guard] = web.AppKey("guard", Guard)
SENDER: web.RequestKey[RequestSender] = web.RequestKey("sender", RequestSender)


def read_key(request: web.Request) -> str:
    """Reads the key of a request from either of two headers; empty when there is none."""
    scheme, _, text = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    return text.strip() if scheme.lower() == "bearer" else request.headers.get(API_KEY, "").strip()


def make_unauthorized(*, is_missing: bool) -> ApiError:
    message = "an API key is needed" if is_missing else "the API key is wrong"
    return ApiError(401, f"{message}: send the header 'Authorization: Bearer KEY'", code="invalid_api_key")


def note_sender(request: web.Request) -> None:
    """Notes who sends a request, unless that is noted: an expectation is answered before all middlewares.

    Raises ApiError as `Guard.identify` does.
    """
    if SENDER not in request:
        request[SENDER] = request.app[GUARD].identify(request)


def account_of(request: web.Request) -> Account:
    """Returns the account that a request counts in."""
    return request[SENDER].account


def viewer_of(request: web.Request) -> str | None:
    """Returns the owner whose files and batches a request may see; None for all of them."""
    key = request[SENDER].key
    return None if key is None else key.owner


@web.middleware
async def check_sender(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses senders that may not use this server, notes the others, and answers browsers that ask for a page."""
    guard = request.app[GUARD]
    if request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers:
        guard.check_preflight(request)
        return answer_preflight(request)
    note_sender(request)
    return await handler(request)


def answer_preflight(request: web.Request) -> web.Response:
    """Allows a page of an allowed origin whatever it asks for."""
    headers = {
        hdrs.ACCESS_CONTROL_ALLOW_METHODS: METHODS,
        hdrs.ACCESS_CONTROL_MAX_AGE: CORS_AGE,
        "Access-Control-Allow-Private-Network": "true",
    }
    if wanted := request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS):
        headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = wanted
    return web.Response(status=204, headers=headers)


async def add_cors_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Adds the headers without which a page of an allowed origin does not get to see a response."""
    origins = request.app[GUARD].origins
    if not origins.allowed:
        return
    response.headers[hdrs.VARY] = hdrs.ORIGIN
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is not None and origins.allows(origin):
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = EXPOSED
