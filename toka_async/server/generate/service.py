"""What the handlers of one server share: the model's name, tokenizer and defaults, the engine, threads for text.

Turns prompts into token ids and checked requests into running ones. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from toka_async.arrays import Int32
from toka_async.checkpoint.generation import GenerationDefaults
from toka_async.config import LimitsConfig
from toka_async.logs import request_tokens
from toka_async.messages import LogprobKind, Prefilled, Ready, Reason
from toka_async.openai.answer_size import check_answer_size
from toka_async.openai.errors import ApiError, bad_request, model_not_found
from toka_async.openai.generation import (
    Defaults,
    GenerationParams,
    RequestLimits,
    check_text,
    check_text_size,
    token_budget,
    truncate_prompt,
)
from toka_async.openai.prompts import Prompt, check_vocabulary
from toka_async.openai.requests import ANY_MODEL
from toka_async.server.engine.engine import Engine
from toka_async.server.engine.request_columns import RequestColumns, concat_arrays
from toka_async.server.engine.request_group import RequestGroup, timed_out
from toka_async.server.engine.token_block import REASONS, TokenBlock, TokenRows
from toka_async.server.generate.batching import SLICE, Batcher, in_slices
from toka_async.server.generate.block_texts import MANY, BlockTexts, JsonTexts
from toka_async.server.generate.encoding import SHORT, TextEncoder, groups
from toka_async.server.generate.grammar_checks import GrammarChecks
from toka_async.server.generate.logprobs import ChatNames, TokenLengths, TokenNames
from toka_async.server.generate.sample_text import SampleText, TextOptions
from toka_async.server.generate.stop_sets import StopSets
from toka_async.server.generate.thinking import bound_thoughts
from toka_async.server.limits.account import Account, Cost
from toka_async.server.limits.accounts import Accounts
from toka_async.text.chat import MAX_CHARS, ChatTemplate, ChatTemplateError, TemplateKwargsError
from toka_async.text.formats.choice import ResponseFormat
from toka_async.text.stop import StopStrings
from toka_async.text.tokenizer import Tokenizer, writes_spaces
from toka_async.text.tokenizer_files import TokenizerError

logger = logging.getLogger(__name__)

A = TypeVar("A")
B = TypeVar("B")
FEW_MESSAGES = 16


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages, and how the template is to write them."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    kwargs: dict[str, Any]
    tools: list[dict[str, Any]] | None = None


def are_short(chats: Sequence[Chat]) -> bool:
    """Whether a template writes these at once: a few messages of text, and no tools."""
    messages = [message for chat in chats for message in chat.messages]
    texts = [message.get("content") for message in messages]
    is_plain = all(isinstance(text, str) for text in texts) and not any(chat.tools for chat in chats)
    return is_plain and len(texts) <= FEW_MESSAGES and sum(map(len, map(str, texts))) <= SHORT


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked request that can be submitted.

    prompts: token ids [p] each. budgets: tokens that may be generated after each. cost: what it counts while it is
    held. vocab_size: the model's. names: by which it can be aborted, see `EngineControl.named`.
    """

    generation: GenerationParams
    prompts: list[Int32]
    budgets: list[int]
    cost: Cost
    vocab_size: int
    names: Mapping[str, int | None]


@dataclass(frozen=True, slots=True)
class Run:
    """A request while it runs. prompts: token ids [p] each, one engine request each, whose key is its place."""

    generation: GenerationParams
    prompts: list[Int32]
    options: TextOptions
    group: RequestGroup

    def prefilled(self, prompt: int) -> Prefilled | None:
        """What the engine says of a prompt whose log-probs are wanted; None if it was aborted before."""
        return self.group.prefilled.get(prompt)


@dataclass(frozen=True, slots=True)
class Output:
    """A whole sample: its text, the tokens kept, why it ended. stop: the stop string or stop token id that ended it."""

    text: str
    rows: TokenRows
    reason: Reason
    stop: str | int | None


