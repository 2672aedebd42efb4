"""Chat completions: messages to a prompt, and the response or chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from msgspec import UNSET, Raw, UnsetType
from msgspec.structs import replace

from toka_async.arrays import Int32, as_i32
from toka_async.grammars.errors import GrammarError
from toka_async.messages import Reason
from toka_async.openai.chat_messages import parse_messages
from toka_async.openai.errors import bad_request
from toka_async.openai.generation import GenerationParams, chat_generation
from toka_async.openai.prompts import Prompt, parse_token_ids
from toka_async.openai.requests import ChatRequest, TokenizeRequest
from toka_async.openai.responses import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    PromptLogprobs,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from toka_async.openai.structured import NO_GRAMMAR, OutputGrammar, make_output_grammar
from toka_async.openai.tools import ToolUse, parse_tool_use
from toka_async.server.engine.token_block import Score, TokenRows
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
    wants_tokens,
    weight_versions,
)
from toka_async.server.generate.batching import MANY_IDS
from toka_async.server.generate.events import ENCODER
from toka_async.server.generate.logprobs import chat_logprobs, prompt_logprobs, prompt_rows
from toka_async.server.generate.sample_text import Piece
from toka_async.server.generate.service import Chat, Output, PreparedRequest, Run, Service
from toka_async.server.generate.thinking import BUDGET, find_budget
from toka_async.text.formats.choice import ResponseFormat
from toka_async.text.formats.output_grammar import CallRules, GrammarTokens, UnwritableError
from toka_async.text.formats.parser import Call, Parsed, ResponseParser

SWITCHES = ("enable_thinking", "thinking")  # names by which chat templates know whether the model is to think
MAX_END = 256  # tokens of a prompt whose text shows what it has of the answer already


async def prepare_chat(service: Service, wire: ChatRequest) -> tuple[PreparedRequest, ChatAnswer]:
    """A request to submit, and what makes its response.

    Raises:
        ApiError: it cannot be answered. NotServingError: nothing can now.
    """
    service.check_model(wire.model)
    ready = service.engine.check_serving()
    generation = chat_generation(wire, service.limits_of(ready), service.defaults)
    limits = service.limits_of(ready, generation.n)
    tools = parse_tool_use(wire)
    chat, param = wire_chat(service, wire, tools.shown), "messages"
    given: str | Int32
    if wire.prompt_token_ids is None:
        given = await service.render(chat)
    else:
        param = "prompt_token_ids"
        parse = partial(parse_token_ids, param=param)
        given = await service.in_thread(parse, wire.prompt_token_ids, is_long=len(wire.prompt_token_ids) > MANY_IDS)
    generation, reading = read_answers(service, wire, tools, generation, [given])
    prompts = await service.encode([given], wire.add_special_tokens, param, generation, limits)
    prepared = await service.prepare(generation, prompts, param, limits)
    header = new_header("chatcmpl", service.name, generation.request_id)
    return prepared, ChatAnswer(service, header, reading)


def read_answers(
    service: Service, wire: ChatRequest, tools: ToolUse, generation: GenerationParams, prompts: Sequence[Prompt]
) -> tuple[GenerationParams, Reading | None]:
    """How the answers to prompts are divided, if they are. Raises ApiError (400) for tools of no format."""
    known = service.response_format
    if tools.offered and not (known is not None and known.has_calls and service.template_names("tools")):
        raise bad_request(
            "'tools': the chat template does not take tools, or writes calls in no known format; "
            "set model.chat_template or model.tool_format",
            param="tools",
            code="unsupported_parameter",
        )
    budget = find_budget(generation.thinking_budget, known)
    generation = dataclasses.replace(generation, thinking_budget=None)
    if known is None or not (tools.offered or known.has_reasoning):
        return generation, None
    ends = [each if isinstance(each, str) else service.tokenizer.decode(each[-MAX_END:], False) for each in prompts]
    reading = Reading(known, tools, wire.include_reasoning, [known.template.cut_prompt(each) for each in ends])
    tokens = GrammarTokens(service.tokenizer.backend.token_to_id, frozenset(service.defaults.end_ids))
    grammar = make_answer_grammar(wire, reading, generation, tokens, budget)
    sampling = replace(generation.sampling, grammar=grammar.text)
    generation = dataclasses.replace(
        generation,
        is_parsed=True,
        sampling=sampling,
        grammar_param=grammar.param,
        kept_tools=tools.kept if tools.kept_by else {},
    )
    return generation, reading


def make_answer_grammar(
    wire: ChatRequest, reading: Reading, generation: GenerationParams, tokens: GrammarTokens, budget: int | None
) -> OutputGrammar:
    """The grammar of whole answers: thought, content and calls. Raises ApiError (400) that names the field."""
    tools, content = reading.tools, generation.sampling.grammar
    if tools.is_forced and content:
        param = generation.grammar_param
        if param != "response_format":
            raise bad_request(f"'{param}' and 'tool_choice': a call must be made; give one", param=param)
        content = ""  # it is the format of an answer's text, and calls that must be made have none beside them
    # Where the content has a grammar, an answer may be calls instead if they have one.
    can_write = reading.format.calls is not None and reading.format.calls.write_calls is not None
    calls = None
    if tools.kept_by or (content and tools.offered and can_write):
        calls = CallRules(schemas=tools.kept, several=tools.most_calls is None, is_forced=tools.is_forced)
    param = tools.kept_by or generation.grammar_param or BUDGET
    write = partial(reading.format.write_answer, tokens, content=content, budget=budget)
    try:
        texts = {write(written, calls=calls) for written in set(reading.written)}
    except (UnwritableError, GrammarError) as error:
        named = str(error) if calls is None else name_unwritable(partial(write, reading.written[0]), calls, str(error))
        raise bad_request(f"'{param}': {named}", param=param, code="unsupported_parameter") from None
    if len(texts) > 1:
        raise bad_request(f"'{param}': some conversations' answers are begun and others' are not", param=param)
    (text,) = texts
    return make_output_grammar(text, param, wire) if text else NO_GRAMMAR


def name_unwritable(write: Callable[..., str], calls: CallRules, error: str) -> str:
    """What is wrong with calls that cannot be written, and with which function's arguments if it is one's."""
    for name, schema in calls.schemas.items():
        try:
            write(calls=dataclasses.replace(calls, schemas={name: schema}))
        except (UnwritableError, GrammarError) as own:
            with suppress(UnwritableError, GrammarError):  # otherwise it is not the arguments
                write(calls=dataclasses.replace(calls, schemas={name: ({}, False)}))
                return f"the function {name!r}: {own}"
    return error


def wire_chat(service: Service, wire: ChatRequest | TokenizeRequest, tools: list[dict[str, Any]] | None) -> Chat:
    """The chat of a request."""
    return one_chat(service, wire, wire.messages or [], "messages", tools)


def one_chat(
    service: Service,
    wire: ChatRequest | TokenizeRequest,
    given: list[Any],
    where: str,
    tools: list[dict[str, Any]] | None,
) -> Chat:
    """A chat. A final message that is to be continued is not followed by a generation prompt.

    `where` names the messages in errors.
    """
    if wire.continue_final_message and wire.add_generation_prompt:
        raise bad_request(
            "'continue_final_message' and add_generation_prompt cannot both be true", param="continue_final_message"
        )
    add = not wire.continue_final_message if wire.add_generation_prompt is None else wire.add_generation_prompt
    messages = parse_messages(given, where)
    return Chat(messages, add, wire.continue_final_message, template_kwargs(service, wire), tools)


def template_kwargs(service: Service, wire: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """By either of their names, and the effort of reasoning as the template knows it: a word, or whether to think."""
    other = wire.apply_chat_template_overrides if isinstance(wire, ChatRequest) else {}
    if other and wire.chat_template_kwargs:
        name = "apply_chat_template_overrides"
        raise bad_request(f"'{name}' and chat_template_kwargs are the same; give one", param=name)
    kwargs = wire.chat_template_kwargs or other
    effort = wire.reasoning_effort if isinstance(wire, ChatRequest) else None
    if effort is None:
        return kwargs
    knows = service.template_names("reasoning_effort")
    if effort == "none" and not knows:
        return {**{name: False for name in SWITCHES if service.template_names(name)}, **kwargs}
    if not knows or "reasoning_effort" in kwargs:
        why = "chat_template_kwargs has it too" if knows else "the chat template does not know it; leave it out"
        raise bad_request(f"'reasoning_effort': {why}", param="reasoning_effort", code="unsupported_parameter")
    return {**kwargs, "reasoning_effort": effort}


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers of one request are divided. written: what each prompt has of its answers already."""

    format: ResponseFormat
    tools: ToolUse
    keeps_reasoning: bool
    written: list[str]

    def start(self, prompt: int) -> ResponseParser:
        """The parser of a sample."""
        tools = self.tools
        return self.format.start(tools.offered, tools.most_calls, self.keeps_reasoning, self.written[prompt])


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The responses of one request.

    reading: None where texts are answers as they are. of_many: conversations, whose choices are told apart by their
    places. parsers: of streamed samples.
    """

    service: Service
    header: AnswerHeader
    reading: Reading | None = None
    of_many: bool = False
    parsers: dict[int, ResponseParser] = field(default_factory=dict)

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
        message = ChatMessage(content=output.text)
        if self.reading is not None:
            parsed = self.reading.start(index // run.generation.n).push(
                output.text, is_end=True, is_cut=output.reason.is_cut
            )
            message = self.message(parsed)
            finish = "tool_calls" if parsed.calls and finish == "stop" else finish
        return ChatChoice(
            index=index,
            message=message,
            # As JSON at once: what the JSON of all samples is made of would take several times its memory.
            logprobs=None if logprobs is None else Raw(ENCODER.encode(logprobs)),
            finish_reason=finish,
            stop_reason=output.stop,
            token_ids=output.rows.token_ids.tolist() if run.generation.return_token_ids else UNSET,
            prompt_token_ids=prompt_ids,
            packed_logprobs=packed_tokens(run, output.rows),
            weight_versions=weight_versions(self.service, run, output.rows),
        )

    def message(self, parsed: Parsed) -> ChatMessage:
        assert self.reading is not None
        calls = [ToolCall(id=self.reading.format.new_id(), function=called(each)) for each in parsed.calls]
        return ChatMessage(
            content=parsed.content or (None if calls else ""),
            reasoning_content=parsed.reasoning or UNSET,
            reasoning=parsed.reasoning or UNSET,
            tool_calls=calls or UNSET,
        )

    def delta(self, parsed: Parsed, parser: ResponseParser) -> ChatDelta:
        """Whole calls; the parser counts those of its sample, these included."""
        assert self.reading is not None
        new_id, first = self.reading.format.new_id, parser.num_calls - len(parsed.calls)
        calls = [
            ToolCallDelta(index=index, id=new_id(), function=called(each))
            for index, each in enumerate(parsed.calls, first)
        ]
        return ChatDelta(
            content=parsed.content or UNSET,
            reasoning_content=parsed.reasoning or UNSET,
            reasoning=parsed.reasoning or UNSET,
            tool_calls=calls or UNSET,
        )

    def prompt_token_ids(self, run: Run, prompt: int) -> list[int] | UnsetType:
        return run.prompts[prompt].tolist() if run.generation.return_token_ids else UNSET

    def first(self, run: Run, prompt: int, sample: int) -> ChatChunk:
        assert prompt == 0, "a chat has one prompt"
        choice = ChatChunkChoice(index=sample, delta=ChatDelta(role="assistant", content=""))
        return self.chat_chunk([choice], self.no_usage(run))

    def with_prompt(self, chunk: ChatChunk, run: Run, prompt: int) -> ChatChunk:
        return replace(chunk, prompt_token_ids=self.prompt_token_ids(run, prompt))

    def chunks(
        self, run: Run, prompt: int, sample: int, piece: Piece, reason: Reason, stop: str | int | None
    ) -> list[ChatChunk]:
        assert prompt == 0, "a chat has one prompt"
        finish, delta, logprobs = FINISH[reason], ChatDelta(content=piece.text or UNSET), self.logprobs(run, piece.rows)
        if self.reading is not None:
            parser = self.parsers.get(sample)
            if parser is None:
                parser = self.parsers[sample] = self.reading.start(prompt)
            parsed = parser.push(piece.text, is_end=reason is not Reason.NONE, is_cut=reason.is_cut)
            if not (parsed or finish or wants_tokens(run.generation)):
                return []
            delta = self.delta(parsed, parser)
            if finish:
                del self.parsers[sample]
            finish = "tool_calls" if parser.num_calls and finish == "stop" else finish
        choice = ChatChunkChoice(
            index=sample,
            delta=delta,
            logprobs=logprobs,
            finish_reason=finish,
            stop_reason=stop,
            token_ids=piece.rows.token_ids.tolist() if run.generation.return_token_ids else UNSET,
            packed_logprobs=packed_tokens(run, piece.rows),
            weight_versions=weight_versions(self.service, run, piece.rows, piece.first),
        )
        choices = [choice]
        if finish and delta.tool_calls:  # OpenAI's client does not take a call and an end in one chunk
            end = ChatChunkChoice(index=sample, delta=ChatDelta(), finish_reason=finish, stop_reason=stop)
            choices = [replace(choice, finish_reason=None, stop_reason=None), end]
        return [self.chat_chunk([each], self.no_usage(run)) for each in choices]

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
        return self.chunk_logprobs(run, 0, rows.token_ids.tolist(), rows.list_scores(), [])

    def chunk_logprobs(
        self, run: Run, prompt: int, token_ids: list[int], scores: list[Score], offsets: list[int]
    ) -> ChatLogprobs | None:
        del prompt, offsets  # a chat has one prompt, and its log-probs have no places in the text
        if not wants_json_logprobs(run.generation):
            return None
        names = self.service.chat_names[run.generation.name_token_ids]
        return chat_logprobs(names, token_ids, scores, run.generation.sampling.num_logprobs)

    def prompt_logprobs(self, run: Run) -> PromptLogprobs | UnsetType | None:
        num_top = run.generation.num_prompt_logprobs
        if num_top < 0 or run.generation.pack_columns:
            return UNSET
        prefilled = run.prefilled(0)
        if prefilled is None:
            return None
        rows = prompt_rows(run.prompts[0], prefilled, run.generation.sampling.num_prompt_logprobs)
        return prompt_logprobs(self.service.tokenizer, rows, as_i32(prefilled.ranks), num_top)


def called(call: Call) -> CalledFunction:
    return CalledFunction(name=call.name, arguments=call.arguments)
