"""`AsyncLLM`: answers as they come, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeVar

from toka_async.client import Trainer
from toka_async.client.base_client import BaseClient
from toka_async.client.results import Event, Result
from toka_async.control import PauseMode
from toka_async.llm.engine_options import EngineArgs
from toka_async.llm.local_engine import LocalEngine, load_tokenizer
from toka_async.llm.outputs import RequestOutput, StreamedRequest, Submittable
from toka_async.llm.prompts import PromptType, read_prompt
from toka_async.llm.refusals import check_arguments, explain_missing
from toka_async.llm.sampling_params import RequestOutputKind, SamplingParams

T = TypeVar("T")
News = Event | Result | BaseException | None  # None: aborted


class AsyncLLM:
    """Like `LLM`, with a stream for each request. Tasks of any event loop may use it.

    Making one waits until the engine is ready.
    """

    def __init__(
        self,
        model: str,
        *,
        config: Path | str | None = None,
        seed: int | None = 0,
        chat_template: Path | str | None = None,
        **options: Any,
    ) -> None:
        self._engine = LocalEngine(model, config, seed, chat_template, options)
        self._running: dict[str, asyncio.Queue[News]] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Start what `AsyncEngineArgs(model=…, …)` says."""
        return cls(**vars(engine_args))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Refuse vLLM's other methods. Raises AttributeError that says what to do instead."""
            raise AttributeError(explain_missing("AsyncLLM", name))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """End the engine and its processes. Running requests fail."""
        self._engine.shutdown()

    @property
    def model_config(self) -> Any:
        """What the engine serves; has `max_model_len`."""
        return self._engine.model_config

    async def get_tokenizer(self) -> Any:
        """Load the model's tokenizer as transformers does. Raises ImportError without transformers."""
        return await asyncio.to_thread(load_tokenizer, self._engine.texts.folder)

    async def pause_generation(
        self, *, mode: Literal["abort", "wait", "keep"] = "abort", clear_cache: bool = True
    ) -> None:
        """Wait until nothing is computed any more. Requests that come meanwhile wait for `resume_generation`.

        Args:
            mode: what becomes of running requests: they end with what they have, run to their ends, or stay as they
                are.
            clear_cache: let new prompts find nothing of earlier ones, unless requests stay.
        """
        await self._command(lambda trainer: trainer.pause(mode))
        if clear_cache and mode != "keep":
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        await self._command(lambda trainer: trainer.resume())

    async def is_paused(self) -> bool:
        return (await self._command(lambda trainer: trainer.state())).is_paused

    async def reset_prefix_cache(self) -> bool:
        """Let new prompts find nothing of earlier ones. Raises CommandError if the engine cannot."""
        await self._command(lambda trainer: trainer.reset_prefix_cache())
        return True

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Stop computing, and at level 1 give the memory of the cache back; see `LLM.sleep`."""
        await self._command(lambda trainer: trainer.sleep(level, mode))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again, and go on; see `LLM.wake_up`."""
        await asyncio.to_thread(self._engine.wake_up, tags)

    async def is_sleeping(self) -> bool:
        return (await self._command(lambda trainer: trainer.state())).is_asleep

    async def _command(self, give: Callable[[Trainer], Coroutine[Any, Any, T]]) -> T:
        return await asyncio.to_thread(self._engine.command, give)

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate the samples of a prompt. Leaving the loop cancels the request.

        Yields an output for each sample's new tokens, as `sampling_params.output_kind` says; the last one is
        `finished`. With FINAL_ONLY, and with `prompt_logprobs`, a single output has everything.

        Raises:
            ValueError: the prompt or a parameter is wrong, or a request with this id is running.
            RequestError: the engine refuses the request; names the field.
            EngineDeadError: there is no engine any more.
        """
        check_arguments(others)
        if not isinstance(sampling_params, SamplingParams):
            raise ValueError(f"sampling_params: expected SamplingParams, got {type(sampling_params).__name__}")
        if request_id in self._running:
            raise ValueError(f"request {request_id!r} is running already")
        plain = read_prompt(prompt, "the prompt")
        queue = self._running[request_id] = asyncio.Queue[News]()
        future: Future[None] | None = None
        try:
            (request,) = await asyncio.to_thread(self._engine.prepare, [plain], [sampling_params])
            request.id = request_id
            future = self._start(request, priority, queue)
            async for output in self._follow(request, queue):
                yield output
        finally:
            del self._running[request_id]
            if future is not None:
                future.cancel()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End a request, or several; a stream gets a last output, in which open samples have the finish reason `abort`.

        Ids of requests that are not running are left out.
        """
        for each in [request_id] if isinstance(request_id, str) else request_id:
            if each in self._running:
                self._running[each].put_nowait(None)

    def _start(self, request: Submittable, priority: int, queue: asyncio.Queue[News]) -> Future[None]:
        """Start a request whose news come through the queue of this loop."""
        loop, params = asyncio.get_running_loop(), request.params
        is_whole = params.output_kind is RequestOutputKind.FINAL_ONLY or params.prompt_logprobs is not None
        fields = request.make_fields(priority, stream=not is_whole)

        def tell(news: News) -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(queue.put_nowait, news)

        async def run(client: BaseClient) -> None:
            try:
                if is_whole:
                    tell(await client.generate(request.token_ids, seed=request.seed, **fields))
                else:
                    async for event in client.stream(request.token_ids, seed=request.seed, **fields):
                        tell(event)
            except Exception as error:
                tell(error)

        return self._engine.start(run)

    async def _follow(self, request: Submittable, queue: asyncio.Queue[News]) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs until the last one."""
        stream, finished = StreamedRequest(request, self._engine.outputs), False
        while not finished:
            match await queue.get():
                case Event() as event:
                    output = stream.take(event)
                case Result() as result:
                    output = self._engine.outputs.make_whole(request, result)
                case None:
                    output = stream.abort()
                case error:
                    with self._engine.explaining():
                        raise error
            finished = output.finished
            yield output