@dataclass(slots=True)
class Service:
    """One served model."""

    config: LimitsConfig
    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    defaults: Defaults
    engine: Engine
    executor: Executor
    accounts: Accounts
    logs_prompts: bool = False
    response_format: ResponseFormat | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    json_texts: dict[bool, JsonTexts] = field(init=False)  # without and with special tokens skipped
    token_names: dict[bool, TokenNames] = field(init=False)  # by text and by id
    chat_names: dict[bool, ChatNames] = field(init=False)  # as token_names
    token_lengths: dict[bool, TokenLengths] = field(init=False)  # as json_texts
    grammars: GrammarChecks = field(init=False)
    marking_tokenizer: Tokenizer = field(init=False)  # its texts have the special tokens that the response format reads
    _encoder: TextEncoder = field(init=False)
    _render: Batcher[Chat, str] = field(init=False)
    _block_texts: dict[bool, BlockTexts] = field(init=False)  # without and with those tokens
    _stop_sets: StopSets = field(init=False)
    _writes_spaces: bool = field(init=False)

    def __post_init__(self) -> None:
        self.json_texts = {skip: JsonTexts(self.tokenizer, skip) for skip in (False, True)}
        self.token_names = {as_ids: TokenNames(self.tokenizer, as_ids) for as_ids in (False, True)}
        self.chat_names = {as_ids: ChatNames(self.tokenizer, as_ids) for as_ids in (False, True)}
        self.token_lengths = {skip: TokenLengths(self.tokenizer, skip) for skip in (False, True)}
        self.grammars = GrammarChecks(self.tokenizer, self.defaults.end_ids)
        self._encoder = TextEncoder(self.tokenizer, self.executor)
        self._render = Batcher(self._render_all, self.executor, are_short)
        self.marking_tokenizer = self.tokenizer
        if (known := self.response_format) is not None:
            self.marking_tokenizer = self.tokenizer.with_shown(known.find_markers(self.tokenizer.special_texts))
        self._block_texts = {False: BlockTexts(self.tokenizer), True: BlockTexts(self.marking_tokenizer)}
        self._stop_sets = StopSets(self.engine, self.tokenizer, self.executor)
        self._writes_spaces = writes_spaces(self.tokenizer)

    def template_names(self, name: str) -> bool:
        """Whether the chat template uses a name, such as `tools`."""
        return self.chat_template is not None and name in self.chat_template.names

    def check_model(self, model: str | None) -> None:
        """Raises ApiError (404) when another model is asked for; none means this one."""
        if model is not None and model != self.name and model not in ANY_MODEL:
            raise model_not_found(model, self.name)

    def limits(self, n: int = 1) -> RequestLimits:
        """For a request of `n` samples, which need a page of their own where they part from the prompt.

        Raises:
            NotServingError: the engine is not ready yet, or takes no requests any more.
        """
        return self.limits_of(self.engine.check_serving(), n)

    def limits_of(self, ready: Ready, n: int = 1) -> RequestLimits:
        """As `limits`, whether requests are taken now or not."""
        return RequestLimits(
            max_context=ready.max_context,
            cache_tokens=(ready.num_pages - (n > 1)) * ready.page_size,
            vocab_size=ready.vocab_size,
            max_n=self.config.max_n,
            max_logprobs=ready.vocab_size if self.config.max_logprobs < 0 else self.config.max_logprobs,
        )

    async def encode(
        self,
        prompts: Sequence[Prompt],
        add_special_tokens: bool,
        param: str,
        generation: GenerationParams,
        limits: RequestLimits,
    ) -> list[Int32]:
        """Token ids of each prompt, cut as `generation` says.

        Raises ApiError (400) for one without tokens, with too many or with ids out of range.
        """
        truncation = generation.truncation
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        async for text in in_slices(texts):
            if truncation is None:
                self.check_text(text, param, limits)
            else:
                check_text_size(text, self.config.max_text_mb, param)
        encoded: list[Int32] = []
        for group in groups([len(text) for text in texts]):  # of many texts, the first that does not fit ends it
            encoded += await self.tokenize_all(texts[group], add_special_tokens)
            for tokens in encoded[group] if truncation is None else ():
                token_budget(limits, len(tokens), 0, param)
        ids, of_texts = [], iter(encoded)
        async for prompt in in_slices(prompts):
            each = next(of_texts) if isinstance(prompt, str) else prompt
            if not each.size:
                raise bad_request(f"'{param}' is empty: it has no tokens", param=param)
            check_vocabulary(each, limits.vocab_size, param)
            ids.append(truncate_prompt(each, truncation, limits, generation.max_tokens) if truncation else each)
        return ids

    async def prepare(
        self,
        generation: GenerationParams,
        prompts: list[Int32],
        param: str,
        limits: RequestLimits,
        num_echoed: int = 0,
        names: Mapping[str, int | None] | None = None,
    ) -> PreparedRequest:
        """A request of these prompts. `param` names their field in errors. num_echoed: characters of an echo.

        names: by which it can be aborted; None: its client's id, if it gave one.

        Raises:
            ApiError: 400, a prompt and its completion do not fit, the answer could be too large, or the grammar is
                known to be no good.
        """
        if self._writes_spaces and not (generation.spaces_between_special_tokens or generation.skip_special_tokens):
            name = "spaces_between_special_tokens"
            raise bad_request(f"'{name}' is not supported (only true): this tokenizer writes spaces", param=name)
        if generation.thinking_budget is not None:
            own = self.response_format, self.tokenizer, self.defaults.end_ids
            generation = bound_thoughts(generation, prompts, *own)
        self.grammars.refuse_known(generation)
        budgets = [
            token_budget(limits, len(prompt), generation.max_tokens, param) async for prompt in in_slices(prompts)
        ]
        num_prompt, max_new = sum(map(len, prompts)), generation.n * sum(budgets)
        check_answer_size(generation, num_prompt, max_new, num_echoed, self.config.max_answer_mb)
        cost = Cost(len(prompts), generation.num_prompt_copies * num_prompt + max_new, generation.n * len(prompts))
        if names is None:
            names = {generation.request_id: None} if generation.request_id else {}
        return PreparedRequest(generation, prompts, budgets, cost, limits.vocab_size, names)

    def check_text(self, text: str, param: str, limits: RequestLimits) -> None:
        """Raises ApiError (400) for one that cannot fit, or that would take minutes and gigabytes to tokenize."""
        check_text(limits, len(text), self.tokenizer.longest, param)
        check_text_size(text, self.config.max_text_mb, param)

    async def in_thread(self, work: Callable[[A], B], given: A, *, is_long: bool) -> B:
        """What `work` makes of what is given: in a thread when that takes long."""
        if not is_long:
            return work(given)
        return await asyncio.get_running_loop().run_in_executor(self.executor, work, given)

    async def tokenize(self, text: str, add_special_tokens: bool, param: str) -> Int32:
        """Token ids of a text, perhaps none, also more than fit. Raises ApiError (400) for one that is too long."""
        check_text_size(text, self.config.max_text_mb, param)
        return (await self.tokenize_all([text], add_special_tokens))[0]

    async def tokenize_all(self, texts: Sequence[str], add_special_tokens: bool) -> list[Int32]:
        """Token ids of texts that were checked. Raises ApiError (400) for one that the tokenizer cannot take."""
        try:
            return await self._encoder.encode(texts, add_special_tokens)
        except TokenizerError as error:
            raise bad_request(str(error)) from None

    async def render(self, chat: Chat) -> str:
        """The prompt of a chat. Raises ApiError (400) when there is no template, or it refuses the messages."""
        return (await self.render_all([chat]))[0]

    async def render_all(self, chats: Sequence[Chat]) -> list[str]:
        """As `render`, of many. Raises ApiError (400) also when the prompts are too long together."""
        texts: list[str] = []
        try:
            for start in range(0, len(chats), SLICE):
                texts += await self._render.run(chats[start : start + SLICE])
                if sum(map(len, texts)) > MAX_CHARS:
                    raise bad_request(
                        f"the prompts that the chat template makes have more than {MAX_CHARS} characters together",
                        param="messages",
                    )
            return texts
        except TemplateKwargsError as error:
            raise bad_request(str(error), param="chat_template_kwargs") from None
        except ChatTemplateError as error:
            logged = "the chat template does not take the messages"  # its own words may quote them
            raise ApiError(400, str(error), param="messages", logged=logged) from None

    @asynccontextmanager
    async def running(self, request: PreparedRequest, account: Account) -> AsyncIterator[Run]:
        """Waits for room in the account and submits the request; leaving with an exception cancels it.

        Raises as `holding` and `submitted` do.
        """
        async with self.holding(account, request.cost) as waited, self.submitted(request, account, waited) as run:
            yield run

    @asynccontextmanager
    async def holding(self, account: Account, cost: Cost) -> AsyncIterator[float]:
        """Waits for room in the account, and has it until this is left. Yields the seconds that this took.

        Raises:
            ApiError: 400, the account allows so much to nobody.
            OverloadedError, TimedOutError: there is no room.
        """
        arrival = monotonic()
        try:
            async with asyncio.timeout(account.timeout or None):
                await self.accounts.enter(account, cost)
        except TimeoutError:
            raise timed_out(account.timeout) from None
        try:
            yield monotonic() - arrival
        finally:
            account.give_back(cost)

    @asynccontextmanager
    async def submitted(self, request: PreparedRequest, account: Account, waited: float = 0.0) -> AsyncIterator[Run]:
        """Submits a request for which there is room; leaving with an exception cancels it.

        waited: seconds of the account's timeout that have passed.

        Raises:
            ApiError: 400, the grammar is no good; what was submitted is cancelled.
            NotServingError, OverloadedError: nothing was submitted.
        """
        generation, prompts, options = request.generation, request.prompts, text_options(request.generation)
        await self.grammars.check_costly(generation, request.vocab_size)
        stops = None if generation.stream else options.stops
        stop_set = nullcontext(-1) if stops is None else self._stop_sets.use(stops, request.vocab_size)
        async with stop_set as stop_id:
            salt = self.accounts.salt_of(account, generation.cache_salt)
            requests = request_columns(generation, prompts, request.budgets, stop_id, salt)
            group = RequestGroup(len(prompts), generation.n, generation.stream)
            tokenizer = self.marking_tokenizer if generation.is_parsed else self.tokenizer
            watched = nullcontext() if stops is None else self._stop_sets.watched(group, options, tokenizer)
            with noted(prompts, group), watched, self.engine.control.named(request.names, group):
                async with self.engine.running(requests, group, account.timeout, waited):
                    await self.grammars.check(generation, request.vocab_size)
                    self.log_prompts(account, prompts)
                    yield Run(generation, prompts, options, group)

    def log_prompts(self, account: Account, prompts: Iterable[npt.NDArray[np.generic]]) -> None:
        """Only where `log.prompts` asks for it. Quoted: a prompt is one line."""
        for prompt in prompts if self.logs_prompts else ():
            logger.info("a prompt of %s: %r", account.owner, self.tokenizer.decode(prompt.tolist(), False))

    async def outputs(self, run: Run) -> list[list[Output]]:
        """Waits for all samples: by prompt, by sample.

        Raises:
            RequestFailedError, EngineStoppedError: a request ended otherwise.
        """
        block = await run.group.finished()
        if len(block.tokens) < MANY:
            return self._outputs(run, block)
        return await asyncio.get_running_loop().run_in_executor(self.executor, self._outputs, run, block)

    def _outputs(self, run: Run, block: TokenBlock) -> list[list[Output]]:
        """`block` has all samples, in order."""
        n, start, outputs = run.generation.n, 0, []
        block = block.with_versions() if run.generation.return_weight_versions else block
        texts = self._block_texts[run.generation.is_parsed].texts(block, run.options)
        for text, count, reason in zip(texts, block.counts.tolist(), block.reasons.tolist(), strict=True):
            rows = block.tokens.part(start, start + count)
            outputs.append(output(run.generation, text, rows, REASONS[reason]))
            start += count
        return [outputs[start : start + n] for start in range(0, len(outputs), n)]

    def _render_all(self, chats: list[Chat]) -> list[str]:
        if self.chat_template is None:
            raise ChatTemplateError(f"the model {self.name!r} has no chat template; set model.chat_template")
        return [
            self.chat_template.render(
                chat.messages,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                tools=chat.tools,
                kwargs=chat.kwargs,
            )
            for chat in chats
        ]


