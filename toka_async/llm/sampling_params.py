"""How the samples of a prompt are drawn, with vLLM's names and defaults.

The rules are those of direct submission (`openai.requests.DirectRequest`), so a value is refused here as a server
refuses it. Knows no model and no prompt.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Self

from toka_async.openai.errors import ApiError
from toka_async.openai.fields import UNSUPPORTED, check_fields, make_unknown_error
from toka_async.openai.generation import RequestLimits, check_counts, parse_stops
from toka_async.openai.parse import parse_fields
from toka_async.openai.requests import DirectRequest, LogprobsMode

# What vLLM has beside the fields of requests, with the values that ask for nothing.
ELSEWHERE: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "extra_args": ({},),
    "flat_logprobs": (False,),
    "prompt_logprob_start": (0,),
    "prompt_logprob_token_ids": ([],),
    "routed_experts_prompt_start": (0,),
    "skip_reading_prefix_cache": (False,),
    "stream_interval": (1,),
    "trace_decode_token_ids": (False,),
    "truncate_prompt_tokens": (),
    "watermarking": (False,),
}

MOST = 2**31 - 1
DIRECT = (  # fields that are the same in a direct submission
    *("n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "logprobs"),
    *("prompt_logprobs", "logprobs_mode", "skip_special_tokens", "include_stop_str_in_output", "allowed_token_ids"),
    "thinking_token_budget",
)
ANY_MODEL = RequestLimits(MOST, MOST, MOST, MOST)  # its own limits the engine checks


class RequestOutputKind(Enum):
    """What the outputs of a stream contain: all of a sample so far, what is new, or the whole answer once."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(slots=True)
class StructuredOutputsParams:
    """What outputs must look like, with vLLM's names: one of json, regex, choice, grammar, json_object, structural_tag.

    The others say how JSON is written. grammars/README.md explains them.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


GuidedDecodingParams = StructuredOutputsParams  # its older name


class SamplingParams:
    """How the samples of a prompt are drawn, and what is said of them.

    Names, meanings and defaults are vLLM's; server/API.md explains them, and also `logprobs_mode`, which vLLM has for a
    whole engine only. `max_tokens=None` is the rest of the context, `seed=-1` is none. A field that the engine does not
    have is refused by its name, unless its value asks for nothing.

    Raises:
        ValueError: a field is unknown, not supported, or out of range; the message names it.
    """

    def __init__(
        self,
        *,
        n: int = 1,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
        max_tokens: int | None = 16,
        min_tokens: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        logprobs_mode: LogprobsMode | None = None,
        detokenize: bool = True,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
        logit_bias: Mapping[int, float] | None = None,
        allowed_token_ids: Sequence[int] | None = None,
        structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None,
        guided_decoding: StructuredOutputsParams | Mapping[str, Any] | None = None,
        thinking_token_budget: int | None = None,
        **others: Any,
    ) -> None:
        self.n = n
        self.presence_penalty = presence_penalty
        self.frequency_penalty = frequency_penalty
        self.repetition_penalty = repetition_penalty
        self.temperature = temperature
        self.top_p = top_p
        self.top_k = top_k
        self.min_p = min_p
        self.seed = None if seed == -1 else seed
        self.stop = [stop] if isinstance(stop, str) else make_list("stop", stop) or []
        self.stop_token_ids = make_list("stop_token_ids", stop_token_ids) or []
        self.ignore_eos = ignore_eos
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.logprobs = logprobs
        self.prompt_logprobs = prompt_logprobs
        self.logprobs_mode = logprobs_mode
        self.detokenize = detokenize
        self.skip_special_tokens = skip_special_tokens
        self.spaces_between_special_tokens = spaces_between_special_tokens
        self.include_stop_str_in_output = include_stop_str_in_output
        self.output_kind = RequestOutputKind(output_kind)
        self.thinking_token_budget = thinking_token_budget
        self.logit_bias = None if logit_bias is None else make_dict("logit_bias", logit_bias)
        self.allowed_token_ids = make_list("allowed_token_ids", allowed_token_ids)
        if structured_outputs is not None and guided_decoding is not None:
            raise ValueError("SamplingParams: 'guided_decoding' is an older name of structured_outputs; give one")
        self.structured_outputs = guided_decoding if structured_outputs is None else structured_outputs
        try:
            check_fields(others, vars(self), {**UNSUPPORTED, **ELSEWHERE})
        except ApiError as error:
            raise ValueError(f"SamplingParams: {error}") from None
        self.make_fields()

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in FIELDS:
            raise AttributeError(f"SamplingParams: {make_unknown_error(name, FIELDS, '')}")
        super().__setattr__(name, value)

    @classmethod
    def from_optional(cls, **fields: Any) -> Self:
        """Make parameters of fields of which some are None, which stands for the default."""
        return cls(**{name: value for name, value in fields.items() if value is not None or name == "max_tokens"})

    def clone(self) -> Self:
        return copy.deepcopy(self)

    def make_fields(self, *, stream: bool = False) -> dict[str, Any]:
        """Make the fields of a direct submission, without the seed.

        The engine makes texts of streams, and where it has to find stop strings; other texts are made of token ids
        here. Raises ValueError that names the field at fault.
        """
        if self.stop and not self.detokenize:
            raise ValueError("SamplingParams: 'stop' needs detokenize=True; stop_token_ids do not")
        fields = {name: value for name in DIRECT if (value := getattr(self, name)) is not None}
        if self.logit_bias:
            fields["logit_bias"] = {str(token_id): value for token_id, value in self.logit_bias.items()}
        if self.structured_outputs is not None:
            given = self.structured_outputs
            if isinstance(given, StructuredOutputsParams):
                given = asdict(given)
            wishes = make_dict("structured_outputs", given)
            fields["structured_outputs"] = {name: value for name, value in wishes.items() if value not in (None, False)}
        fields["text"] = bool(self.stop) or (stream and self.detokenize)
        try:
            request = parse_fields({**fields, "seed": self.seed}, DirectRequest)
            check_counts(request, ANY_MODEL, self.max_tokens)
            parse_stops(request.stop)
        except ApiError as error:
            raise ValueError(f"SamplingParams: {error}") from None
        return fields

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SamplingParams) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def make_list(name: str, values: object) -> list[Any] | None:
    if values is None:
        return None
    if not isinstance(values, Iterable):
        raise ValueError(f"SamplingParams: '{name}': expected a list, got {type(values).__name__}")
    return list(values)


def make_dict(name: str, values: object) -> dict[Any, Any]:
    if not isinstance(values, Mapping):
        raise ValueError(f"SamplingParams: '{name}': expected a dict, got {type(values).__name__}")
    return dict(values)


FIELDS = inspect.signature(SamplingParams).parameters.keys() - {"others"}
