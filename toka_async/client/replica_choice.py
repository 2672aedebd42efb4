"""Which replica of a pool gets a request: the prefix's own one, or the one with less to do of two at random.

A prompt's first tokens belong to the replica that rendezvous hashing gives them (Thaler and Ravishankar, 1998), in
every client alike: so equal prefixes meet in one cache, and a replica that comes or goes moves only its own. Its load
is bounded as in consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018). The choice among two
at random (Mitzenmacher, 2001) needs no look at all the others. Knows no sockets and no protocol.
"""

from __future__ import annotations

import zlib
from hashlib import blake2b
from random import Random
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from toka_async.arrays import Int32

PREFIX = 256  # tokens of a prompt that decide which replica it belongs to, and a quarter of the bytes of a text
TOKEN_BYTES = 4  # of a text, in the mean
FACTOR = 0xBF58476D1CE4E5B9  # spreads 32 bits over 64; a constant of splitmix64
MASK = (1 << 64) - 1
BOUND = 1.25  # times the mean of all replicas' samples; a replica with more gets no further ones of its own prefixes
FEW = 1 / 16  # of what a replica computes at once; it gets so many whatever others have, as they hardly slow it down


class ReplicaRoom:
    """What a replica may have and what it has.

    max_samples, max_requests: at once. max_running: samples that it computes at once; others wait there. tokens:
    prompts and budgets.
    """

    __slots__ = ("max_requests", "max_running", "max_samples", "place", "requests", "samples", "tokens", "url")

    def __init__(self, url: str, max_samples: int = 1, max_requests: int = 1) -> None:
        self.url = url
        self.max_samples = self.max_running = max_samples
        self.max_requests = max_requests
        self.samples = self.requests = self.tokens = 0
        self.place = -1  # among those with room

    def fits(self, num_samples: int) -> bool:
        """Whether it has room for a request; one of more samples than are allowed at once goes there alone."""
        return self.requests < self.max_requests and (
            not self.samples or self.samples + num_samples <= self.max_samples
        )


R = TypeVar("R", bound=ReplicaRoom)


class ReplicaChoice(Generic[R]):
    """The replicas that may get requests. num_samples: that all of them have."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.num_samples = 0
        self._replicas: list[R] = []
        self._hashes: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        self._scores = self._hashes.copy()
        self._with_room: list[R] = []

    def add(self, replica: R) -> None:
        self._replicas.append(replica)
        self.num_samples += replica.samples
        self._rehash()
        self.note(replica)

    def remove(self, replica: R) -> None:
        self._replicas.remove(replica)
        self.num_samples -= replica.samples
        self._rehash()
        self._take_out(replica)

    def note(self, replica: R) -> None:
        """Look again whether one of the replicas has room."""
        has_room = replica.fits(1)
        if has_room and replica.place < 0:
            replica.place = len(self._with_room)
            self._with_room.append(replica)
        elif not has_room:
            self._take_out(replica)

    def choose(self, key: int, num_samples: int) -> R | None:
        """Find room for a request of the prefix: its replica's, unless that has much more to do than others have."""
        other = self.find_room(num_samples)
        owner = None if other is None else self.find_owner(key)
        if other is None or owner is None or not owner.fits(num_samples) or self._is_crowded(owner, num_samples):
            return other
        return owner

    def _is_crowded(self, replica: R, num_samples: int) -> bool:
        """Whether samples would wait there, or there would be many more than at other replicas."""
        after = replica.samples + num_samples
        if after <= FEW * replica.max_running or not replica.samples:
            return False
        mean = (self.num_samples + num_samples) / len(self._replicas)
        return after > replica.max_running or after > BOUND * mean

    def find_owner(self, key: int) -> R | None:
        """Find the replica that a prefix belongs to, by the `key` that `hash_prefix` makes of it."""
        if len(self._replicas) < 2:
            return self._replicas[0] if self._replicas else None
        np.multiply(self._hashes, np.uint64(key), out=self._scores)  # modulo 2^64
        return self._replicas[int(self._scores.argmax())]

    def find_room(self, num_samples: int) -> R | None:
        """Find room for a request: of two replicas at random the one with fewer tokens to compute."""
        with_room, draw = self._with_room, self._random.random
        if not with_room:
            return None
        first = int(draw() * len(with_room))
        second = first - 1 - int(draw() * (len(with_room) - 1))  # another one, if there is any
        one, two = with_room[first], with_room[second]
        if two.tokens < one.tokens:
            one, two = two, one
        if one.fits(num_samples):
            return one
        return next((each for each in with_room if each.fits(num_samples)), None)

    def _take_out(self, replica: R) -> None:
        if replica.place >= 0:
            last = self._with_room.pop()
            if last is not replica:
                self._with_room[replica.place] = last
                last.place = replica.place
            replica.place = -1

    def _rehash(self) -> None:
        self._hashes = np.asarray([hash_url(each.url) for each in self._replicas], np.uint64)
        self._scores = np.empty_like(self._hashes)


def hash_url(url: str) -> int:
    return int.from_bytes(blake2b(url.encode(), digest_size=8).digest())


def hash_prefix(prompt: Int32 | bytes, cache_salt: str) -> int:
    """Hash what a prompt begins with, to an odd number of 64 bits. Prompts of different salts share no cache."""
    if isinstance(prompt, bytes):
        start = prompt[: PREFIX * TOKEN_BYTES]
    else:
        start = prompt[:PREFIX].tobytes()
    return zlib.crc32(start, zlib.crc32(cache_salt.encode())) * FACTOR & MASK | 1
