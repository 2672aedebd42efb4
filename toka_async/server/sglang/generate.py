"""POST /generate: the requests that its body asks for, and their answer."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from time import monotonic

from aiohttp import web
from msgspec.structs import replace as replace_sampling

from toka_async.messages import LogprobKind
from toka_async.openai.answer_size import answer_bytes
from toka_async.openai.errors import ApiError, bad_request
from toka_async.openai.generation import Defaults, GenerationParams, RequestLimits, build_generation, count_logprobs
from toka_async.openai.prompts import Prompt, count_work
from toka_async.openai.requests import GenerationFields
from toka_async.server.access.guard import account_of
from toka_async.server.generate.batching import MANY_IDS
from toka_async.server.generate.completions import check_counts
from toka_async.server.generate.events import ENCODER
from toka_async.server.generate.service import Output, PreparedRequest, Run, Service
from toka_async.server.generate.thinking import BUDGET
from toka_async.server.http.receive import give_back_room, read_request
from toka_async.server.http.respond import SERVICE, respond
from toka_async.server.limits.account import Account, Cost
from toka_async.server.sglang.answer import SglangAnswer
from toka_async.server.sglang.prompts import Part, Wish, divide, is_single, name_prompts, parse_inputs
from toka_async.server.sglang.requests import SglangRequest, SglangSampling
from toka_async.server.sglang.responses import SglangSample

Prepared = tuple[Part, PreparedRequest]
# Fields that the sampling parameters have under other names than the rest of the server.
NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
    BUDGET: "custom_params.thinking_budget",
}
_RENAMED = re.compile(rf"\b({'|'.join(NAMES)})\b")


async def generate(request: web.Request) -> web.StreamResponse:
    """Answers one prompt or many. Prompts that want different things are requests of their own to the engine."""
    service, began = request.app[SERVICE], monotonic()
    wire = await read_request(request, SglangRequest)
    parts, names = await prepare_parts(service, wire)
    is_one = is_single(wire) and parts[0][0].wish.sampling.n == 1
    shape = partial(
        SglangAnswer,
        service,
        began,
        is_one=is_one,
        has_texts=wire.return_text_in_logprobs,
        has_prompts=wire.return_prompt_token_ids,
    )
    answers = [shape(part.wish, [names[place] for place in part.places]) for part, _ in parts]
    places = [place for part, _ in parts for place in part.places]
    del wire  # while the requests run, nobody needs what their body was parsed to
    async with running_all(service, [prepared for _, prepared in parts], account_of(request)) as runs:
        if len(runs) == 1:
            return await respond(request, runs[0], answers[0])
        give_back_room(request)
        outputs = [await service.outputs(run) for run in runs]
        encode = partial(encode_parts, runs, answers, outputs)
        body = await service.in_thread(encode, places, is_long=True)
        return web.Response(body=body, content_type="application/json")


async def prepare_parts(service: Service, wire: SglangRequest) -> tuple[list[Prepared], list[str]]:
    """Requests to submit, and the names of all prompts.

    Raises:
        ApiError: it cannot be answered. NotServingError: nothing can now.
    """
    ready = service.engine.check_serving()
    param = "input_ids" if wire.text is None else "text"
    given = await service.in_thread(parse_inputs, wire, is_long=count_work(wire.input_ids or []) > MANY_IDS)
    parts = divide(wire, len(given))
    if len(parts) > 1 and wire.stream:
        raise bad_request("prompts of a stream must all want the same: give no lists of fields", param="stream")
    where = "sampling_params" if isinstance(wire.sampling_params, SglangSampling) else "sampling_params[{}]"
    with renamed(where.format(0)):
        check_counts(len(given), parts[0].wish.sampling.n, service.config, param)
    names = name_prompts(wire.rid, len(given), is_one=is_single(wire))
    of_all: dict[str, int | None] = {wire.rid: None} if isinstance(wire.rid, str) else {}
    prepared, num_bytes = [], 0
    for part in parts:
        own = where.format(part.places[0])
        with renamed(own):
            generation = sglang_generation(wire, part.wish, service.limits_of(ready), service.defaults)
            limits = service.limits_of(ready, generation.n)
            chosen: list[Prompt] = [given[place] for place in part.places]
            prompts = await service.encode(chosen, True, param, generation, limits)
            if min(map(len, prompts)) < part.wish.start:
                raise bad_request("'logprob_start_len' is above the prompt's length", param="logprob_start_len")
            keys = {names[place]: key for key, place in enumerate(part.places)}
            made = await service.prepare(generation, prompts, param, limits, names=keys | of_all)
        # What is found of its grammar once it runs names the field as it is here.
        generation = replace(made.generation, grammar_param=rename_field(made.generation.grammar_param, own))
        made = replace(made, generation=generation)
        num_bytes += answer_bytes(generation, sum(map(len, prompts)), generation.n * sum(made.budgets), 0)
        prepared.append((part, made))
    check_bytes(num_bytes, service.config.max_answer_mb)
    return prepared, names


@contextmanager
def renamed(where: str) -> Iterator[None]:
    """Gives errors the names that fields have here. where: of the sampling parameters that count."""
    try:
        yield
    except ApiError as error:
        if error.param is None:
            raise
        param = rename_field(error.param, where)
        message = error.message.replace(f"'{error.param}'", f"'{param}'")
        message = message if param == error.param else _RENAMED.sub(lambda found: NAMES[found[0]], message)
        logged = error.logged if error.logged != error.message else None
        raise ApiError(
            error.status, message, param=param, code=error.code, retry_after=error.retry_after, logged=logged
        ) from None


def rename_field(param: str, where: str) -> str:
    """The name that a field of the server, or a part of it, has here."""
    name = NAMES.get(param, param)
    return f"{where}.{name}" if re.split(r"[.\[]", name)[0] in SglangSampling.__struct_fields__ else param


def check_bytes(num_bytes: int, max_mb: int) -> None:
    """Raises ApiError (400) when the answers of all parts together could be too large."""
    if num_bytes > max_mb << 20:
        raise bad_request(
            f"the answer could have {num_bytes >> 20} MiB of log-probs; limits.max_answer_mb is {max_mb}. Send fewer "
            "prompts in a request",
            param="sampling_params",
            code="answer_too_large",
        )


def sglang_generation(wire: SglangRequest, wish: Wish, limits: RequestLimits, own: Defaults) -> GenerationParams:
    """Raises ApiError (400), which names the field. Defaults are SGLang's; only the end tokens are the model's."""
    sampling = wish.sampling
    fields = GenerationFields(
        n=sampling.n,
        min_tokens=sampling.min_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        seed=sampling.sampling_seed,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        include_stop_str_in_output=sampling.no_stop_trim,
        ignore_eos=sampling.ignore_eos,
        skip_special_tokens=sampling.skip_special_tokens,
        json_schema=sampling.json_schema or None,
        regex=sampling.regex or None,
        ebnf=sampling.ebnf or None,
        structural_tag=sampling.structural_tag or None,
        thinking_token_budget=sampling.custom_params.thinking_budget,
        stream=wire.stream,
        return_token_ids=True,
        return_weight_versions=True,
        priority=-wire.priority,  # SGLang's higher ones come first
        cache_salt="\0".join(filter(None, (wire.cache_salt, wire.extra_key))) or None,
    )
    num_top = count_logprobs(wish.num_top, limits, "top_logprobs_num")
    num_logprobs = num_top if wish.logprobs else -1
    of_prompt = num_top if wish.start >= 0 else -1
    # SGLang's log-probs of samples are those at their temperature; those of prompts are the model's.
    defaults = Defaults(end_ids=own.end_ids, special_tokens=own.special_tokens, logprob_kind=LogprobKind.TEMPERATURE)
    made = build_generation(fields, limits, defaults, sampling.max_new_tokens, num_logprobs, of_prompt, False)
    made = replace(made, sampling=replace_sampling(made.sampling, prompt_temperature=1.0))
    repeats_prompt = of_prompt >= 0 or wire.return_prompt_token_ids
    return replace(made, num_prompt_logprobs=of_prompt, num_prompt_copies=made.n if repeats_prompt else 1)


@asynccontextmanager
async def running_all(service: Service, parts: Sequence[PreparedRequest], account: Account) -> AsyncIterator[list[Run]]:
    """Waits for room for all requests together, and submits them. Raises as `Service.running` does."""
    cost = Cost(*map(sum, zip(*(each.cost for each in parts), strict=True)))
    async with service.holding(account, cost) as waited, AsyncExitStack() as stack:
        yield [await stack.enter_async_context(service.submitted(each, account, waited)) for each in parts]


def encode_parts(
    runs: Sequence[Run],
    answers: Sequence[SglangAnswer],
    outputs: Sequence[list[list[Output]]],
    places: Sequence[int],
) -> bytes:
    """The samples of all requests, in the order of the prompts; `places` are those of the requests' prompts."""
    by_prompt: dict[int, list[SglangSample]] = {}
    left = iter(places)
    for run, answer, of_run in zip(runs, answers, outputs, strict=True):
        for samples in answer.by_prompt(run, of_run):
            by_prompt[next(left)] = samples
    return ENCODER.encode([sample for place in sorted(by_prompt) for sample in by_prompt[place]])
