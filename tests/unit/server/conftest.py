"""What tests of direct submission share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.drivers.direct import Bare, bare_endpoint


@pytest.fixture
async def bare() -> AsyncIterator[Bare]:
    with bare_endpoint() as made:
        yield made
