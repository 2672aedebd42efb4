"""Keys for the connections between machines: of agents' links from the shared secret, of a replica's life drawn."""

from __future__ import annotations

from hashlib import blake2b

import zmq
import zmq.utils.z85

from toka_async.topology import SharedKeys

PERSON = b"toka-async nodes"


def draw_keys() -> SharedKeys:
    public, secret = zmq.curve_keypair()
    return SharedKeys(public.decode(), secret.decode())


def derive_keys(secret: str) -> SharedKeys:
    """Derive the pair that all who know the secret have."""
    raw = blake2b(secret.encode(), digest_size=32, person=PERSON).digest()
    encoded = zmq.utils.z85.encode(raw)
    return SharedKeys(zmq.curve_public(encoded).decode(), encoded.decode())
