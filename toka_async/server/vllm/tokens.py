"""POST /inference/v1/generate: the request that its body asks for, and its answer."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_params
from functools import partial

from aiohttp import web
from msgspec import UNSET, Raw
from msgspec.structs import replace

from toka_async.arrays import as_i32
from toka_async.messages import Reason
from toka_async.openai.errors import bad_request
from toka_async.openai.generation import Defaults, GenerationParams, RequestLimits, build_generation, count_logprobs
from toka_async.openai.prompts import parse_token_ids
from toka_async.openai.requests import GenerationFields, SamplingFields
from toka_async.openai.responses import Usage
from toka_async.server.access.guard import account_of
from toka_async.server.engine.token_block import Score, TokenRows
from toka_async.server.generate.answers import FINISH, new_header, num_kept, run_usage, weight_versions
from toka_async.server.generate.batching import MANY_IDS
from toka_async.server.generate.completions import check_counts
from toka_async.server.generate.events import ENCODER
from toka_async.server.generate.logprobs import ChatNames, likeliest, numbers, prompt_logprobs, prompt_rows
from toka_async.server.generate.sample_text import Piece
from toka_async.server.generate.service import Output, PreparedRequest, Run, Service
from toka_async.server.http.receive import read_request
from toka_async.server.http.respond import SERVICE, respond
from toka_async.server.vllm.requests import TokensRequest
from toka_async.server.vllm.responses import (
    GeneratedTokens,
    GeneratedTokensChunk,
    LikelyToken,
    OutputMode,
    SampledToken,
    TokensChoice,
    TokensLogprobs,
)

PARAM = "token_ids"


async def generate_tokens(request: web.Request) -> web.StreamResponse:
    """Answers a prompt of token ids with the token ids of its samples."""
    service = request.app[SERVICE]
    prepared, answer = await prepare_tokens(service, await read_request(request, TokensRequest))
    async with service.running(prepared, account_of(request)) as run:
        return await respond(request, run, answer)


async def prepare_tokens(service: Service, wire: TokensRequest) -> tuple[PreparedRequest, TokensAnswer]:
    """A request to submit, and what makes its answer.

    Raises:
        ApiError: it cannot be answered. NotServingError: nothing can now.
    """
    service.check_model(wire.model)
    ready = service.engine.check_serving()
    generation = tokens_generation(wire, service.limits_of(ready), service.defaults)
    limits = service.limits_of(ready, generation.n)
    check_counts(1, generation.n, service.config, PARAM)
    parse = partial(parse_token_ids, param=PARAM)
    ids = await service.in_thread(parse, wire.token_ids, is_long=len(wire.token_ids) > MANY_IDS)
    prompts = await service.encode([ids], False, PARAM, generation, limits)
    request_id, created = wire.request_id or secrets.token_hex(16), new_header("", service.name).created
    prepared = await service.prepare(generation, prompts, PARAM, limits, names={request_id: None})
    return prepared, TokensAnswer(service, request_id, wire.output_mode, wire.return_token_ids, created)


def tokens_generation(wire: TokensRequest, limits: RequestLimits, own: Defaults) -> GenerationParams:
    """Raises ApiError (400), which names the field. Defaults are vLLM's, but end tokens and the kind of log-probs."""
    sampling, has_text = wire.sampling_params, wire.output_mode == "text"
    if not sampling.detokenize and (has_text or sampling.stop):
        what = "output_mode 'text'" if has_text else "'sampling_params.stop'"
        raise bad_request(f"{what} needs detokenize: true", param="sampling_params.detokenize")
    fields = GenerationFields(
        **{name: getattr(sampling, name) for name in SamplingFields.__struct_fields__},
        stream=wire.stream,
        stream_options=wire.stream_options,
        return_token_ids=True,
        priority=wire.priority,
        cache_salt=wire.cache_salt,
        return_weight_versions=True,
    )
    num_logprobs = count_logprobs(sampling.logprobs, limits, "sampling_params.logprobs")
    defaults = Defaults(end_ids=own.end_ids, logprob_kind=own.logprob_kind, special_tokens=own.special_tokens)
    made = build_generation(fields, limits, defaults, sampling.max_tokens, num_logprobs, -1, False)
    return replace_params(made, has_text=has_text)


