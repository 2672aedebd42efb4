from __future__ import annotations

import pytest

from toka_async.config import ConfigError
from toka_async.nodes.secret import VARIABLE, read_secret


def test_a_secret_is_needed_where_others_can_connect() -> None:
    assert read_secret({VARIABLE: "x" * 16}, "10.0.0.1", insecure=False) == "x" * 16
    with pytest.raises(ConfigError, match=r"TOKA_CLUSTER_KEY is not set: whoever reaches 10\.0\.0\.1 could join"):
        read_secret({}, "10.0.0.1", insecure=False)


def test_a_machine_for_itself_and_a_trusted_network_need_none() -> None:
    assert read_secret({}, "127.0.0.1", insecure=False) == read_secret({}, "10.0.0.1", insecure=True) == ""


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected at least 16 characters"):
        read_secret({VARIABLE: "secret"}, "10.0.0.1", insecure=True)
