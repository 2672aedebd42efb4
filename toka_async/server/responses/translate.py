"""Makes a chat of a request for a response, and its errors errors of that request. Knows no engine."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from toka_async.openai.errors import ApiError, bad_request
from toka_async.openai.requests import (
    AllowedTools,
    ChatRequest,
    FunctionName,
    JsonSchemaFormat,
    NamedTool,
    OutputFormat,
    StreamOptions,
    Tool,
    ToolChoice,
    ToolFunction,
)
from toka_async.server.responses.requests import (
    AnsweredText,
    ChosenFunction,
    ChosenTools,
    GivenCall,
    GivenCallOutput,
    GivenMessage,
    GivenReasoning,
    InputText,
    OfferedFunction,
    PlainText,
    Refusal,
    ResponsesRequest,
    SchemaFormat,
    TextConfig,
)

Message = dict[str, Any]

LOGPROBS = "message.output_text.logprobs"
STATELESS = ("previous_response_id", "conversation")
SAME = (  # fields that chats have under the same names
    *("model", "stream", "parallel_tool_calls", "temperature", "top_p", "top_k", "min_p", "seed", "stop"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens", "ignore_eos"),
    *("structured_outputs", "thinking_token_budget", "chat_template_kwargs", "priority", "cache_salt", "request_id"),
)
CLOSING = {"content", "tool_calls"}  # of a turn: no text follows these in it
NAMES = {  # of fields, in the errors of chats and in those of responses
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "tool_choice.function": "tool_choice.name",
    "tool_choice.allowed_tools": "tool_choice.tools",
}

_QUOTED = re.compile(rf"(?<=')({'|'.join(map(re.escape, NAMES))})\b|\b(max_tokens)\b")
_FUNCTION = re.compile(r"(\btools\[\d+\])\.function\b")


def make_chat(wire: ResponsesRequest) -> ChatRequest:
    """Raises ApiError (400), which names the field."""
    for name in STATELESS:
        if getattr(wire, name) is not None:
            raise bad_request(
                f"'{name}' is not supported, since nothing is stored; give the whole conversation as 'input'",
                param=name,
                code="unsupported_parameter",
            )
    if wire.top_logprobs and LOGPROBS not in wire.include:
        raise bad_request(f"'top_logprobs' needs include: [\"{LOGPROBS}\"]", param="top_logprobs")
    if wire.stream_options is not None and not wire.stream:
        raise bad_request("'stream_options' needs stream: true", param="stream_options")
    return ChatRequest(
        messages=make_messages(wire),
        max_completion_tokens=wire.max_output_tokens,
        logprobs=LOGPROBS in wire.include,
        top_logprobs=wire.top_logprobs,
        response_format=make_format(wire.text),
        tools=[make_tool(each) for each in wire.tools],
        tool_choice=make_choice(wire.tool_choice),
        reasoning_effort=wire.reasoning.effort,
        stream_options=None if wire.stream_options is None else StreamOptions(include_obfuscation=True),
        **{name: getattr(wire, name) for name in SAME},
    )


def make_messages(wire: ResponsesRequest) -> list[Message]:
    """What a model did in one turn, its reasoning, text and calls, becomes one message."""
    made: list[Message] = []
    if wire.instructions is not None:
        made.append({"role": "system", "content": wire.instructions})
    if isinstance(wire.input, str):
        return [*made, {"role": "user", "content": wire.input}]
    turn: Message | None = None  # the assistant's message, while items add to it
    for place, item in enumerate(wire.input):
        match item:
            case GivenMessage(role="assistant"):
                added: Message = {"content": join_texts(item.content)}
            case GivenReasoning():
                text = "".join(part.text for part in item.content or item.summary)
                added = {"reasoning_content": text, "reasoning": text}
            case GivenCall():
                added = {"tool_calls": [make_call(item, f"input[{place}].arguments")]}
            case GivenMessage():
                turn = None
                made.append({"role": item.role, "content": make_content(item.content)})
                continue
            case GivenCallOutput():
                turn = None
                made.append({"role": "tool", "tool_call_id": item.call_id, "content": join_texts(item.output)})
                continue
        if turn is None or isinstance(item, GivenReasoning) or ("content" in added and turn.keys() & CLOSING):
            turn = {"role": "assistant"}
            made.append(turn)
        if "tool_calls" in added:
            added = {"tool_calls": [*turn.get("tool_calls", ()), *added["tool_calls"]]}
        turn |= added
    for message in made:
        if "tool_calls" not in message:
            message.setdefault("content", "")
    return made


def make_call(call: GivenCall, where: str) -> Message:
    """Raises ApiError (400) for arguments that are no JSON object, as chats do."""
    try:
        is_object = isinstance(msgspec.json.decode(call.arguments or "{}"), dict)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        is_object = False
    if not is_object:
        raise bad_request(f"'{where}' must be a JSON object, as text", param=where)
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def make_content(content: str | list[InputText | PlainText | AnsweredText | Refusal]) -> str | list[Message]:
    """A single text is a string, because some chat templates take no parts."""
    if isinstance(content, str) or len(content) < 2:
        return join_texts(content)
    return [{"type": "text", "text": join_texts([part])} for part in content]


def join_texts(content: str | list[InputText] | list[InputText | PlainText | AnsweredText | Refusal]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in content)


def make_format(text: TextConfig) -> OutputFormat:
    wanted = text.format
    if not isinstance(wanted, SchemaFormat):
        return msgspec.convert({"type": wanted.__struct_config__.tag}, OutputFormat)
    schema = JsonSchemaFormat(
        name=wanted.name, description=wanted.description, wanted=wanted.wanted, strict=bool(wanted.strict)
    )
    return OutputFormat(type="json_schema", json_schema=schema)


def make_tool(tool: OfferedFunction) -> Tool:
    function = ToolFunction(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=bool(tool.strict)
    )
    return Tool(type="function", function=function)


def make_choice(choice: Any) -> Any:
    """The choice as chats have it; one by a single word is the same."""
    match choice:
        case ChosenFunction(name=name):
            return ToolChoice(type="function", function=FunctionName(name=name))
        case ChosenTools(mode=mode, tools=tools):
            named = [NamedTool(type="function", function=FunctionName(name=each.name)) for each in tools]
            return ToolChoice(type="allowed_tools", allowed_tools=AllowedTools(mode=mode, tools=named))
    return choice


def rename_fields(error: ApiError) -> ApiError:
    """The error of a chat with the names that the fields have here."""
    message = _FUNCTION.sub(r"\1", _QUOTED.sub(lambda match: NAMES[match[0]], error.message))
    param = None if error.param is None else rename_field(error.param)
    logged = error.logged if error.logged != error.message else None
    return ApiError(error.status, message, param=param, code=error.code, retry_after=error.retry_after, logged=logged)


def rename_field(param: str) -> str:
    """The name that a chat's field has here, also of a part of it."""
    param = _FUNCTION.sub(r"\1", param)
    old = next((name for name in NAMES if param == name or param.startswith((f"{name}.", f"{name}["))), None)
    return param if old is None else NAMES[old] + param.removeprefix(old)
