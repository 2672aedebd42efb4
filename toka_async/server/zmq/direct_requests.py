"""One request of direct submission that wants more than token ids: text, stop strings, log-probs of its prompt.

The same way through the service as a request over HTTP takes. Knows no sockets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from toka_async.arrays import Int32, Int64, as_f32, as_i32
from toka_async.messages import Reason
from toka_async.protocol import Columns, PromptLogprobs, ServerHeader
from toka_async.server.engine.inflight import InFlight
from toka_async.server.generate.sample_text import SampleStream
from toka_async.server.generate.service import Run, Service
from toka_async.server.limits.account import Account
from toka_async.server.zmq.fields_cache import RequestFields
from toka_async.server.zmq.result_columns import SampleColumns


class Sink(Protocol):
    """Takes what is to be sent: see `Session.add`."""

    def __call__(self, header: ServerHeader, columns: Columns, ids: Int64, ended: list[int]) -> None: ...


async def run_request(
    service: Service, account: Account, plan: RequestFields, key: int, prompt: Int32, seed: int, sink: Sink
) -> None:
    """Runs it to its end; cancelled, it ends at once.

    Raises:
        ApiError, NotServingError, OverloadedError, RequestFailedError, EngineStoppedError: it ends otherwise.
    """
    generation = replace(plan.generation, seed=seed)
    prepared = await service.prepare(generation, [prompt], "prompt", service.limits(generation.n))
    async with service.running(prepared, account) as run:
        answer = DirectAnswer(service, plan, key, run, sink)
        if generation.stream:
            await answer.stream()
        else:
            await answer.whole()


class DirectAnswer:
    """Turns what comes of a running request into messages. `key`: its client's id."""

    def __init__(self, service: Service, plan: RequestFields, key: int, run: Run, sink: Sink) -> None:
        self._service = service
        self._plan = plan
        self._key = key
        self._run = run
        self._sink = sink

    async def whole(self) -> None:
        """Waits for all samples."""
        (outputs,) = await self._service.outputs(self._run)
        if self._run.generation.num_prompt_logprobs >= 0:
            self._send_prompt()
        columns = self._columns()
        for sample, output in enumerate(outputs):
            stop = self._stop_place(output.stop if isinstance(output.stop, str) else None)
            columns.add(sample, output.rows, output.text, output.reason, stop)
        header, made = columns.columns()
        self._sink(header, made, made["ids"], [self._key])

    async def stream(self) -> None:
        """Sends tokens as they come, as many in a turn of the event loop as `news` gives."""
        generation, options = self._run.generation, self._run.options
        streams = {sample: SampleStream(self._service.tokenizer, options) for sample in range(generation.n)}
        while streams:
            self._send_pieces(streams, await self._run.batch.news())

    def _send_pieces(self, streams: dict[int, SampleStream], fresh: list[tuple[InFlight, int]]) -> None:
        """What samples have new. `streams`: of those that have not ended."""
        columns, num_rows = self._columns(), 0
        for flight, sample in fresh:
            state = flight.samples[sample]
            if state.muted:
                continue
            piece, reason = streams[sample].push(state.take(), state.reason), state.reason
            if piece.stop is not None:
                self._service.engine.end_sample(flight, sample, streams[sample].num_tokens)
                reason = Reason.STOP_STRING
            if reason is not Reason.NONE:
                del streams[sample]
            if reason is not Reason.NONE or len(piece.rows):
                columns.add(sample, piece.rows, piece.text, reason, self._stop_place(piece.stop))
                num_rows += 1
        if num_rows:
            header, made = columns.columns()
            self._sink(header, made, made["ids"], [] if streams else [self._key])

    def _columns(self) -> SampleColumns:
        generation = self._run.generation
        num_cached = self._run.batch.flights[0].num_cached
        return SampleColumns(
            self._key,
            num_cached,
            generation.sampling.num_logprobs,
            text=self._plan.text,
            stops=bool(generation.stops),
        )

    def _stop_place(self, stop: str | None) -> int:
        return -1 if stop is None else self._run.generation.stops.index(stop)

    def _send_prompt(self) -> None:
        prefilled = self._run.prefilled(0)
        columns: Columns = {
            "logprobs": as_f32(prefilled.logprobs),
            "top_ids": as_i32(prefilled.top_ids),
            "top_logprobs": as_f32(prefilled.top_logprobs),
        }
        num_top = self._run.generation.num_prompt_logprobs
        header = PromptLogprobs(seq=0, id=self._key, num_top=num_top, columns=tuple(columns))
        self._sink(header, columns, np.asarray([self._key]), [])
