"""The secret that all machines of a replica share, and where it is needed."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from toka_async.config import ConfigError

VARIABLE = "TOKA_CLUSTER_KEY"
SHORTEST = 16  # characters


def read_secret(environment: Mapping[str, str], address: str, *, insecure: bool) -> str:
    """Read the secret; empty where it is not needed. Raises ConfigError.

    address: the leader's. insecure: it is needed nowhere.
    """
    secret = environment.get(VARIABLE, "")
    if secret and len(secret) < SHORTEST:
        raise ConfigError(f"{VARIABLE}: expected at least {SHORTEST} characters; `openssl rand -hex 32` makes some")
    if not (secret or insecure or ipaddress.ip_address(address).is_loopback):
        raise ConfigError(
            f"{VARIABLE} is not set: whoever reaches {address} could join. Set the same secret on every node, or "
            "cluster.insecure=true in a network that you trust"
        )
    return secret
