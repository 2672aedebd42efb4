"""Samples on a GPU with kernels. Plain torch samples rows that allow some tokens only, or that ask for very much.

The kernels that draw read the logits once. Where rows need it, others edit the logits before, and find likeliest
tokens. The parameters of running rows stay on the device, by slot. Knows slots and sampling; knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Bool, Int32, Int64
from toka_async.kernels.sampling.edit import LIST_WIDTH, NUM_TOP, EditKernels, EditTable, RowTokens
from toka_async.kernels.sampling.kernels import RowTable, SamplingKernels
from toka_async.kernels.sampling.row import RAW, TOP
from toka_async.model.sampling import EDITS, Flag, Params, sample
from toka_async.runner.copies import upload
from toka_async.runner.rows import RowPrompt, RowTables, group_by_key
from toka_async.runner.samples import Draw, Draws, RowShares, TopLogprobs
from toka_async.runner.sampling_routes import SamplingNeeds, SamplingRoutes
from toka_async.runner.slab_sampler import Head, SlabDraw, SlabSampler
from toka_async.runner.token_history import TokenHistory

_INTEGERS = ("flags", "top_k", "num_prompt")
_FLOATS = ("temperature", "top_p", "min_p", "repetition")
_EDITED = EDITS & ~Flag.REPETITION  # a repetition penalty alone edits nothing

_EDIT_INTEGERS = ("min_tokens", "num_bias", "num_ends", "num_top")
_EDIT_FLOATS = ("presence", "frequency")

Columns = tuple[Tensor, dict[str, Tensor]]


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
        self._editing = EditKernels(self._kernels, history.ids.numel(), rows.device)
        self._columns, self._table = _make_table(max_seqs + 1, vocab, rows.device)
        self._edits = EditRows(rows, history)
        self._routes = SamplingRoutes(rows)

    @property
    def is_shared(self) -> bool:
        """Whether tensor ranks divide the rows once their logits are computed."""
        return self._shares is not None

    def admit(self, slots: Int32) -> None:
        """Copies the slots' new parameters from `rows` to the device."""
        rows, table = self._rows, self._table
        params = rows.params[slots]
        by_torch = self._edits.find_unfit(slots)
        self._routes.admit(slots, by_torch)
        flags = np.where(by_torch, 0, params["flags"] | _find_passes(params))
        integers = np.stack([flags, params["top_k"], rows.num_prompt[slots]]).astype(np.int32)
        bits = np.concatenate([integers, _take_bits(params, _FLOATS)])
        at, seeds, columns = upload((slots, rows.seeds[slots], bits.ravel()), rows.device)
        table.seeds.index_copy_(0, at, seeds)
        self._columns.index_copy_(1, at, columns.to(torch.int32).view(len(bits), -1))
        edited = slots[(flags & (_EDITED | RAW.value | TOP.value | Flag.KEPT)) != 0]
        if edited.size:
            self._edits.admit(edited)
        self._mark_seen(slots[(flags & Flag.REPETITION) != 0])

    def draw(self, hidden: Tensor, slots: Tensor, contexts: Tensor) -> tuple[Tensor, ...]:
        """Draws token ids int64 [s] and their log-probs float32 [s], on the plain route. Nothing touches the host."""
        return self._share(hidden, slots, contexts, self._draw)

    def draw_full(self, hidden: Tensor, slots: Tensor, contexts: Tensor) -> tuple[Tensor, ...]:
        """Draws on the full route. Returns also the likeliest ids int32 [s, k] and theirs float32 [s, k], the number of
        tokens that filters keep int32 [s], and their share of the distribution float32 [s].
        """
        return self._share(hidden, slots, contexts, self.draw_edited)

    def _share(
        self,
        hidden: Tensor,
        slots: Tensor,
        contexts: Tensor,
        draw: Draw,
        before_draw: Callable[[], None] | None = None,
    ) -> tuple[Tensor, ...]:
        """before_draw: called once one rank's logits are launched; several ranks exchange theirs for the draw."""
        logits = self._head(hidden) if self._shares is None else None
        if before_draw is not None:
            before_draw()
        if logits is not None:
            return draw(logits, slots, contexts)
        assert self._shares is not None
        outputs = self._shares.draw(hidden, slots, contexts, draw)
        self._mark_drawn(slots, outputs[0])
        return outputs

    def _draw(self, logits: Tensor, slots: Tensor, contexts: Tensor) -> tuple[Tensor, ...]:
        return self._kernels.draw(logits, slots, contexts, self._table)

    def draw_edited(self, logits: Tensor, slots: Tensor, contexts: Tensor) -> tuple[Tensor, ...]:
        """Goes on as `draw_full` does, from logits [s, vocab], which it edits."""
        rows, masks = (logits, slots, contexts, self._table, self._edits.table, self._edits.tokens), self._rows.masks
        top_ids, top_values = self._editing.edit(*rows, masks)
        token_ids, logprobs, kept, masses = self._kernels.draw_measured(logits, slots, contexts, self._table, masks)
        self._editing.restore(*rows, (token_ids, logprobs), masks)
        self._kernels.renormalize(kept, masses, logprobs, top_values)
        return token_ids, logprobs, top_ids, top_values, kept, masses

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

    def find_needs(self, slots: Int32) -> SamplingNeeds:
        """Finds how the next tokens of decoding rows are drawn."""
        return self._routes.find_decoding(slots)

    def make_draws(self, needs: SamplingNeeds, outputs: tuple[Tensor, ...]) -> Draws:
        """Makes draws of what `draw` or `draw_full` returned for rows of these needs, packed or not."""
        token_ids, logprobs, *found = outputs
        tops: tuple[TopLogprobs, ...] = ()
        if needs.top is not None:
            ids, values = found[:2]
            tops = (TopLogprobs(needs.top.rows, needs.top.counts, ids, values, of_all=True),)
        kept, masses = found[2:] if needs.wants_kept else (None, None)
        return Draws(token_ids, logprobs if needs.wants_logprobs else None, tops, kept, masses)

    def sample(
        self,
        hidden: Tensor,
        slots: Int32,
        lengths: Int64,
        slots_at: Tensor,
        lengths_at: Tensor,
        before_draw: Callable[[], None] | None = None,
    ) -> Draws:
        needs = self._routes.find(slots, lengths)
        if needs.by_torch.size == slots.size:
            return self._by_torch.sample(hidden, slots, lengths, slots_at, lengths_at, before_draw)
        draw = self.draw_edited if needs.full else self._draw
        draws = self.make_draws(needs, self._share(hidden, slots_at, lengths_at, draw, before_draw))
        if not needs.by_torch.size:
            return draws
        rows = needs.by_torch
        (at,) = upload((rows,), hidden.device)
        part = self._by_torch.sample(hidden[at], slots[rows], lengths[rows], slots_at[at], lengths_at[at])
        draws.token_ids.index_copy_(0, at, part.token_ids)
        if part.chosen is not None:
            assert draws.chosen is not None
            draws.chosen.index_copy_(0, at, part.chosen)
        if part.kept is not None:
            assert part.masses is not None
            if draws.kept is None:
                kept = torch.zeros(len(slots), dtype=torch.int32, device=hidden.device)
                draws = replace(draws, kept=kept, masses=torch.ones_like(kept, dtype=torch.float32))
            assert draws.kept is not None
            assert draws.masses is not None
            draws.kept.index_copy_(0, at, part.kept)
            draws.masses.index_copy_(0, at, part.masses)
        tops = (replace(top, rows=rows[top.rows]) for top in part.tops)
        return replace(draws, tops=(*draws.tops, *tops))

    def _mark_seen(self, slots: Int32) -> None:
        """Marks the ids of the slots' prompts as seen, and no others."""
        prompts = self._rows.prompts[slots]
        keys = np.fromiter((id(prompt) for prompt in prompts), dtype=np.int64, count=slots.size)
        for indices in group_by_key(keys):
            mask = _make_seen_bits(prompts[indices[0]], self._rows.vocab_size)
            at, bits = upload((slots[indices], mask), self._rows.device)
            self._table.seen.index_copy_(0, at, bits.to(torch.int32).expand(len(indices), -1))


