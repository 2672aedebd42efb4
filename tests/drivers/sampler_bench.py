"""Both samplers over the rows of one device, for tests: by kernels, among tensor ranks too, and by torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import column, i32_column
from toka_async.checkpoint.matrix_spec import MatrixSpec, Units
from toka_async.messages import Prompt, Ready, Step, TokenSampling
from toka_async.model.comm import Comm, LocalComm
from toka_async.model.layers import VocabularyMatrix
from toka_async.model.matrices.ops import TorchOps
from toka_async.runner.kernel_sampler import KernelSampler
from toka_async.runner.rows import RowTables
from toka_async.runner.samples import Draws, RowShares
from toka_async.runner.slab_sampler import SlabSampler
from toka_async.runner.token_history import TokenHistory

VOCAB, PAGE_SIZE, NUM_PAGES = 90, 4, 64
READY = Ready(num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_seqs=8, max_context=100, vocab_size=VOCAB)
PROMPT = [3, 70, 3, 89, 0]
NUM_PAGES_EACH = 6


class Bench:
    """Both samplers over the rows of one device; the logits are the hidden states."""

    def __init__(self, device: torch.device, comm: Comm | None = None) -> None:
        """comm: of the ranks that share the rows."""
        self.device = device
        self.rows = RowTables(READY, device)
        self.history = TokenHistory(NUM_PAGES + 1, PAGE_SIZE, device)
        head = identity(comm or LocalComm(), device)
        shares = RowShares(comm, head.own_logits, READY.max_seqs) if comm else None
        self.kernels = KernelSampler(head.logits, self.rows, self.history, shares)
        self.by_torch = SlabSampler(lambda hidden: hidden, self.rows, self.history)
        self.num_keys = 0
        self.tokens: dict[int, list[int]] = {}  # of each slot

    def admit(
        self, rows: dict[int, TokenSampling], tokens: list[int] | None = None, num_prompt: int = len(PROMPT)
    ) -> None:
        """New rows by slot, with these tokens, in place of any that were there."""
        tokens = tokens or PROMPT
        slots, keys = [*rows], range(self.num_keys, self.num_keys + len(rows))
        self.num_keys += len(rows)
        prompts = (
            Prompt(key=k, token_ids=i32_column(tokens), num_prompt=num_prompt, pages=i32_column([]), sampling=s)
            for k, s in zip(keys, rows.values(), strict=True)
        )
        step = Step(
            step_id=0,
            prompts=tuple(prompts),
            admit_slots=i32_column(slots),
            admit_keys=i32_column(keys),
            admit_starts=i32_column([0] * len(rows)),
            admit_seeds=column(np.array([77 + slot for slot in slots], dtype=np.int64)),
            page_slots=i32_column(slot for slot in slots for _ in range(NUM_PAGES_EACH)),
            page_ids=i32_column(slot * NUM_PAGES_EACH + i for slot in slots for i in range(NUM_PAGES_EACH)),
        )
        self.kernels.admit(self.rows.apply(step))
        for slot in slots:
            self.tokens[slot] = []
            for token in tokens:
                self.append(slot, token)

    def append(self, slot: int, token: int) -> None:
        """The row's next token."""
        at = slot * NUM_PAGES_EACH * PAGE_SIZE + len(self.tokens[slot])
        self.history.ids.view(-1)[at] = token
        self.tokens[slot].append(token)

    def sample(self, slots: list[int], logits: Tensor | None = None) -> tuple[Draws, Draws]:
        """What kernels and what torch alone draw after the slots' tokens; the kernels' is appended."""
        if logits is None:
            seed = sum(len(self.tokens[slot]) for slot in slots)
            logits = 2 * torch.randn(len(slots), VOCAB, generator=torch.Generator().manual_seed(seed))
        lengths = np.array([len(self.tokens[slot]) for slot in slots])
        at = np.array(slots, dtype=np.int32)
        args = (
            at,
            lengths,
            torch.tensor(slots).to(self.device),
            torch.from_numpy(lengths).to(self.device, torch.int32),
        )
        hidden = logits.to(self.device)
        by_torch = self.by_torch.sample(hidden.clone(), *args)
        by_kernels = self.kernels.sample(hidden.clone(), *args)
        for slot, token in zip(slots, by_kernels.token_ids.tolist(), strict=True):
            self.append(slot, token)
        return by_kernels, by_torch

    def sample_by_kernels(self, slots: list[int], logits: Tensor) -> Draws:
        """What they draw; it is appended."""
        lengths = np.array([len(self.tokens[slot]) for slot in slots])
        at = torch.tensor(slots).to(self.device)
        lengths_at = torch.from_numpy(lengths).to(self.device, torch.int32)
        samples = self.kernels.sample(logits.to(self.device), np.array(slots, np.int32), lengths, at, lengths_at)
        for slot, token in zip(slots, samples.token_ids.tolist(), strict=True):
            self.append(slot, token)
        return samples

    def seen(self, slot: int) -> set[int]:
        """The ids whose bits are set."""
        bits = self.kernels._table.seen[slot].cpu().numpy().view(np.uint8)
        return set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist())


def identity(comm: Comm, device: torch.device) -> VocabularyMatrix:
    """A head whose logits are the hidden states [s, VOCAB]; each rank has a part of it."""
    spec = MatrixSpec(names=("lm_head",), outputs=(Units(VOCAB),), inputs=Units(VOCAB), split="outputs")
    head = VocabularyMatrix(spec, comm, TorchOps()).to(device)
    head.weight.zero_()
    own = slice(head.share.start, head.share.start + head.share.size)
    head.weight[: head.share.size] = torch.eye(VOCAB, device=device)[own]
    return head


def list_likeliest(samples: Draws) -> dict[int, list[tuple[int, float]]]:
    """The likeliest ids and their log-probs, in order, of each row that asks for any."""
    found: dict[int, list[tuple[int, float]]] = {}
    for top in samples.tops:
        rows, ids, values = top.rows.tolist(), top.ids.tolist(), top.values.tolist()
        for place, (row, n) in enumerate(zip(rows, top.counts.tolist(), strict=True)):
            at = row if top.of_all else place
            if n:
                found[row] = list(zip(ids[at][:n], values[at][:n], strict=True))
    return found
