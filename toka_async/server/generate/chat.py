"""Chat completions: messages to a prompt, and the response or chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from msgspec import UNSET, Raw, UnsetType
from msgspec.structs import replace

from toka_async.arrays import Int32, as_i32
from toka_async.messages import Reason
from toka_async.openai.chat_messages import parse_messages
from toka_async.openai.errors import bad_request
from toka_async.openai.generation import chat_generation
from toka_async.openai.prompts import parse_token_ids
from toka_async.openai.requests import ChatRequest, TokenizeRequest
from toka_async.openai.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    PromptLogprobs,
    Usage,
)
from toka_async.server.engine.token_block import TokenRows
from toka_async.server.generate.answers import (
    FINISH,
    AnswerHeader,
    fingerprint,
    new_header,
    num_kept,
    packed_prompt,
    packed_tokens,
    run_usage,
    wants_json_logprobs,
    weight_versions,
)
from toka_async.server.generate.batching import SLICE
from toka_async.server.generate.events import ENCODER
from toka_async.server.generate.logprobs import chat_logprobs, prompt_logprobs, prompt_rows
from toka_async.server.generate.sample_text import Piece
from toka_async.server.generate.service import Chat, Output, PreparedRequest, Run, Service


async def prepare_chat(service: Service, wire: ChatRequest) -> tuple[PreparedRequest, ChatAnswer]:
    """A request to submit, and what makes its response.

    Raises:
        ApiError: it cannot be answered. NotServingError: nothing can now.
    """
    service.check_model(wire.model)
    ready = service.engine.check_serving()
    generation = chat_generation(wire, service.limits_of(ready), service.defaults)
    limits = service.limits_of(ready, generation.n)
    chat, param = wire_chat(wire), "messages"
    given: str | Int32
    if wire.prompt_token_ids is None:
        given = await service.render(chat)
    else:
        param = "prompt_token_ids"
        parse = partial(parse_token_ids, param=param)
        given = await service.in_thread(parse, wire.prompt_token_ids, is_long=len(wire.prompt_token_ids) > SLICE)
    prompts = await service.encode([given], wire.add_special_tokens, param, generation, limits)
    prepared = await service.prepare(generation, prompts, param, limits)
    return prepared, ChatAnswer(service, new_header("chatcmpl", service.name, generation.request_id))


def wire_chat(wire: ChatRequest | TokenizeRequest) -> Chat:
    """The chat of a request."""
    return one_chat(wire, wire.messages or [], "messages")


def one_chat(wire: ChatRequest | TokenizeRequest, given: list[Any], where: str) -> Chat:
    """A chat. A final message that is to be continued is not followed by a generation prompt.

    `where` names the messages in errors.
    """
    if wire.continue_final_message and wire.add_generation_prompt:
        raise bad_request(
            "'continue_final_message' and add_generation_prompt cannot both be true", param="continue_final_message"
        )
    add = not wire.continue_final_message if wire.add_generation_prompt is None else wire.add_generation_prompt
    messages = parse_messages(given, where)
    return Chat(messages, add, wire.continue_final_message, template_kwargs(wire))


def template_kwargs(wire: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """By either of their names."""
    other = wire.apply_chat_template_overrides if isinstance(wire, ChatRequest) else {}
    if other and wire.chat_template_kwargs:
        name = "apply_chat_template_overrides"
        raise bad_request(f"'{name}' and chat_template_kwargs are the same; give one", param=name)
    return wire.chat_template_kwargs or other


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The responses of one request. of_many: conversations, whose choices are told apart by their places."""

    service: Service
    header: AnswerHeader
    of_many: bool = False

    def whole(self, run: Run, outputs: Sequence[Sequence[Output]]) -> ChatCompletion:
        header, n = self.header, run.generation.n
        prompt_ids = [self.prompt_token_ids(run, prompt) for prompt in range(len(outputs))]
        numbered = enumerate(chain.from_iterable(outputs))
        in_choices = prompt_ids if self.of_many else [UNSET] * len(outputs)
        return ChatCompletion(
            id=header.id,
            created=header.created,
            model=header.model,
            choices=[self.choice(run, index, output, in_choices[index // n]) for index, output in numbered],
            usage=run_usage(run, num_kept(outputs)),
            prompt_logprobs=self.prompt_logprobs(run),
            packed_prompt_logprobs=packed_prompt(run, 0),
            prompt_token_ids=UNSET if self.of_many else prompt_ids[0],
            system_fingerprint=fingerprint(run, outputs),
        )

    def choice(self, run: Run, index: int, output: Output, prompt_ids: list[int] | UnsetType) -> ChatChoice:
        finish, logprobs = FINISH[output.reason], self.logprobs(run, output.rows)
        assert finish is not None
        return ChatChoice(
            index=index,
            message=ChatMessage(content=output.text),
            # As JSON at once: what the JSON of all samples is made of would take several times its memory.
            logprobs=None if logprobs is None else Raw(ENCODER.encode(logprobs)),
            finish_reason=finish,
            stop_reason=output.stop,
            token_ids=output.rows.token_ids.tolist() if run.generation.return_token_ids else UNSET,
            prompt_token_ids=prompt_ids,
            packed_logprobs=packed_tokens(run, output.rows),
            weight_versions=weight_versions(self.service, run, output.rows),
        )

    def prompt_token_ids(self, run: Run, prompt: int) -> list[int] | UnsetType:
        return run.prompts[prompt].tolist() if run.generation.return_token_ids else UNSET

    def first(self, run: Run, prompt: int, sample: int) -> ChatChunk:
        assert prompt == 0, "a chat has one prompt"
        choice = ChatChunkChoice(index=sample, delta=ChatDelta(role="assistant", content=""))
        return self.chat_chunk([choice], self.no_usage(run))

    def with_prompt(self, chunk: ChatChunk, run: Run, prompt: int) -> ChatChunk:
        return replace(chunk, prompt_token_ids=self.prompt_token_ids(run, prompt))

    def chunk(
        self, run: Run, prompt: int, sample: int, piece: Piece, reason: Reason, stop: str | int | None
    ) -> ChatChunk:
        assert prompt == 0, "a chat has one prompt"
        choice = ChatChunkChoice(
            index=sample,
            delta=ChatDelta(content=piece.text or UNSET),
            logprobs=self.logprobs(run, piece.rows),
            finish_reason=FINISH[reason],
            stop_reason=stop,
            token_ids=piece.rows.token_ids.tolist() if run.generation.return_token_ids else UNSET,
            packed_logprobs=packed_tokens(run, piece.rows),
            weight_versions=weight_versions(self.service, run, piece.rows, piece.first),
        )
        return self.chat_chunk([choice], self.no_usage(run))

    def last(self, usage: Usage) -> ChatChunk:
        return self.chat_chunk([], usage)

    def chat_chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        header = self.header
        return ChatChunk(id=header.id, created=header.created, model=header.model, choices=choices, usage=usage)

    def no_usage(self, run: Run) -> UnsetType | None:
        """Chunks before the last say null when the usage is to come."""
        return None if run.generation.include_usage else UNSET

    def logprobs(self, run: Run, rows: TokenRows) -> ChatLogprobs | None:
        if not wants_json_logprobs(run.generation):
            return None
        names = self.service.token_names[run.generation.name_token_ids]
        return chat_logprobs(names, rows, run.generation.sampling.num_logprobs)

    def prompt_logprobs(self, run: Run) -> PromptLogprobs | UnsetType | None:
        num_top = run.generation.num_prompt_logprobs
        if num_top < 0 or run.generation.pack_columns:
            return UNSET
        prefilled = run.prefilled(0)
        if prefilled is None:
            return None
        rows = prompt_rows(run.prompts[0], prefilled, run.generation.sampling.num_prompt_logprobs)
        return prompt_logprobs(self.service.tokenizer, rows, as_i32(prefilled.ranks), num_top)