def try_sampling(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compiles the kernels that draw without masks, for logits of this type, by one row. They are the same for any."""
    logits = torch.zeros(1, vocab_size, dtype=dtype, device=device)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    contexts = torch.ones(1, dtype=torch.int32, device=device)
    table = _make_table(1, vocab_size, device)[1]
    kernels = SamplingKernels(vocab_size, 1, device)
    _, logprobs, kept, masses = kernels.draw_measured(logits, slots, contexts, table)
    kernels.renormalize(kept, masses, logprobs, torch.zeros(1, NUM_TOP, dtype=torch.float32, device=device))


def try_editing(vocab_size: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compiles those that edit logits of this type, and those that draw by masks, for one row without either."""
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    history = torch.zeros(1, page_size, dtype=torch.int32, device=device)
    drawing = SamplingKernels(vocab_size, 1, device)
    kernels = EditKernels(drawing, page_size, device)
    rows = (
        torch.zeros(1, vocab_size, dtype=dtype, device=device),
        slots,
        torch.ones(1, dtype=torch.int32, device=device),
        _make_table(1, vocab_size, device)[1],
        _make_edit_table(1, device)[1],
        RowTokens(history, history),
    )
    floats = torch.zeros(1, dtype=torch.float32, device=device)
    masks = torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32, device=device)
    drawing.draw_measured(*rows[:4], masks)
    for each in (masks, None):  # None where no row can have a grammar
        kernels.edit(*rows, each)
        kernels.restore(*rows, (slots, floats), each)


def _find_passes(params: Params) -> Int32:
    """Finds the kernels' own flags: which rows' log-probs need a pass before edits, or one after edits."""
    flags, num_logprobs = params["flags"], params["num_logprobs"]
    scaled = (flags & Flag.SCALED) != 0
    raw = ~scaled & ((num_logprobs > 0) | ((num_logprobs == 0) & ((flags & _EDITED) != 0)))
    passes: Int32 = RAW.value * raw + TOP.value * (scaled & (num_logprobs > 0))
    return passes


