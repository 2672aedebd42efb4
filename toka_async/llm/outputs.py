"""What goes to the engine and comes back, with vLLM's names: requests, their samples, and log-probs by token id.

These objects refer to nothing that refers to them, so the garbage collector need not look at them: of millions, it
would take as long as all else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from toka_async.arrays import Float32, Int32
from toka_async.client.results import Event, Result, Sample
from toka_async.llm.sampling_params import RequestOutputKind, SamplingParams
from toka_async.text.tokenizer import Tokenizer


class Logprob(msgspec.Struct, gc=False):
    """A token's log-prob, of the distribution that `logprobs_mode` names.

    rank: its place among all tokens, from 1; None: a sampled token that is not among the likeliest that were asked for.
    decoded_token: its text; None without `detokenize`.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


T = TypeVar("T", int, float)
Logprobs: TypeAlias = list[dict[int, Logprob]]


class WeightVersionSpan(msgspec.Struct, gc=False):
    """Tokens from `start` up to `end` that one version of the weights generated."""

    version: str
    start: int
    end: int


class CompletionOutput(msgspec.Struct, gc=False):
    """A sample. logprobs: for each token, itself and the likeliest ones. stop_reason: the stop string or the id of
    `stop_token_ids` that ended it; None for the model's own end token. weight_versions: which weights generated the
    tokens. num_kept, kept_masses: for each token, how many the filters kept and their share of the distribution, with
    log-probs of `logprobs_mode="processed"`.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    finish_reason: Literal["stop", "length", "abort", "error"] | None = None
    stop_reason: str | int | None = None
    weight_versions: list[WeightVersionSpan] | None = None
    num_kept: list[int] | None = None
    kept_masses: list[float] | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct, gc=False):
    """A prompt and its samples.

    prompt: None where only token ids were given. prompt_logprobs: an entry for each token, None for the first.
    num_cached_tokens: tokens of the prompt that were found in the cache; None in streams. metrics, lora_request: as
    vLLM's while it measures nothing and has no adapter.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    metrics: None = None
    lora_request: None = None


class Submittable(msgspec.Struct, gc=False):
    """A prompt to submit. prompt: its text, if known. token_ids: [p], p >= 1. max_tokens: at most, with what fits."""

    id: str
    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    cache_salt: str | None = None

    def make_fields(self, priority: int, *, stream: bool = False) -> dict[str, Any]:
        """Make the fields of a direct submission. Raises ValueError that names the field at fault."""
        fields = self.params.make_fields(stream=stream)
        fields["max_tokens"] = self.max_tokens
        fields["min_tokens"] = min(self.params.min_tokens, self.max_tokens)  # the context may end before
        if priority:
            fields["priority"] = priority
        return fields if self.cache_salt is None else fields | {"cache_salt": self.cache_salt}