def text_options(generation: GenerationParams) -> TextOptions:
    return TextOptions(
        skip_special_tokens=generation.skip_special_tokens,
        stops=StopStrings(generation.stops, generation.include_stop) if generation.stops else None,
        min_tokens=generation.sampling.min_tokens,
        keep_ends=generation.include_stop,
        offsets=generation.has_text and generation.sampling.num_logprobs >= 0,
        text=generation.has_text,
    )


@contextmanager
def noted(prompts: Sequence[Int32], group: RequestGroup) -> Iterator[None]:
    """Notes what a request took when it is over, for its line in the log."""
    try:
        yield
    finally:
        if (tokens := request_tokens.get()) is not None:
            tokens["prompt_tokens"] += sum(map(len, prompts))
            tokens["output_tokens"] += group.num_tokens


def request_columns(
    generation: GenerationParams, prompts: list[Int32], budgets: list[int], stop_id: int, salt: int
) -> RequestColumns:
    """The prompts as the engine gets them, with the max_tokens of each."""
    return RequestColumns(
        keys=np.arange(len(prompts)),
        lengths=np.asarray([len(prompt) for prompt in prompts], np.int32),
        prompts=concat_arrays(prompts).astype(np.int32, copy=False),
        seeds=np.asarray([prompt_seed(generation.seed, index) for index in range(len(prompts))], np.int64),
        max_tokens=np.asarray(budgets, np.int64),
        n=generation.n,
        sampling=generation.sampling,
        stream=generation.stream,
        priority=generation.priority,
        stop_id=stop_id,
        salt=salt,
    )


