"""How long the body of a request may take to arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from toka_async.openai.errors import ApiError

LEAST_RATE = 16384  # bytes a second at which a body may take as long as it is long


@dataclass(slots=True)
class BodyDeadline:
    """The deadline of one body. Only seconds in which its client is waited for count.

    Args:
        receive_timeout: seconds, and one more for each LEAST_RATE bytes; 0: no limit.
        request_timeout: seconds, however large the body is; 0: no limit.
    """

    receive_timeout: float
    request_timeout: float = 0.0
    num_bytes: int = 0
    seconds: float = 0.0

    @asynccontextmanager
    async def limit_wait(self) -> AsyncIterator[None]:
        """Around each wait for a part of the body, whose size is added to `num_bytes`. Raises ApiError (408)."""
        begin = asyncio.get_running_loop().time()
        allowed = [
            (seconds + more, f"limits.{key} is {seconds:g} s")
            for key, seconds, more in (
                ("receive_timeout", self.receive_timeout, self.num_bytes / LEAST_RATE),
                ("request_timeout", self.request_timeout, 0.0),
            )
            if seconds
        ]
        most, limit = min(allowed, default=(None, ""))
        try:
            async with asyncio.timeout(None if most is None else most - self.seconds):
                yield
        except TimeoutError:
            raise ApiError(408, f"the request's body came too slowly: {limit}", code="timeout") from None
        finally:
            self.seconds += asyncio.get_running_loop().time() - begin
