"""The response, its items and the events of its stream as Structs, with the names of OpenAI's SDK.

UNSET fields are left out; None is written as null. Knows shapes only.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec
from msgspec import UNSET, UnsetType

from toka_async.openai.responses import TokenLogprob
from toka_async.server.responses.requests import ItemStatus

ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
EndKind = Literal["response.completed", "response.incomplete", "response.failed"]


class InputUsage(msgspec.Struct, frozen=True, kw_only=True):
    """cache_write_tokens: those that were computed, and are in the cache from then on."""

    cached_tokens: int
    cache_write_tokens: int


class OutputUsage(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputUsage
    output_tokens: int
    output_tokens_details: OutputUsage
    total_tokens: int


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="summary_text"):
    text: str


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: None = None


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """arguments: a JSON object, as text."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | ReasoningItem | FunctionCall


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFault(msgspec.Struct, frozen=True):
    """Why a response failed."""

    message: str
    code: Literal["server_error"] = "server_error"


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """A response. Fields of the request that it repeats are as they were given, or what was taken instead."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    background: Literal[False] = False
    previous_response_id: None = None
    store: Literal[False] = False


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The response as it is at its beginning and at its end."""

    type: Literal["response.created", "response.in_progress"] | EndKind
    sequence_number: int = 0
    response: ResponseObject


class ItemEvent(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int = 0
    output_index: int
    item: OutputItem


class EventOfItem(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of all events that happen within an item."""

    sequence_number: int = 0
    output_index: int
    item_id: str


class PartEvent(EventOfItem, frozen=True, kw_only=True):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int = 0
    part: OutputText | ReasoningText


class SummaryPartEvent(EventOfItem, frozen=True, kw_only=True):
    type: Literal["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"]
    summary_index: int = 0
    part: SummaryText


class TextDelta(EventOfItem, frozen=True, kw_only=True):
    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    content_index: int = 0
    delta: str
    logprobs: list[TokenLogprob]
    obfuscation: str | UnsetType = UNSET


class TextDone(EventOfItem, frozen=True, kw_only=True):
    type: Literal["response.output_text.done"] = "response.output_text.done"
    content_index: int = 0
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(EventOfItem, frozen=True, kw_only=True):
    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"
    content_index: int = 0
    delta: str
    obfuscation: str | UnsetType = UNSET


class ReasoningDone(EventOfItem, frozen=True, kw_only=True):
    type: Literal["response.reasoning_text.done"] = "response.reasoning_text.done"
    content_index: int = 0
    text: str


class SummaryDelta(EventOfItem, frozen=True, kw_only=True):
    type: Literal["response.reasoning_summary_text.delta"] = "response.reasoning_summary_text.delta"
    summary_index: int = 0
    delta: str
    obfuscation: str | UnsetType = UNSET


class SummaryDone(EventOfItem, frozen=True, kw_only=True):
    type: Literal["response.reasoning_summary_text.done"] = "response.reasoning_summary_text.done"
    summary_index: int = 0
    text: str


class ArgumentsDelta(EventOfItem, frozen=True, kw_only=True):
    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    delta: str
    obfuscation: str | UnsetType = UNSET


class ArgumentsDone(EventOfItem, frozen=True, kw_only=True):
    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    name: str
    arguments: str


EventInItem = (
    PartEvent
    | SummaryPartEvent
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | SummaryDelta
    | SummaryDone
    | ArgumentsDelta
    | ArgumentsDone
)
EVENTS: tuple[type[msgspec.Struct], ...] = (ResponseEvent, ItemEvent, *get_args(EventInItem))