def _make_seen_bits(prompt: RowPrompt, vocab_size: int) -> Int32:
    """Makes a bit for each id of the vocabulary, lowest first: int32 [ceil(vocab / 32)]."""
    seen = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    seen[prompt.token_ids] = True
    return np.packbits(seen, bitorder="little").view(np.int32)


def _make_columns(num_slots: int, integers: Sequence[str], floats: Sequence[str], device: torch.device) -> Columns:
    """Makes columns by slot in one tensor int32 [columns, slots], so that one copy writes a row; and views of them.

    Columns begin at 16 bytes, so that kernels see one alignment only.
    """
    count = len(integers) + len(floats)
    columns = torch.zeros(count, -(-num_slots // 4) * 4, dtype=torch.int32, device=device)
    views = [column[:num_slots] for column in columns]
    views[len(integers) :] = [view.view(torch.float32) for view in views[len(integers) :]]
    return columns, dict(zip((*integers, *floats), views, strict=True))


def _make_table(num_slots: int, vocab_size: int, device: torch.device) -> tuple[Tensor, RowTable]:
    """Makes the table, and the tensor whose rows are its columns of 32 bits."""
    columns, views = _make_columns(num_slots, _INTEGERS, _FLOATS, device)
    seen = torch.zeros(num_slots, -(-vocab_size // 32), dtype=torch.int32, device=device)
    return columns, RowTable(**views, seeds=torch.zeros(num_slots, dtype=torch.int64, device=device), seen=seen)


def _make_edit_table(num_slots: int, device: torch.device) -> tuple[Tensor, EditTable]:
    """Makes the table, and the tensor whose rows are its columns of 32 bits."""
    columns, views = _make_columns(num_slots, _EDIT_INTEGERS, _EDIT_FLOATS, device)
    ids = torch.zeros(num_slots, LIST_WIDTH, dtype=torch.int32, device=device)
    return columns, EditTable(**views, ids=ids, values=torch.zeros_like(ids, dtype=torch.float32))


def _take_bits(params: Params, names: Sequence[str]) -> Int32:
    """Takes float32 parameters as the bits of int32: [names, rows]."""
    return np.stack([params[name] for name in names]).view(np.int32)


class EditRows:
    """The table of edits over the slots of `rows`, and one more for padding."""

    def __init__(self, rows: RowTables, history: TokenHistory) -> None:
        self._rows = rows
        self._history = history
        self._columns, self.table = _make_edit_table(rows.params.size + 1, rows.device)

    @property
    def tokens(self) -> RowTokens:
        return RowTokens(self._rows.on_device.page_table, self._history.ids)

    def find_unfit(self, slots: Int32) -> Bool:
        """Tells which of the slots' new rows ask for more than the table holds, or for what kernels do not do."""
        params = self._rows.params[slots]
        unfit: Bool = ((params["flags"] & Flag.ALLOWED) != 0) | (params["num_logprobs"] > NUM_TOP)
        listing = np.flatnonzero(params["flags"] & (Flag.BIASED | Flag.MIN_TOKENS))
        prompts = self._rows.prompts[slots[listing]]
        sizes = [prompt.bias_ids.size + prompt.end_ids.size for prompt in prompts]
        unfit[listing] |= np.array(sizes, dtype=np.int64) > LIST_WIDTH
        return unfit

    def admit(self, slots: Int32) -> None:
        """Copies the slots' new parameters and lists to the device. The rows fit."""
        rows, table = self._rows, self.table
        params = rows.params[slots]
        listing = np.flatnonzero(params["flags"] & (Flag.BIASED | Flag.MIN_TOKENS))
        num_bias, num_ends = (np.zeros(slots.size, dtype=np.int32) for _ in range(2))
        prompts: list[RowPrompt] = rows.prompts[slots[listing]].tolist()
        num_bias[listing] = [prompt.bias_ids.size for prompt in prompts]
        num_ends[listing] = [prompt.end_ids.size for prompt in prompts]
        sizes = (num_bias + num_ends)[listing]
        places = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        cells = np.repeat(slots[listing].astype(np.int64), sizes) * LIST_WIDTH + places
        nothing = np.empty(0, dtype=np.int32)
        ids = np.concatenate([nothing, *(part for p in prompts for part in (p.bias_ids, p.end_ids))])
        # The values are -inf where end tokens are held; these are in the list for their ids.
        values = np.concatenate([nothing, *(part for p in prompts for part in (p.bias.view(np.int32), p.end_ids))])
        integers = np.stack([params["min_tokens"], num_bias, num_ends, np.maximum(params["num_logprobs"], 0)])
        bits = np.concatenate([integers.astype(np.int32), _take_bits(params, _EDIT_FLOATS)])
        at, cells_at, columns, ids_at, values_at = upload((slots, cells, bits.ravel(), ids, values), rows.device)
        self._columns.index_copy_(1, at, columns.to(torch.int32).view(len(bits), -1))
        if cells.size:
            table.ids.view(-1).index_copy_(0, cells_at, ids_at.to(torch.int32))
            table.values.view(torch.int32).view(-1).index_copy_(0, cells_at, values_at.to(torch.int32))
