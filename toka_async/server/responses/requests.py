"""The body of POST /v1/responses as Structs.

Names and shapes are those of OpenAI's SDK (openai 3.54, openai/types/responses/response_create_params.py). Sampling
fields that OpenAI's API does not have bear the names that they have in chats.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, field

from toka_async.openai.fields import Unsupported
from toka_async.openai.requests import (
    LEAST_REPETITION,
    MAX_COUNT,
    MAX_LABEL,
    MAX_TOOLS,
    Bias,
    Count,
    NumLogprobs,
    Penalty,
    Priority,
    Salt,
    Stop,
    Stops,
    StructuredOutputs,
    ToolName,
    WireRequest,
)

NOTHING_STORED = Annotated[Any, Meta(extra_json_schema={"const": None})]  # `translate` says what to do instead
Includable = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(WireRequest, frozen=True, kw_only=True, tag_field="type", tag="input_text"):
    text: str


class PlainText(WireRequest, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Not in OpenAI's API; vLLM takes it."""

    text: str


class AnsweredText(WireRequest, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """A text of an earlier answer. Models read the text alone."""

    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


class Refusal(WireRequest, frozen=True, kw_only=True, tag_field="type", tag="refusal"):
    refusal: str


class GivenThought(WireRequest, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class GivenSummary(WireRequest, frozen=True, kw_only=True, tag_field="type", tag="summary_text"):
    text: str


class GivenMessage(WireRequest, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """`type` may be missing. id, status, phase: as answers have them; no model reads them."""

    is_untagged: ClassVar[bool] = True

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | PlainText | AnsweredText | Refusal]
    id: str | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class GivenCall(WireRequest, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: ItemStatus | None = None


class GivenCallOutput(WireRequest, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"):
    call_id: str
    output: str | list[InputText]
    id: str | None = None
    status: ItemStatus | None = None


class GivenReasoning(WireRequest, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What a model thought earlier: `content`, or else `summary`."""

    unsupported: ClassVar[Unsupported] = {"encrypted_content": ("",)}

    summary: list[GivenSummary] = field(default_factory=list)
    content: list[GivenThought] = field(default_factory=list)
    id: str | None = None
    status: ItemStatus | None = None


InputItem = GivenMessage | GivenCall | GivenCallOutput | GivenReasoning


class OfferedFunction(WireRequest, frozen=True, kw_only=True, tag_field="type", tag="function"):
    unsupported: ClassVar[Unsupported] = {
        "allowed_callers": (["direct"],),
        "async": (False,),
        "defer_loading": (False,),
        "output_schema": (),
    }

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(WireRequest, frozen=True, kw_only=True, tag_field="type", tag="function"):
    name: ToolName


class ChosenTools(WireRequest, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction], Meta(min_length=1, max_length=MAX_TOOLS)]


class PlainFormat(WireRequest, frozen=True, kw_only=True, tag_field="type", tag="text"):
    pass


class ObjectFormat(WireRequest, frozen=True, kw_only=True, tag_field="type", tag="json_object"):
    pass


class SchemaFormat(WireRequest, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    name: ToolName
    wanted: dict[str, Any] = field(name="schema")
    strict: bool | None = None
    description: str | None = None


class TextConfig(WireRequest, frozen=True, kw_only=True):
    unsupported: ClassVar[Unsupported] = {"verbosity": ("medium",)}

    format: PlainFormat | ObjectFormat | SchemaFormat = PlainFormat()


class ReasoningConfig(WireRequest, frozen=True, kw_only=True):
    """summary: the reasoning is answered as a summary, word for word, for clients that show no other."""

    unsupported: ClassVar[Unsupported] = {
        "context": ("auto",),
        "generate_summary": (),
        "mode": ("standard",),
    }

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "detailed"] | None = None


class ResponseStreamOptions(WireRequest, frozen=True, kw_only=True):
    include_obfuscation: bool = False


class ResponsesRequest(WireRequest, frozen=True, kw_only=True):
    """POST /v1/responses. `translate` makes a chat of it."""

    unsupported: ClassVar[Unsupported] = {
        "background": (False,),
        "store": (False,),
        "prompt": (),
        "access_programs": (),
        "background_options": (),
        "context_management": ([],),
        "image": (),
        "max_tool_calls": (),
        "moderation": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "service_tier": ("auto", "default"),
    }

    model: str | None = None
    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    tools: Annotated[list[OfferedFunction], Meta(max_length=MAX_TOOLS)] = field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | ChosenTools | None = None
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    include: list[Includable] = field(default_factory=list)
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: NumLogprobs | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    previous_response_id: NOTHING_STORED = None
    conversation: NOTHING_STORED = None
    # Labels for the caller's own records.
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # As in chats.
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(ge=LEAST_REPETITION, le=2)] | None = None
    logit_bias: Bias = field(default_factory=dict)
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Stops = field(default_factory=list)
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_COUNT)] = 0
    ignore_eos: bool = False
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    priority: Priority = 0
    cache_salt: Salt | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=MAX_LABEL)] | None = None
