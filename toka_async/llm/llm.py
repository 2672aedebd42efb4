"""`LLM`: whole answers to many prompts, without a server and without asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import msgspec
import numpy as np

from toka_async.arrays import Int32
from toka_async.client.base_client import BaseClient
from toka_async.client.results import Result
from toka_async.control import PauseMode
from toka_async.llm.engine_options import EngineArgs
from toka_async.llm.local_engine import LocalEngine, load_tokenizer
from toka_async.llm.model_texts import Messages, list_chats
from toka_async.llm.outputs import RequestOutput, Submittable
from toka_async.llm.progress_bar import make_bar
from toka_async.llm.prompts import PlainPrompt, Prompts, list_prompts
from toka_async.llm.refusals import check_arguments, explain_missing
from toka_async.llm.sampling_params import SamplingParams

T = TypeVar("T")

AT_ONCE = 1024  # prompts that are prepared before the engine gets them
NOTHING = RequestOutput("", None, [], None, [], False)

OneOrEach = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """An engine of this process, with vLLM's interface for offline work.

    It ends with `shutdown`, at the end of a `with` block, when the object is gone, or with this process, even if that
    is killed.

    Any number of threads may use it, also while an event loop runs, as in notebooks.

    Args:
        model: a directory, a hub id, or `demo` for the built-in model.
        config: a configuration file.
        seed: of the seeds of requests that have none: the same calls give the same samples. None: they differ.
        chat_template: source of a chat template, or a file with one; None: the model's own.
        options: the configuration, as `cache={"num_tokens": 65536}` or by vLLM's names, such as
            `tensor_parallel_size=2`.

    Attributes:
        llm_engine: has `model_config`, too.
        model_config: what the engine serves; has `max_model_len`.

    Raises:
        ConfigError: an option is unknown, not supported or wrong; the message names it and the fix.
        ModelError, TokenizerError: the model's files are missing or wrong.
        EngineDeadError: the engine did not start.
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
        self.llm_engine = LocalEngine(model, config, seed, chat_template, options)
        self.model_config = self.llm_engine.model_config

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Start what `EngineArgs(model=…, …)` says."""
        return cls(**vars(engine_args))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Refuse vLLM's other methods. Raises AttributeError that says what to do instead."""
            raise AttributeError(explain_missing("LLM", name))

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM belongs to its process: make one in each, or start `toka-async serve` for all")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End the engine and its processes. Running calls of other threads fail."""
        self.llm_engine.shutdown()

    def reset_prefix_cache(self) -> bool:
        """Let new prompts find nothing of earlier ones. Raises CommandError if the engine cannot."""
        self.llm_engine.command(lambda trainer: trainer.reset_prefix_cache())
        return True

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Stop computing, and at level 1 give the memory of the cache back.

        Args:
            level: 0 or 1; at vLLM's 2, weights would leave the GPU, which they never do.
            mode: what becomes of running requests, see `Trainer.pause`.

        Raises:
            CommandError: the engine cannot, as on a GPU whose driver maps no memory.
        """
        self.llm_engine.command(lambda trainer: trainer.sleep(level, mode))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again, and go on.

        Args:
            tags: which parts, of `weights`, `kv_cache` and `scheduling`; None: all. Computing goes on with `kv_cache`.
        """
        self.llm_engine.wake_up(tags)

    def get_tokenizer(self) -> Any:
        """Load the model's tokenizer as transformers does. Raises ImportError without transformers."""
        return load_tokenizer(self.llm_engine.texts.folder)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return those of the model's generation_config.json, which a call without `sampling_params` uses."""
        return self.llm_engine.default_params()

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: OneOrEach = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Sequence[int] | None = None,
        prompt_token_ids: Prompts | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Generate the samples of each prompt, in order.

        Args:
            prompts: text, token ids, dicts such as `TokensPrompt`, or a list of them.
            sampling_params: for all prompts, or one for each; None: the model's own.
            use_tqdm: show the progress; or a class like tqdm, whose bar shows it.
            priority: of all prompts, or of each; lower ones are first.
            prompt_token_ids: older name of `prompts`, for token ids; give one of them.

        Raises:
            ValueError: a prompt or parameter is wrong.
            RequestError: the engine refuses a request; names the field. The other requests are cancelled.
            EngineDeadError: there is no engine any more.
        """
        check_arguments(others)
        if prompts is not None and prompt_token_ids is not None:
            raise ValueError("prompt_token_ids: an older name of prompts; give one of them")
        given = prompt_token_ids if prompts is None else prompts
        if given is None:
            raise ValueError("prompts: give text, token ids, or a list of prompts")
        return self._run(list_prompts(given), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: OneOrEach = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: Path | str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Continue a conversation, or each of several, in order.

        Args:
            messages: dicts with `role` and `content`, or a list of such conversations.
            chat_template: source of a template, or a file with one, instead of the model's.
            tools: descriptions of functions for the template. Calls in the answer are text.
            chat_template_kwargs: further names that the template sees, such as `enable_thinking`.

        Raises:
            ValueError: also for malformed messages, and templates that refuse them. Others as `generate`.
        """
        check_arguments(others)
        prompts = [
            self.llm_engine.texts.render(
                chat,
                template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                kwargs=chat_template_kwargs,
            )
            for chat in list_chats(messages)
        ]
        return self._run(prompts, sampling_params, use_tqdm, priority)

    def _run(
        self,
        prompts: Sequence[PlainPrompt],
        params: OneOrEach,
        use_tqdm: bool | Callable[..., Any],
        priority: int | Sequence[int] | None,
    ) -> list[RequestOutput]:
        """Run requests to their end. The engine works on the first ones while others are prepared."""
        engine = self.llm_engine
        params = engine.default_params() if params is None else params
        each_params = spread("sampling_params", params, SamplingParams, len(prompts))
        priorities = spread("priority", priority or 0, int, len(prompts))
        bar = make_bar(use_tqdm, len(prompts))
        outputs: list[RequestOutput] = [NOTHING] * len(prompts)
        calls: list[Future[None]] = []

        def take(place: int, request: Submittable, result: Result) -> None:
            outputs[place] = engine.outputs.make_whole(request, result)
            if bar is not None:
                bar.update(1)

        try:
            for start in range(0, len(prompts), AT_ONCE):
                part = prompts[start : start + AT_ONCE]
                requests = engine.prepare(part, each_params[start : start + AT_ONCE], start)
                groups = group_requests(requests, priorities[start : start + AT_ONCE], start)
                calls.append(engine.start(partial(run_groups, groups=groups, take=take)))
            engine.wait(calls)
        finally:
            for call in calls:
                call.cancel()
            if bar is not None:
                bar.close()
        return outputs


