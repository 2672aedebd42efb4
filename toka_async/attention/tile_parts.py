"""Splits tiles of prompts' chunks over their keys, where tiles are too few or one has far more keys than others.

A few new tokens after a long context are a few tiles that read all of it: without parts most of a GPU would wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from toka_async.arrays import Int64
from toka_async.kernels.decode_work import MOST_PARTS

LEAST_KEYS = 1024  # of a part; smaller ones cost more than they save


@dataclass(slots=True, frozen=True)
class TileParts:
    """Tiles in parts, those with the most keys first, as `attend_chunks` takes them.

    tiles: int64 [1 + n, 4]. parts: int64 [n, 3]. merged: int64 [m, 3], the queries of tiles in several parts as `merge`
    takes them: the rows of a part lie `queries` of a tile after those of the part before. num_partials: parts of these.
    """

    tiles: Int64
    parts: Int64
    merged: Int64
    num_partials: int


def split_tiles(tiles: Int64, window: int, queries: int, block_keys: int, num_programs: int) -> TileParts | None:
    """Splits tiles of at most so many queries; None if no tile is worth several parts.

    num_programs: that run at once, for each KV head.
    """
    _, first_query, count, seen = tiles[1:].T
    low, high = _find_keys(tiles, window, block_keys)
    share = choose_share(seen - low, num_programs)
    if int((seen - low).max(initial=0)) <= share:
        return None
    wanted = np.minimum(-(-(seen - low) // share), MOST_PARTS)
    each = -(-(high - low) // wanted // block_keys) * block_keys  # keys of a part
    number = -(-(high - low) // each)
    tile = np.repeat(np.arange(len(number)), number)
    part = np.arange(len(tile)) - np.repeat(np.cumsum(number) - number, number)
    starts = low[tile] + part * each[tile]
    ends = np.minimum(starts + each[tile], high[tile])
    is_split = number > 1
    first = np.cumsum(number * is_split) - number * is_split  # of the partial results of a tile
    places = np.where(is_split[tile], first[tile] + part, -1)
    order = np.argsort(starts - ends, kind="stable")
    cut = np.concatenate((tiles[:1], tiles[1:][tile[order]]))
    cut[0, 0] = len(tile)
    of_query = np.repeat(np.flatnonzero(is_split), count[is_split])
    step = np.arange(len(of_query)) - np.repeat(np.cumsum(count[is_split]) - count[is_split], count[is_split])
    merged = np.stack((first_query[of_query] + step, first[of_query] * queries + step, number[of_query]), axis=1)
    parts = np.stack((starts, ends, places), axis=1)[order]
    return TileParts(cut, parts, merged, int(number[is_split].sum()))


def keep_tiles(tiles: Int64, window: int, block_keys: int) -> TileParts:
    """Makes one part of each tile, those with the most keys first."""
    low, high = _find_keys(tiles, window, block_keys)
    order = np.argsort(low - high, kind="stable")
    parts = np.stack((low, high, np.full_like(low, -1)), axis=1)[order]
    return TileParts(np.concatenate((tiles[:1], tiles[1:][order])), parts, np.empty((0, 3), np.int64), 0)


def _find_keys(tiles: Int64, window: int, block_keys: int) -> tuple[Int64, Int64]:
    """Finds the first and the end of the tiles' keys. The first is that of a block, which is in whole pages."""
    seen, high = tiles[1:, 3], tiles[1:, 3] + tiles[1:, 2] - 1
    low = np.maximum(seen - window, 0) // block_keys * block_keys if window else np.zeros_like(seen)
    return low, high


def choose_share(keys: Int64, num_programs: int) -> int:
    """Chooses the most keys of a program, for tiles of so many keys.

    Few tiles get as many parts as run at once, many get parts of an equal share of the work at most.
    """
    num_tiles = len(keys)
    room = num_programs - num_tiles if 2 * num_tiles <= num_programs else num_programs
    return max(LEAST_KEYS, -(-int(keys.sum()) // max(1, room)))