class OutputMaker:
    """Makes outputs of what the engine sends."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer)

    def make_whole(self, request: Submittable, result: Result) -> RequestOutput:
        """Make the output of a whole answer."""
        params, scores = request.params, result.prompt
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None]
        if scores is not None:
            columns = scores.logprobs, scores.top_ids, scores.top_logprobs, scores.ranks.tolist()
            prompt_logprobs = [None, *self._list_logprobs(params, request.token_ids[1:], *columns)]
        return RequestOutput(
            request_id=request.id,
            prompt=request.prompt,
            prompt_token_ids=request.token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[self._make_sample(params, index, sample) for index, sample in enumerate(result.samples)],
            finished=True,
            num_cached_tokens=result.cached_tokens,
        )

    def _make_sample(self, params: SamplingParams, index: int, sample: Sample) -> CompletionOutput:
        """Make a whole sample. The engine makes a text only where it has to find stop strings."""
        output = self.make_part(params, index, sample)
        if params.detokenize and not params.stop:
            has_end = sample.finish_reason == "stop" and not params.include_stop_str_in_output
            shown = output.token_ids[:-1] if has_end else output.token_ids
            output.text = self._tokenizer.decode(shown, params.skip_special_tokens, continues=True)
        return output

    def make_part(self, params: SamplingParams, index: int, sample: Sample) -> CompletionOutput:
        """Make an output of tokens with the text that came with them."""
        output = CompletionOutput(index, sample.text, sample.token_ids.tolist())
        output.finish_reason, output.stop_reason = sample.finish_reason, sample.stop
        output.weight_versions = [WeightVersionSpan(*span) for span in sample.versions]
        if sample.kept.size:
            output.num_kept, output.kept_masses = sample.kept.tolist(), sample.masses.tolist()
        if params.logprobs is not None:
            output.cumulative_logprob = float(sample.logprobs.sum(dtype="float64"))
            columns = sample.logprobs, sample.top_ids, sample.top_logprobs, [None] * len(output.token_ids)
            output.logprobs = self._list_logprobs(params, output.token_ids, *columns)
        return output

    def _list_logprobs(
        self,
        params: SamplingParams,
        ids: list[int],
        logprobs: Float32,
        top_ids: Int32,
        top_logprobs: Float32,
        ranks: Sequence[int | None],
    ) -> Logprobs:
        """List the log-probs of each token: its own, then the likeliest.

        logprobs: [t]. top_ids, top_logprobs: [t, k]. ranks: [t], as far as they are known besides.
        """
        name: Callable[[int], str | None] = self._texts.__getitem__ if params.detokenize else leave_out
        own_values = zip(ids, logprobs.tolist(), ranks, strict=True)
        entries = [{token_id: Logprob(value, rank, name(token_id))} for token_id, value, rank in own_values]
        if top_ids.size:
            for own, entry, *tops in zip(ids, entries, top_ids.tolist(), top_logprobs.tolist(), strict=True):
                for rank, (token_id, value) in enumerate(zip(*tops, strict=True), start=1):
                    if token_id == own:
                        entry[own].rank = rank
                    else:
                        entry[token_id] = Logprob(value, rank, name(token_id))
        return entries


class StreamedRequest:
    """Makes the outputs of a stream from its events, as the request's `output_kind` says."""

    def __init__(self, request: Submittable, maker: OutputMaker) -> None:
        self._request = request
        self._maker = maker
        self._samples: dict[int, CompletionOutput] = {}  # so far

    def take(self, event: Event) -> RequestOutput:
        """Make the output of an event, which has one sample."""
        params = self._request.params
        part = self._maker.make_part(params, event.sample, event)
        whole = self._samples.get(event.sample)
        self._samples[event.sample] = whole = part if whole is None else add_parts(whole, part)
        return self._make([part if params.output_kind is RequestOutputKind.DELTA else whole])

    def abort(self) -> RequestOutput:
        """Make the output of an aborted request: its open samples, or what they have had already."""
        samples = [self._samples.get(index) for index in range(self._request.params.n)]
        is_delta = self._request.params.output_kind is RequestOutputKind.DELTA
        ended = []
        for index, sample in enumerate(samples):
            if sample is None or not sample.finished():
                known = CompletionOutput(index, "", []) if sample is None or is_delta else sample
                ended.append(replace(known, finish_reason="abort"))
        return replace(self._make(ended), finished=True)

    def _make(self, outputs: list[CompletionOutput]) -> RequestOutput:
        request = self._request
        num_ended = sum(sample.finished() for sample in self._samples.values())
        finished = num_ended == request.params.n
        return RequestOutput(request.id, request.prompt, request.token_ids, None, outputs, finished)


def add_parts(whole: CompletionOutput, part: CompletionOutput) -> CompletionOutput:
    """Join a sample so far and its next part. Neither is changed."""
    logprobs = None if whole.logprobs is None or part.logprobs is None else whole.logprobs + part.logprobs
    num_before = len(whole.token_ids)
    moved = [
        WeightVersionSpan(span.version, num_before + span.start, num_before + span.end)
        for span in part.weight_versions or ()
    ]
    total = (whole.cumulative_logprob or 0.0) + (part.cumulative_logprob or 0.0)
    return CompletionOutput(
        index=whole.index,
        text=whole.text + part.text,
        token_ids=whole.token_ids + part.token_ids,
        cumulative_logprob=None if logprobs is None else total,
        logprobs=logprobs,
        finish_reason=part.finish_reason,
        stop_reason=part.stop_reason,
        weight_versions=join_spans([*(whole.weight_versions or ()), *moved]),
        num_kept=add_lists(whole.num_kept, part.num_kept),
        kept_masses=add_lists(whole.kept_masses, part.kept_masses),
    )


def join_spans(spans: Sequence[WeightVersionSpan]) -> list[WeightVersionSpan]:
    """Join neighbours of one version. None is changed."""
    joined: list[WeightVersionSpan] = []
    for span in spans:
        if joined and joined[-1].version == span.version:
            joined[-1] = replace(joined[-1], end=span.end)
        else:
            joined.append(span)
    return joined


def add_lists(whole: list[T] | None, part: list[T] | None) -> list[T] | None:
    return None if whole is None and part is None else [*(whole or ()), *(part or ())]


class TokenTexts(dict[int, str]):
    """The text of each token by its id, made when a token is first seen."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = self._tokenizer.token_text(token_id)
        return text


def leave_out(_token_id: int) -> None:
    """The text of a token that is not wanted."""