@dataclass(slots=True)
class TokensAnswer:
    """The responses of one request.

    output_mode: `text`: samples have texts too, and log-probs the texts of tokens. prompt_is_due: the prompt's token
    ids are wanted, and no chunk has had them.
    """

    service: Service
    request_id: str
    output_mode: OutputMode
    prompt_is_due: bool
    created: int

    def whole(self, run: Run, outputs: Sequence[Sequence[Output]]) -> GeneratedTokens:
        (samples,) = outputs
        return GeneratedTokens(
            request_id=self.request_id,
            model=self.service.name,
            created=self.created,
            output_mode=self.output_mode,
            choices=[
                self.choice(run, sample, Piece(output.text, output.rows, []), output.reason, output.stop)
                for sample, output in enumerate(samples)
            ],
            usage=run_usage(run, num_kept(outputs)),
            prompt_logprobs=self.prompt_logprobs(run),
            prompt_token_ids=run.prompts[0].tolist() if self.prompt_is_due else None,
        )

    def choice(self, run: Run, sample: int, piece: Piece, reason: Reason, stop: str | int | None) -> TokensChoice:
        has_text, num_top, logprobs = run.generation.has_text, run.generation.sampling.num_logprobs, None
        if num_top >= 0:
            # As JSON at once: what the JSON of all samples is made of would take several times its memory.
            names = self.service.chat_names[not has_text]
            logprobs = Raw(ENCODER.encode(tokens_logprobs(names, piece.rows, num_top)))
        return TokensChoice(
            index=sample,
            finish_reason=FINISH[reason],
            stop_reason=stop,
            token_ids=piece.rows.token_ids.tolist(),
            logprobs=logprobs,
            text=piece.text if has_text else UNSET,
            weight_versions=weight_versions(self.service, run, piece.rows, piece.first),
        )

    def prompt_logprobs(self, run: Run) -> Raw | None:
        num_top = run.generation.num_prompt_logprobs
        prefilled = run.prefilled(0)
        if num_top < 0 or prefilled is None:  # none are wanted, or the prompt was not computed
            return None
        rows = prompt_rows(run.prompts[0], prefilled, num_top)
        return Raw(ENCODER.encode(prompt_logprobs(self.service.tokenizer, rows, as_i32(prefilled.ranks), num_top)))

    def first(self, run: Run, prompt: int, sample: int) -> None:
        del run, prompt, sample  # no event comes before a sample's tokens

    def chunk_logprobs(
        self, run: Run, prompt: int, token_ids: list[int], scores: list[Score], offsets: list[int]
    ) -> None:
        del run, prompt, token_ids, scores, offsets  # chunks say more of each token

    def chunks(
        self, run: Run, prompt: int, sample: int, piece: Piece, reason: Reason, stop: str | int | None
    ) -> list[GeneratedTokensChunk]:
        assert prompt == 0, "a request has one prompt"
        return [self.tokens_chunk([self.choice(run, sample, piece, reason, stop)])]

    def with_prompt(self, chunk: GeneratedTokensChunk, run: Run, prompt: int) -> GeneratedTokensChunk:
        if not self.prompt_is_due:
            return chunk
        self.prompt_is_due = False
        return replace(chunk, prompt_token_ids=run.prompts[prompt].tolist())

    def last(self, usage: Usage) -> GeneratedTokensChunk:
        return self.tokens_chunk([], usage)

    def tokens_chunk(self, choices: list[TokensChoice], usage: Usage | None = None) -> GeneratedTokensChunk:
        return GeneratedTokensChunk(
            request_id=self.request_id, output_mode=self.output_mode, choices=choices, usage=usage
        )


def tokens_logprobs(names: ChatNames, rows: TokenRows, num_top: int) -> TokensLogprobs:
    """Log-probs of sampled tokens with `num_top` of the likeliest; the sampled one leads them, as in vLLM."""
    columns = (rows.token_ids.tolist(), numbers(rows.logprobs), likeliest(rows, num_top))
    content = []
    for token_id, logprob, tops in zip(*columns, strict=True):
        rank = next((rank for rank, (top_id, _) in enumerate(tops, 1) if top_id == token_id), None)
        own = likely_token(names, token_id, logprob, rank)
        others = [
            likely_token(names, top_id, value, place)
            for place, (top_id, value) in enumerate(tops, 1)
            if top_id != token_id
        ]
        content.append(
            SampledToken(
                token=own.token,
                token_id=token_id,
                logprob=logprob,
                rank=rank,
                bytes=own.bytes,
                top_logprobs=[own, *others],
            )
        )
    return TokensLogprobs(content)


def likely_token(names: ChatNames, token_id: int, logprob: float, rank: int | None) -> LikelyToken:
    name, raw = names[token_id]
    shown = None if names.as_ids else raw
    return LikelyToken(token=name, token_id=token_id, logprob=logprob, rank=rank, bytes=shown)
