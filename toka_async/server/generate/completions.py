"""Completions: a request's prompts, and the response or chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import UNSET, Raw, UnsetType
from msgspec.structs import replace

from toka_async.arrays import as_i32
from toka_async.config import LimitsConfig
from toka_async.messages import Prefilled, Reason
from toka_async.openai.errors import bad_request
from toka_async.openai.generation import GenerationParams, completion_generation
from toka_async.openai.prompts import Prompt, count_work, parse_prompts
from toka_async.openai.requests import CompletionRequest
from toka_async.openai.responses import Completion, CompletionChoice, CompletionLogprobs, Usage
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
    weight_versions,
)
from toka_async.server.generate.batching import MANY_IDS, in_slices
from toka_async.server.generate.events import ENCODER
from toka_async.server.generate.logprobs import (
    Lists,
    TokenNames,
    concatenated,
    echoed_logprobs,
    json_lists,
    legacy_logprobs,
    prompt_logprobs,
    prompt_rows,
    sample_offsets,
    text_offsets,
)
from toka_async.server.generate.sample_text import Piece
from toka_async.server.generate.service import Output, PreparedRequest, Run, Service


async def prepare_completion(service: Service, wire: CompletionRequest) -> tuple[PreparedRequest, CompletionAnswer]:
    """A request to submit, and what makes its response. Raises as `prepare_chat` does."""
    service.check_model(wire.model)
    ready = service.engine.check_serving()
    generation = completion_generation(wire, service.limits_of(ready), service.defaults)
    limits = service.limits_of(ready, generation.n)
    given = await service.in_thread(parse_prompts, wire.prompt, is_long=count_work(wire.prompt) > MANY_IDS)
    check_size(given, generation, service.config)
    prompts = await service.encode(given, wire.add_special_tokens, "prompt", generation, limits)
    whole = prompts if generation.truncation else given
    echoed = [prompt_text(service, generation, each) async for each in in_slices(whole if generation.echo else [])]
    prepared = await service.prepare(generation, prompts, "prompt", limits, sum(map(len, echoed)))
    return prepared, CompletionAnswer(service, echoed, new_header("cmpl", service.name, generation.request_id))


def check_size(prompts: list[Prompt], generation: GenerationParams, config: LimitsConfig) -> None:
    """Raises ApiError (400) for more prompts or samples than can ever be held."""
    check_counts(len(prompts), generation.n, config, "prompt")


def check_counts(num_prompts: int, n: int, config: LimitsConfig, param: str) -> None:
    """As `check_size`; `param` names the prompts' field."""
    if num_prompts > config.max_requests:
        raise bad_request(f"'{param}' can hold at most {config.max_requests} prompts", param=param)
    most = max(config.max_n, config.max_requests)
    if num_prompts * n > most:
        raise bad_request(f"{num_prompts} prompts of n={n} are more than {most} choices", param="n")


def prompt_text(service: Service, generation: GenerationParams, prompt: Prompt) -> str:
    """A prompt as an echo repeats it."""
    if isinstance(prompt, str):
        return prompt
    return service.tokenizer.decode(prompt.tolist(), generation.skip_special_tokens)


Echo = tuple[str, Lists | None]  # a prompt's text, and its log-probs where they are wanted
NO_ECHO: Echo = ("", None)


