"""The requests of the API as Structs: names, types and ranges that hold for every model.

`generation`, `prompts` and `chat_messages` check what depends on the model or needs more than a range.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from toka_async.openai.chat_messages import MESSAGE
from toka_async.openai.fields import UNSUPPORTED, Unsupported

MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_CHARS = 8192  # all stop strings of a request together
MAX_CHOICES = 4096
MAX_TOOLS = 512
MAX_IDS = 16384  # in `stop_token_ids` and `logit_bias`

ANY_MODEL = ("", "default", "none")  # names that clients of other servers write for the one that is served
LEAST_REPETITION = 0.01  # a penalty that no logit of a model overflows with
MAX_COUNT = 2**31 - 1  # counts travel as int32
MAX_LABEL = 256  # characters of a request's id

Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
NumLogprobs = Annotated[int, Meta(ge=-1, le=MAX_COUNT)]  # -1: the vocabulary
LogprobsMode = Literal["raw", "temperature", "processed"]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
TokenIds = list[TokenId]
Pattern = Annotated[str, Meta(min_length=1)]
Choices = Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICES)]
AllowedIds = Annotated[TokenIds, Meta(min_length=1)]

# A schema tells readers what no type tells; the modules named above check it.
_ID = {"type": "integer", "minimum": 0, "maximum": MAX_COUNT}
_IDS = {"type": "array", "items": _ID, "minItems": 1}
Prompts = Annotated[
    list[Any],
    Meta(extra_json_schema={"minItems": 1, "anyOf": [{"items": each} for each in ({"type": "string"}, _ID, _IDS)]}),
]
PromptIds = Annotated[list[Any], Meta(extra_json_schema={"items": _ID, "minItems": 1})]
Salt = Annotated[str, Meta(min_length=1, max_length=1024)]
ToolName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
Priority = Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)]
Stop = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": MAX_STOP_LENGTH})]
Stops = Annotated[list[Stop], Meta(extra_json_schema={"maxItems": MAX_STOPS})]
Bias = Annotated[
    dict[str, Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=MAX_IDS, extra_json_schema={"propertyNames": {"pattern": "^[0-9]{1,11}$"}}),
]
Messages = Annotated[list[Any], Meta(extra_json_schema={"items": MESSAGE, "minItems": 1})]
# As an object, or as a text of JSON.
JsonSchema = Annotated[Any, Meta(extra_json_schema={"type": ["object", "boolean", "string"]})]
StructuralTag = Annotated[Any, Meta(extra_json_schema={"type": ["object", "string"]})]
Conversations = Annotated[
    list[Any],
    Meta(extra_json_schema={"items": {"type": "array", "items": MESSAGE, "minItems": 1}, "minItems": 1}),
]


class WireRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object of a request. Unknown fields are errors.

    unsupported: fields of other servers, which are accepted where they ask for nothing. is_untagged: of several kinds
    of objects, which a tag tells apart, those without a tag are of this kind.
    """

    unsupported: ClassVar[Unsupported] = {}
    is_untagged: ClassVar[bool] = False


class StreamOptions(WireRequest, frozen=True, kw_only=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class JsonSchemaFormat(WireRequest, frozen=True, kw_only=True):
    """strict: a keyword that cannot be enforced is refused; otherwise it is left out."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")] = "answer"
    description: str | None = None
    wanted: JsonSchema = msgspec.field(name="schema", default=True)
    strict: bool = False


class OutputFormat(WireRequest, frozen=True, kw_only=True):
    """OpenAI's `response_format`, and the structural tags of vLLM and SGLang."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    # Of a structural tag, as SGLang has it: `format`, or `structures` and `triggers`.
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(WireRequest, frozen=True, kw_only=True):
    """vLLM's `structured_outputs`: one of json, regex, choice, grammar, json_object and structural_tag.

    The others change JSON.
    """

    json: JsonSchema | None = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = None
    json_object: bool | None = None
    structural_tag: StructuralTag | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: Pattern | None = None


class SamplingFields(WireRequest, frozen=True, kw_only=True):
    """How tokens are drawn, when samples end, and what their texts leave out. None means the model's own default."""

    n: Count = 1
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_COUNT)] = 0
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(ge=LEAST_REPETITION, le=2)] | None = None
    logit_bias: Bias = {}
    allowed_token_ids: AllowedIds | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Stops = []
    stop_token_ids: Annotated[TokenIds, Meta(max_length=MAX_IDS)] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    prompt_logprobs: NumLogprobs | None = None
    logprobs_mode: LogprobsMode | None = None
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None  # -1: any number


