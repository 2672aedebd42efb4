"""Who may ask: checks the key of every request, and says whose account it counts in. Headers for browsers.

Knows aiohttp; knows nothing of what is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import hdrs, web

from toka_async.openai.errors import ApiError
from toka_async.server.account import Account
from toka_async.server.accounts import Accounts
from toka_async.server.errors import Handler
from toka_async.server.keys import Key, Keys

API_KEY = "X-Api-Key"  # the header of clients that do not send `Authorization: Bearer`
OPEN = frozenset({"/health", "/ping"})  # for load balancers, which have no keys


@dataclass(slots=True)
class Guard:
    """Of one server. source: the keys as of now. open_paths: of the routes that need no key.

    num_unauthorized: requests, ever.
    """

    source: Callable[[], Keys]
    accounts: Accounts
    open_paths: frozenset[str]
    num_unauthorized: int = 0

    def key(self, request: web.Request) -> Key | None:
        """Whose request it is; None where none is asked for. Raises ApiError (401) when it may not be answered."""
        resource = request.match_info.route.resource
        keys = self.source()
        if not keys or (resource is not None and resource.canonical in self.open_paths):
            return None
        text = key_text(request)
        key = keys.find(text) if text else None
        if key is None:
            self.num_unauthorized += 1
            raise unauthorized(is_missing=not text)
        return key

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
async def check_keys(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Lets those in who may ask."""
    request.app[GUARD].key(request)
    return await handler(request)