@dataclass(frozen=True, slots=True)
class CompletionAnswer:
    """The responses of one request.

    echoed: the texts of its prompts, when they are to be echoed. echoes: made once a prompt, as each sample has it.
    """

    service: Service
    echoed: list[str]
    header: AnswerHeader
    echoes: dict[int, Echo] = field(default_factory=dict)

    def whole(self, run: Run, outputs: Sequence[Sequence[Output]]) -> Completion:
        choices = []
        for prompt, samples in enumerate(outputs):
            echo = self.echo(run, prompt)
            of_prompt, packed = self.prompt_logprobs(run, prompt), packed_prompt(run, prompt)
            logprobs = self.sample_logprobs(run, samples, echo)
            prompt_ids = self.prompt_token_ids(run, prompt)
            for sample, (output, own) in enumerate(zip(samples, logprobs, strict=True)):
                choice = self.choice(run, prompt, sample, output, echo[0], own, of_prompt, prompt_ids)
                choices.append(replace(choice, packed_prompt_logprobs=packed) if packed is not UNSET else choice)
        return replace(
            self.completion(choices, run_usage(run, num_kept(outputs))), system_fingerprint=fingerprint(run, outputs)
        )

    def choice(
        self,
        run: Run,
        prompt: int,
        sample: int,
        output: Output,
        echo: str,
        logprobs: Raw | None,
        of_prompt: Raw | UnsetType | None,
        prompt_ids: list[int] | UnsetType,
    ) -> CompletionChoice:
        return CompletionChoice(
            index=prompt * run.generation.n + sample,
            text=echo + output.text,
            logprobs=logprobs,
            finish_reason=FINISH[output.reason],
            stop_reason=output.stop,
            token_ids=output.rows.token_ids.tolist() if run.generation.return_token_ids else UNSET,
            prompt_logprobs=of_prompt,
            prompt_token_ids=prompt_ids,
            packed_logprobs=packed_tokens(run, output.rows),
            weight_versions=weight_versions(self.service, run, output.rows),
        )

    def prompt_token_ids(self, run: Run, prompt: int) -> list[int] | UnsetType:
        return run.prompts[prompt].tolist() if run.generation.return_token_ids else UNSET

    def sample_logprobs(self, run: Run, samples: Sequence[Output], echo: Echo) -> Sequence[Raw | None]:
        """The log-probs of each sample of a prompt, an echoed prompt's before them."""
        if not wants_json_logprobs(run.generation):
            return [None] * len(samples)
        text, of_echo = echo
        lengths = self.service.token_lengths[run.generation.skip_special_tokens]
        logprobs: list[Raw] = []
        for each in (output.rows for output in samples):
            ids = each.token_ids.tolist()
            own = self.logprobs(run, ids, each.list_scores(), sample_offsets(lengths, ids, len(text)))
            # As JSON at once: what the JSON of all samples is made of would take several times its memory.
            logprobs.append(Raw(ENCODER.encode(own)) if of_echo is None else concatenated(of_echo, own))
        return logprobs

    def first(self, run: Run, prompt: int, sample: int) -> Completion | None:
        if not run.generation.echo:
            return None
        text, lists = self.echo(run, prompt)
        logprobs = None if lists is None else concatenated(lists, None)
        choice = CompletionChoice(index=prompt * run.generation.n + sample, text=text, logprobs=logprobs)
        return self.completion([choice], self.no_usage(run))

    def with_prompt(self, chunk: Completion, run: Run, prompt: int) -> Completion:
        (choice,) = chunk.choices
        return replace(chunk, choices=[replace(choice, prompt_token_ids=self.prompt_token_ids(run, prompt))])

    def chunks(
        self, run: Run, prompt: int, sample: int, piece: Piece, reason: Reason, stop: str | int | None
    ) -> list[Completion]:
        token_ids, logprobs = piece.rows.token_ids.tolist(), None
        if wants_json_logprobs(run.generation):
            logprobs = self.chunk_logprobs(run, prompt, token_ids, piece.rows.list_scores(), piece.offsets)
        choice = CompletionChoice(
            index=prompt * run.generation.n + sample,
            text=piece.text,
            logprobs=logprobs,
            finish_reason=FINISH[reason],
            stop_reason=stop,
            token_ids=token_ids if run.generation.return_token_ids else UNSET,
            packed_logprobs=packed_tokens(run, piece.rows),
            weight_versions=weight_versions(self.service, run, piece.rows, piece.first),
        )
        return [self.completion([choice], self.no_usage(run))]

    def chunk_logprobs(
        self, run: Run, prompt: int, token_ids: list[int], scores: list[Score], offsets: list[int]
    ) -> CompletionLogprobs | None:
        if not wants_json_logprobs(run.generation):
            return None
        if run.generation.echo:
            offsets = [len(self.echoed[prompt]) + offset for offset in offsets]
        return self.logprobs(run, token_ids, scores, offsets)

    def last(self, usage: Usage) -> Completion:
        return self.completion([], usage)

    def completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        header = self.header
        return Completion(id=header.id, created=header.created, model=header.model, choices=choices, usage=usage)

    def no_usage(self, run: Run) -> UnsetType | None:
        """Chunks before the last say null when the usage is to come."""
        return None if run.generation.include_usage else UNSET

    def logprobs(self, run: Run, token_ids: list[int], scores: list[Score], offsets: list[int]) -> CompletionLogprobs:
        return legacy_logprobs(self.names(run), token_ids, scores, offsets, run.generation.sampling.num_logprobs)

    def names(self, run: Run) -> TokenNames:
        return self.service.token_names[run.generation.name_token_ids]

    def echo(self, run: Run, prompt: int) -> Echo:
        """What an echo puts before the completion: the prompt, with its log-probs where the request wants some."""
        if not run.generation.echo:
            return NO_ECHO
        if prompt not in self.echoes:
            self.echoes[prompt] = self.made_echo(run, prompt)
        return self.echoes[prompt]

    def made_echo(self, run: Run, prompt: int) -> Echo:
        text, num_top = self.echoed[prompt], run.generation.sampling.num_logprobs
        prefilled = run.prefilled(prompt)
        if prefilled is None or not wants_json_logprobs(run.generation):
            return text, None
        ids = run.prompts[prompt].tolist()
        offsets = text_offsets(self.service.tokenizer, ids, run.generation.skip_special_tokens, False)
        rows = self.prompt_rows(run, prompt, prefilled)
        return text, json_lists(echoed_logprobs(self.names(run), ids[0], rows, offsets, num_top))

    def prompt_logprobs(self, run: Run, prompt: int) -> Raw | UnsetType | None:
        """As JSON: all choices of a prompt have the same. None if the prompt was not computed."""
        num_top = run.generation.num_prompt_logprobs
        if num_top < 0 or run.generation.pack_columns:
            return UNSET
        prefilled = run.prefilled(prompt)
        if prefilled is None:
            return None
        rows, ranks = self.prompt_rows(run, prompt, prefilled), as_i32(prefilled.ranks)
        return Raw(ENCODER.encode(prompt_logprobs(self.service.tokenizer, rows, ranks, num_top)))

    def prompt_rows(self, run: Run, prompt: int, prefilled: Prefilled) -> TokenRows:
        return prompt_rows(run.prompts[prompt], prefilled, run.generation.sampling.num_prompt_logprobs)
