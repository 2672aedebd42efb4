"""Who may ask: checks the key of every request, and says whose account it counts in. Headers for browsers.

Knows aiohttp; knows nothing of what is asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import hdrs, web

from toka_async.openai.errors import ApiError
from toka_async.server.accounts import Account, Accounts
from toka_async.server.errors import Handler
from toka_async.server.keys import Keys

OPEN = frozenset({"/health", "/ping"})  # for load balancers, which have no keys


@dataclass(slots=True)
class Guard:
    """Of one server. open_paths: of the routes that need no key. num_unauthorized: requests, ever."""

    keys: Keys
    accounts: Accounts
    open_paths: frozenset[str]
    num_unauthorized: int = 0

    def account(self, request: web.Request) -> Account:
        """Whose request it is. Raises ApiError (401) when it has no right to an answer."""
        resource = request.match_info.route.resource
        if not self.keys or (resource is not None and resource.canonical in self.open_paths):
            return self.accounts.total
        scheme, _, text = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        key = self.keys.find(text.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            self.num_unauthorized += 1
            raise unauthorized(is_missing=not text)
        return self.accounts.open(f"key {key.name}", key.max_requests, key.max_tokens)


GUARD: web.AppKey[Guard] = web.AppKey("guard", Guard)


def unauthorized(*, is_missing: bool) -> ApiError:
    message = "an API key is needed" if is_missing else "the API key is wrong"
    return ApiError(401, f"{message}: send the header 'Authorization: Bearer KEY'", code="invalid_api_key")


def account_of(request: web.Request) -> Account:
    """As `Guard.account`."""
    return request.app[GUARD].account(request)


@web.middleware
async def check_keys(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Lets those in who may ask."""
    account_of(request)
    return await handler(request)
