"""Samples on a GPU with kernels that read the logits once. Plain torch samples rows that ask for more.

The parameters of running rows stay on the device, by slot. Knows slots and sampling; knows no requests.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Bool, Int32, Int64
from toka_async.kernels.sampling import RowTable, SamplingKernels
from toka_async.model.sampling import Flag, Params, sample
from toka_async.runner.copies import upload
from toka_async.runner.rows import RowPrompt, RowTables, group_by_key
from toka_async.runner.samples import Draws, RowShares, TopLogprobs
from toka_async.runner.slab_sampler import Head, SlabDraw, SlabSampler
from toka_async.runner.token_history import TokenHistory

_FLOATS = ("temperature", "top_p", "min_p", "repetition")
_SLOW = Flag.ALLOWED | Flag.BIASED | Flag.MIN_TOKENS | Flag.COUNTED


class KernelSampler:
    """`Sampler` over the tables of `rows` and `history`. shares: how tensor ranks divide the rows; None: one rank.

    draw: samples slow rows.
    """

    def __init__(
        self,
        head: Head,
        rows: RowTables,
        history: TokenHistory,
        shares: RowShares | None = None,
        draw: SlabDraw = sample,
    ) -> None:
        self._head = head
        self._shares = shares
        self._rows = rows
        self._by_torch = SlabSampler(head, rows, history, draw)
        max_seqs, vocab = rows.params.size, rows.vocab_size
        self._kernels = SamplingKernels(vocab, shares.count_rows(max_seqs) if shares else max_seqs, rows.device)
        self._table = _make_table(max_seqs + 1, vocab, rows.device)
        self._slow: Bool = np.zeros(max_seqs, dtype=np.bool_)

    def admit(self, slots: Int32) -> None:
        """Copies the slots' new parameters from `rows` to the device."""
        rows, table = self._rows, self._table
        params = rows.params[slots]
        self._slow[slots] = _is_slow(params)
        flags = np.where(self._slow[slots], 0, params["flags"])
        floats = np.stack([params[name] for name in _FLOATS])
        bits_of = floats.view(np.int32).ravel()
        columns = (slots, flags, params["top_k"], rows.num_prompt[slots], rows.seeds[slots], bits_of)
        at, flags_at, top_k, num_prompt, seeds, bits = upload(columns, rows.device)
        table.flags.index_copy_(0, at, flags_at.to(torch.int32))
        table.top_k.index_copy_(0, at, top_k.to(torch.int32))
        table.num_prompt.index_copy_(0, at, num_prompt.to(torch.int32))
        table.seeds.index_copy_(0, at, seeds)
        values = bits.to(torch.int32).view(torch.float32).view(len(_FLOATS), -1)
        for name, column in zip(_FLOATS, values, strict=True):
            getattr(table, name).index_copy_(0, at, column)
        self._mark_seen(slots[(flags & Flag.REPETITION) != 0])

    def draw(self, hidden: Tensor, slots: Tensor, contexts: Tensor) -> tuple[Tensor, Tensor]:
        """Draws token ids int64 [s] and their log-probs float32 [s] for fast rows. Nothing touches the host."""
        if self._shares is None:
            return self._draw(self._head(hidden), slots, contexts)
        token_ids, logprobs = self._shares.draw(hidden, slots, contexts, self._draw)
        self._mark_drawn(slots, token_ids)
        return token_ids, logprobs

    def _draw(self, logits: Tensor, slots: Tensor, contexts: Tensor) -> tuple[Tensor, Tensor]:
        return self._kernels.draw(logits, slots, contexts, self._table)

    def _mark_drawn(self, slots: Tensor, token_ids: Tensor) -> None:
        """Marks tokens as seen that other ranks drew, since any rank may draw for a slot the next time.

        A slot that does not penalise may appear several times: the content of its cells is written back.
        """
        table = self._table
        penalises = (table.flags.index_select(0, slots) & int(Flag.REPETITION)) != 0
        cells = slots * table.seen.shape[1] + token_ids // 32
        bits = torch.ones_like(cells, dtype=torch.int32) << (token_ids % 32).to(torch.int32)
        words = table.seen.view(-1).index_select(0, cells)
        table.seen.view(-1).index_copy_(0, cells, torch.where(penalises, words | bits, words))

    def are_fast(self, slots: Int32) -> bool:
        """Tells whether `draw` alone can sample all of the slots."""
        return not self._slow[slots].any()

    def wants_logprobs(self, slots: Int32) -> bool:
        return bool((self._rows.params["flags"][slots] & Flag.LOGPROBS).any())

    def sample(self, hidden: Tensor, slots: Int32, lengths: Int64, slots_at: Tensor, lengths_at: Tensor) -> Draws:
        slow = np.flatnonzero(self._slow[slots])
        if slow.size == slots.size:
            return self._by_torch.sample(hidden, slots, lengths, slots_at, lengths_at)
        token_ids, chosen = self.draw(hidden, slots_at, lengths_at)
        if slow.size:
            return self._sample_slow(hidden, slots, lengths, slots_at, lengths_at, slow, token_ids, chosen)
        return Draws(token_ids, chosen if self.wants_logprobs(slots) else None)

    def _sample_slow(
        self,
        hidden: Tensor,
        slots: Int32,
        lengths: Int64,
        slots_at: Tensor,
        lengths_at: Tensor,
        slow: Int64,
        token_ids: Tensor,
        chosen: Tensor,
    ) -> Draws:
        (at,) = upload((slow,), hidden.device)
        part = self._by_torch.sample(hidden[at], slots[slow], lengths[slow], slots_at[at], lengths_at[at])
        token_ids.index_copy_(0, at, part.token_ids)
        top = part.top
        if part.chosen is not None:
            chosen.index_copy_(0, at, part.chosen)
        if top is not None:
            top = TopLogprobs(slow[top.rows], top.counts, top.ids, top.values)
        return Draws(token_ids, chosen if self.wants_logprobs(slots) else None, top)

    def _mark_seen(self, slots: Int32) -> None:
        """Marks the ids of the slots' prompts as seen, and no others."""
        prompts = self._rows.prompts[slots]
        keys = np.fromiter((id(prompt) for prompt in prompts), dtype=np.int64, count=slots.size)
        for indices in group_by_key(keys):
            mask = _make_seen_bits(prompts[indices[0]], self._rows.vocab_size)
            at, bits = upload((slots[indices], mask), self._rows.device)
            self._table.seen.index_copy_(0, at, bits.to(torch.int32).expand(len(indices), -1))


def _is_slow(params: Params) -> Bool:
    slow: Bool = ((params["flags"] & _SLOW) != 0) | (params["num_logprobs"] > 0)
    return slow


def _make_seen_bits(prompt: RowPrompt, vocab_size: int) -> Int32:
    """Makes a bit for each id of the vocabulary, lowest first: int32 [ceil(vocab / 32)]."""
    seen = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    seen[prompt.token_ids] = True
    return np.packbits(seen, bitorder="little").view(np.int32)


def _make_table(num_slots: int, vocab_size: int, device: torch.device) -> RowTable:
    def make_column(dtype: torch.dtype) -> Tensor:
        return torch.zeros(num_slots, dtype=dtype, device=device)

    return RowTable(
        temperature=make_column(torch.float32),
        top_p=make_column(torch.float32),
        min_p=make_column(torch.float32),
        repetition=make_column(torch.float32),
        top_k=make_column(torch.int32),
        flags=make_column(torch.int32),
        num_prompt=make_column(torch.int32),
        seeds=make_column(torch.int64),
        seen=torch.zeros(num_slots, -(-vocab_size // 32), dtype=torch.int32, device=device),
    )
