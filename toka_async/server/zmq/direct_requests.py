"""One request of direct submission that wants more than token ids: text, stop strings, log-probs of its prompt.

The same way through the service as a request over HTTP takes. Knows no sockets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from toka_async.arrays import Int32, Int64, as_f32, as_i32
from toka_async.messages import Prefilled, Reason
from toka_async.protocol import Columns, PromptLogprobs, ServerHeader
from toka_async.server.engine.token_block import TokenBlock
from toka_async.server.generate.events import MOST_TOKENS
from toka_async.server.generate.sample_text import StreamedTexts
from toka_async.server.generate.service import Run, Service
from toka_async.server.limits.account import Account
from toka_async.server.zmq.fields_cache import RequestFields
from toka_async.server.zmq.result_columns import SampleColumns


class AddMessage(Protocol):
    """Takes what is to be sent: see `Session.add`."""

    def __call__(self, header: ServerHeader, columns: Columns, ids: Int64, ended: list[int]) -> None: ...


async def run_request(
    service: Service,
    account: Account,
    plan: RequestFields,
    key: int,
    name: str,
    prompt: Int32,
    seed: int,
    add: AddMessage,
) -> None:
    """Runs it to its end; cancelled, it ends at once. key: its client's id. name: by which it can be aborted.

    Raises:
        ApiError, NotServingError, OverloadedError, RequestFailedError, EngineStoppedError: it ends otherwise.
    """
    generation = replace(plan.generation, seed=seed)
    prepared = await service.prepare(generation, [prompt], "prompt", service.limits(generation.n), names={name: None})
    async with service.running(prepared, account) as run:
        answer = DirectAnswer(service, plan, key, run, add)
        if generation.stream:
            await answer.stream()
        else:
            await answer.whole()


class DirectAnswer:
    """Turns what comes of a running request into messages. `key`: its client's id."""

    def __init__(self, service: Service, plan: RequestFields, key: int, run: Run, add: AddMessage) -> None:
        self._service = service
        self._plan = plan
        self._key = key
        self._run = run
        self._add = add

    async def whole(self) -> None:
        """Waits for all samples."""
        (outputs,) = await self._service.outputs(self._run)
        prefilled = self._run.prefilled(0)
        if prefilled is not None and self._run.generation.num_prompt_logprobs >= 0:
            self._send_prompt(prefilled)
        columns = self._columns()
        for sample, output in enumerate(outputs):
            stop = self._stop_place(output.stop if isinstance(output.stop, str) else None)
            columns.add(sample, output.rows, output.text, output.reason, stop)
        header, made = columns.columns()
        self._add(header, made, made["ids"], [self._key])

    async def stream(self) -> None:
        """Sends tokens as they come, MOST_TOKENS in a turn of the event loop."""
        service, run = self._service, self._run
        options = replace(run.options, offsets=False)
        texts = StreamedTexts(service.tokenizer, options, 1, run.generation.n, service.engine.requests.end_sample)
        while texts.num_open:
            self._send_pieces(texts, await run.group.news(MOST_TOKENS))

    def _send_pieces(self, texts: StreamedTexts, block: TokenBlock) -> None:
        """What samples have new."""
        columns, num_rows = self._columns(), 0
        for sample, piece, reason in texts.pieces(block.with_versions()):
            if reason is not Reason.NONE or len(piece.rows):
                columns.add(sample, piece.rows, piece.text, reason, self._stop_place(piece.stop))
                num_rows += 1
        if num_rows:
            header, made = columns.columns()
            self._add(header, made, made["ids"], [] if texts.num_open else [self._key])

    def _columns(self) -> SampleColumns:
        generation = self._run.generation
        num_cached = int(self._run.group.num_cached[0])
        return SampleColumns(
            self._key,
            num_cached,
            generation.sampling.num_logprobs,
            self._service.engine.requests.versions.names,
            text=self._plan.text,
            stops=bool(generation.stops),
        )

    def _stop_place(self, stop: str | None) -> int:
        return -1 if stop is None else self._run.generation.stops.index(stop)

    def _send_prompt(self, prefilled: Prefilled) -> None:
        columns: Columns = {
            "logprobs": as_f32(prefilled.logprobs),
            "ranks": as_i32(prefilled.ranks),
            "top_ids": as_i32(prefilled.top_ids),
            "top_logprobs": as_f32(prefilled.top_logprobs),
        }
        num_top = self._run.generation.num_prompt_logprobs
        header = PromptLogprobs(seq=0, id=self._key, num_top=num_top, columns=tuple(columns))
        self._add(header, columns, np.asarray([self._key]), [])
