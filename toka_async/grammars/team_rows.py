"""What a team of threads does with its rows: advances matchers, and asks them for masks.

Only the team that works with a matcher asks it for errors: the library lets one thread at a time use it. Knows no other
rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from toka_async.arrays import Int32, Int64

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

Failure = tuple[int, str]  # a row's slot, and what the library says


@dataclass(slots=True, frozen=True)
class TeamRows:
    """Rows that go on, as the library takes them: slots int32 [r], and their places among those of a step, int64 [r].

    pairs: matchers of rows that have a token, with places; others need no matcher for their masks.
    """

    slots: Int32
    places: Int64
    matchers: list[LLMatcher]
    pairs: list[tuple[LLMatcher, int]]


def advance(executor: LLExecutor, rows: TeamRows, tokens: list[int]) -> list[Failure]:
    """Advances each row by its token."""
    if not tokens:
        return []
    allowed = executor.consume_token_par([*zip(rows.matchers, tokens, strict=True)])
    if False not in allowed:
        return []
    failed = np.flatnonzero(~np.array(allowed, np.bool_)).tolist()
    return [(int(rows.slots[nth]), rows.matchers[nth].get_error()) for nth in failed]


def fill(executor: LLExecutor, rows: TeamRows, masks: Int32, end_id: int | None) -> list[Failure]:
    """Writes the masks, int32 [n, words], of rows that have a token. Those of rows that fail say nothing.

    end_id: of a token that the library allows where a row has failed; None: look at all rows.
    """
    if not rows.pairs:
        return []
    executor.unsafe_compute_mask_ptr(rows.pairs, masks.ctypes.data, masks.strides[0], len(masks))
    suspects = rows.places
    if end_id is not None:
        word, bit = divmod(end_id, 8 * masks.itemsize)
        suspects = suspects[(masks[suspects, word] >> bit) & 1 == 1]
    if not suspects.size:
        return []
    slots = dict(zip(rows.places.tolist(), rows.slots.tolist(), strict=True))
    matchers = {place: matcher for matcher, place in rows.pairs}
    found = ((slots[place], matchers[place]) for place in suspects.tolist() if place in matchers)
    return [(slot, matcher.get_error()) for slot, matcher in found if matcher.is_error()]
