"""Which replica gets a request: the one that has most of its prompt in its cache, unless that one has too much to do.

Keeps an approximate index of prompts by page, from what was sent where; what the replicas' caches have dropped since
is not known here. Knows no messages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

NUM_PAGES = 1 << 17  # in the index: two million tokens at 16 a page
# A cached prompt is not worth more than this imbalance: tokens of work queued, against the replica with the least.
FACTOR = 1.5
SLACK = 32768


class ReplicaRouter:
    """The replicas' loads, and which prompts they have seen.

    Attributes:
        outstanding: tokens that each replica may still have to compute.
    """

    def __init__(self, num_replicas: int, page_size: int = 16, num_pages: int = NUM_PAGES) -> None:
        assert num_replicas > 0
        self.outstanding = [0] * num_replicas
        self._page_bytes = 4 * page_size
        self._num_pages = num_pages
        self._holders: OrderedDict[int, int] = OrderedDict()  # page with all before it -> replicas as bits, newest last

    def place(self, prompt: bytes | memoryview, num_tokens: int, live: Sequence[int], salt: int = 0) -> int:
        """Chooses one of `live` for a prompt (int32 [p]) and notes that it has `num_tokens` more to do.

        Prompts of different salts share nothing in the replicas' caches, so nothing here.

        Costs a dictionary look-up a page; with one replica nothing is kept.
        """
        assert live, "no replica to choose"
        if len(self.outstanding) == 1:
            replica = live[0]
        else:
            keys = self._keys(bytes(prompt), salt)
            replica = self._choose(self._longest(keys, live), live)
            self._note(keys, replica)
        self.outstanding[replica] += num_tokens
        return replica

    def charge(self, replica: int, num_tokens: int) -> None:
        """It has so many more to do; where there is nothing to choose."""
        self.outstanding[replica] += num_tokens

    def release(self, replica: int, num_tokens: int) -> None:
        """So many tokens are done, or need not be."""
        self.outstanding[replica] -= num_tokens
        assert self.outstanding[replica] >= 0, f"replica {replica} has less than nothing to do"

    def forget(self, replica: int) -> None:
        """The replica's cache is gone."""
        others = ~(1 << replica)
        left = ((key, holders & others) for key, holders in self._holders.items())
        self._holders = OrderedDict((key, holders) for key, holders in left if holders)

    def _choose(self, longest: Sequence[int], live: Sequence[int]) -> int:
        """Of those with the longest prefix, unless they have too much to do, then of all: the one with the least."""
        best = min(longest, key=self.outstanding.__getitem__)
        least = min(live, key=self.outstanding.__getitem__)
        most = FACTOR * self.outstanding[least] + SLACK
        return best if self.outstanding[best] <= most else least

    def _longest(self, keys: Sequence[int], live: Sequence[int]) -> list[int]:
        """The replicas that have the most leading pages: all of them, when none has any."""
        holders = sum(1 << replica for replica in live)
        for key in keys:
            with_page = holders & self._holders.get(key, 0)
            if not with_page:
                break
            holders = with_page
        return [replica for replica in live if holders >> replica & 1]

    def _note(self, keys: Sequence[int], replica: int) -> None:
        for key in reversed(keys):  # leading pages are the newest: an index without them finds nothing
            self._holders[key] = self._holders.get(key, 0) | 1 << replica
            self._holders.move_to_end(key)
        while len(self._holders) > self._num_pages:
            self._holders.popitem(last=False)

    def _keys(self, prompt: bytes, salt: int) -> list[int]:
        """A key for each full page, which stands for the salt and all pages up to it."""
        keys, key, width = [], salt, self._page_bytes
        for end in range(width, len(prompt) + 1, width):
            key = hash((key, prompt[end - width : end]))
            keys.append(key)
        return keys