def prompt_seed(seed: int, index: int) -> int:
    """A seed of its own for each prompt of a request, the request's for the first: equal prompts are to differ.

    The odd multiplier is the golden ratio's, as in Weyl sequences: no two prompts get the same seed.
    """
    mixed = (seed + index * 0x9E3779B97F4A7C15) % 2**64
    return mixed - 2**64 if mixed >= 2**63 else mixed


def output(generation: GenerationParams, text: SampleText, rows: TokenRows, reason: Reason) -> Output:
    """A sample, cut where a stop string was found."""
    if text.stop is not None:
        return Output(text.text, rows.part(0, text.num_tokens), Reason.STOP_STRING, text.stop)
    return Output(text.text, rows, reason, stop_token(generation, rows, reason))


def stop_token(generation: GenerationParams, rows: TokenRows, reason: Reason) -> int | None:
    """The one of the request's `stop_token_ids` that ended the sample."""
    if reason is not Reason.STOP or not generation.stop_token_ids or not len(rows):
        return None
    last = int(rows.token_ids[-1])
    return last if last in generation.stop_token_ids else None


def make_defaults(
    model: GenerationDefaults, tokenizer: Tokenizer, logprob_kind: LogprobKind = LogprobKind.RAW
) -> Defaults:
    """The model's own defaults, OpenAI's where it has no opinion. The tokenizer's end is taken where it names none."""
    own_end = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    given = {name: getattr(model, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    return Defaults(
        **{name: value for name, value in given.items() if value is not None},
        end_ids=model.eos_token_ids or own_end,
        logprob_kind=logprob_kind,
        special_tokens=tokenizer.marks,
    )