def spread(name: str, given: T | Sequence[T], kind: type[T], count: int) -> Sequence[T]:
    """Return what was given for each prompt, or for all. Raises ValueError for anything else."""
    if isinstance(given, kind):
        return [given] * count
    each = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if wrong := [type(value).__name__ for value in each if not isinstance(value, kind)]:
        raise ValueError(f"{name}: expected {kind.__name__}, got {wrong[0]}")
    if len(each) != count:
        raise ValueError(f"{name}: {len(each)} for {count} prompts; give one, or one for each")
    return each


class RequestsGroup(msgspec.Struct, gc=False):
    """Requests with equal fields, and their places in the call."""

    fields: dict[str, Any]
    requests: list[Submittable]
    places: list[int]


def group_requests(requests: Sequence[Submittable], priorities: Sequence[int], first: int) -> list[RequestsGroup]:
    """Group requests by their fields. first: the place of the first one."""
    groups: dict[tuple[int, int, int, str | None], RequestsGroup] = {}
    for place, (request, priority) in enumerate(zip(requests, priorities, strict=True), start=first):
        key = (id(request.params), request.max_tokens, priority, request.cache_salt)
        group = groups.get(key)
        if group is None:
            group = groups[key] = RequestsGroup(request.make_fields(priority), [], [])
        group.requests.append(request)
        group.places.append(place)
    return list(groups.values())


async def run_groups(
    client: BaseClient, groups: Sequence[RequestsGroup], take: Callable[[int, Submittable, Result], None]
) -> None:
    """Run groups of requests; the first error cancels all. take: called with each request, its place and its result."""
    calls = [asyncio.ensure_future(run_group(client, group, take)) for group in groups]
    try:
        await asyncio.gather(*calls)
    finally:
        for call in calls:
            call.cancel()


async def run_group(client: BaseClient, group: RequestsGroup, take: Callable[[int, Submittable, Result], None]) -> None:
    await client.generate_each(
        make_arrays([request.token_ids for request in group.requests]),
        lambda at, result: take(group.places[at], group.requests[at], result),
        seeds=[request.seed for request in group.requests],
        **group.fields,
    )


def make_arrays(prompts: Sequence[list[int]]) -> list[Int32]:
    """Make an array of each prompt; of all at once, which takes a fraction of the time."""
    flat = np.fromiter(chain.from_iterable(prompts), np.int32)
    ends = list(accumulate(map(len, prompts), initial=0))
    return [flat[start:end] for start, end in pairwise(ends)]