class GenerationFields(SamplingFields, frozen=True, kw_only=True):
    """The fields that completions and chat share."""

    unsupported: ClassVar[Unsupported] = UNSUPPORTED

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_weight_versions: bool = False
    packed_logprobs: bool = False
    logprobs_in_fingerprint: bool = False
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    truncation_side: Literal["left", "right"] = "left"
    priority: Priority = 0
    cache_salt: Salt | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=MAX_LABEL)] | None = None
    response_format: OutputFormat | None = None
    # Older names of vLLM's for `structured_outputs`, and SGLang's.
    guided_json: JsonSchema | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Pattern | None = None
    guided_whitespace_pattern: Pattern | None = None
    json_schema: JsonSchema | None = None
    regex: Pattern | None = None
    ebnf: Pattern | None = None
    structural_tag: StructuralTag | None = None
    # Labels for the caller's own records; they ask nothing of a server.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None


class ToolFunction(WireRequest, frozen=True, kw_only=True):
    """What a tool is: its parameters are a JSON schema, absent where it has none."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class Tool(WireRequest, frozen=True, kw_only=True):
    """A function that the model may call."""

    type: Literal["function"]
    function: ToolFunction


class FunctionName(WireRequest, frozen=True, kw_only=True):
    name: ToolName


class NamedTool(WireRequest, frozen=True, kw_only=True):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(WireRequest, frozen=True, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class ToolChoice(WireRequest, frozen=True, kw_only=True):
    """One function by name, or the tools that are allowed. `tools` checks that it has what its type says."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """POST /v1/completions. `prompts` parses `prompt`; very many token ids are int32 arrays in a list."""

    prompt: str | Prompts
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None = None
    best_of: Count | None = None
    echo: bool = False
    logprobs: bool | NumLogprobs | None = None  # true: 1, false: none
    add_special_tokens: bool = True


class DirectRequest(GenerationFields, frozen=True, kw_only=True):
    """The generation fields of a direct submission. `text`: return text, not only token ids."""

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_COUNT)] = 16
    logprobs: NumLogprobs | None = None
    add_special_tokens: bool = True
    text: bool = True


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions. `chat_messages` checks `messages`, `prompts` parses `prompt_token_ids`."""

    messages: Messages
    prompt_token_ids: PromptIds | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None
    add_special_tokens: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    apply_chat_template_overrides: dict[str, Any] = {}  # Tokasaurus' name of the same
    tools: Tools = []
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ChatBatchRequest(ChatRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions/batch: `messages` are conversations. Has no stream and no prompt log-probs."""

    messages: Conversations
    prompt_token_ids: Annotated[PromptIds | None, Meta(extra_json_schema={"const": None})] = None
    stream: Annotated[bool, Meta(extra_json_schema={"const": False})] = False
    prompt_logprobs: Annotated[NumLogprobs | None, Meta(extra_json_schema={"const": None})] = None


class TokenizeRequest(WireRequest, frozen=True, kw_only=True):
    """POST /tokenize: a prompt or chat messages."""

    unsupported: ClassVar[Unsupported] = {
        "chat_template": (),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
    }

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: Tools = []
    return_token_strs: bool = False


class DetokenizeRequest(WireRequest, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
