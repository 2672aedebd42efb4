"""The small routes: models, health, version, metrics, /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np
from aiohttp import web
from msgspec import UNSET
from prometheus_client import CONTENT_TYPE_LATEST

import toka_async
from toka_async.arrays import Int32
from toka_async.openai.errors import bad_request, model_not_found
from toka_async.openai.prompts import check_vocabulary, parse_token_ids
from toka_async.openai.requests import DetokenizeRequest, TokenizeRequest
from toka_async.openai.responses import DetokenizeResponse, Health, Model, ModelList, TokenizeResponse, Version
from toka_async.openai.tools import show_tools
from toka_async.server.access.guard import GUARD
from toka_async.server.access.guard_metrics import format_account_metrics
from toka_async.server.engine.load import load_of
from toka_async.server.generate.chat import wire_chat
from toka_async.server.generate.events import ENCODER
from toka_async.server.generate.service import Service
from toka_async.server.http.receive import read_request
from toka_async.server.http.respond import SERVICE, json_response
from toka_async.text.detokenize import Detokenizer
from toka_async.text.tokenizer import Tokenizer

MANY = 4096  # more tokens than this take milliseconds, so a thread works on them
PART = 1 << 14  # tokens of one part of a long text


async def models(request: web.Request) -> web.Response:
    return json_response(ModelList(data=[served_model(request.app[SERVICE])]))


async def model(request: web.Request) -> web.Response:
    """Returns the model; its name may contain slashes."""
    service, name = request.app[SERVICE], request.match_info["model"]
    if name != service.name:
        raise model_not_found(name, service.name)
    return json_response(served_model(service))


def served_model(service: Service) -> Model:
    """Raises a 503 until the engine is ready: clients wait for this route to answer."""
    limits = service.limits()
    return Model(
        id=service.name,
        created=service.created,
        root=service.name,
        max_model_len=limits.max_context,
        vocab_size=limits.vocab_size,
    )


async def health(request: web.Request) -> web.Response:
    """Answers 200 when requests are taken and every replica is there, else 503."""
    request.app[SERVICE].engine.check_whole()
    return json_response(Health())


async def ping(_request: web.Request) -> web.Response:
    """Answers 200 while the process runs, whatever the engine does."""
    return json_response(Health())


async def load(request: web.Request) -> web.Response:
    """Returns how busy the server is, for routers and autoscalers; costs less than /metrics."""
    engine = request.app[SERVICE].engine
    await engine.replicas.refresh()
    return json_response(load_of(engine))


async def version(_request: web.Request) -> web.Response:
    return json_response(Version(toka_async.__version__))


async def metrics(request: web.Request) -> web.Response:
    """Returns Prometheus' text: fresh counts of the schedulers, and the accounts that the request's key may see."""
    guard, engine = request.app[GUARD], request.app[SERVICE].engine
    await engine.replicas.refresh()
    text = engine.metrics.text() + format_account_metrics(guard, guard.list_shown_owners(request))
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def tokenize(request: web.Request) -> web.Response:
    """Tokenizes a prompt, with the special tokens that completions add, or messages, as chat does."""
    service = request.app[SERVICE]
    wire = await read_request(request, TokenizeRequest)
    service.check_model(wire.model)
    if (wire.prompt is None) == (wire.messages is None):
        raise bad_request("give either 'prompt' or 'messages'", param="prompt")
    text = (
        wire.prompt
        if wire.prompt is not None
        else await service.render(wire_chat(service, wire, show_tools(wire.tools)))
    )
    special = wire.messages is None if wire.add_special_tokens is None else wire.add_special_tokens
    param = "prompt" if wire.messages is None else "messages"
    ids = await service.tokenize(text, special, param)
    made = partial(encode_tokens, service.tokenizer, service.limits().max_context, wire.return_token_strs)
    body = await service.in_thread(made, ids, is_long=ids.size > MANY)
    return web.Response(body=body, content_type="application/json")


def encode_tokens(tokenizer: Tokenizer, max_context: int, with_strs: bool, ids: Int32) -> bytes:
    """Builds the answer in a thread, since millions of ids would block the event loop for seconds."""
    tokens = ids.tolist()
    strs = [tokenizer.spelling(token_id) for token_id in tokens] if with_strs else UNSET
    answer = TokenizeResponse(tokens=tokens, count=len(tokens), max_model_len=max_context, token_strs=strs)
    return ENCODER.encode(answer)


async def detokenize(request: web.Request) -> web.Response:
    """Returns the text of token ids, special tokens included."""
    service = request.app[SERVICE]
    wire = await read_request(request, DetokenizeRequest)
    service.check_model(wire.model)
    vocab_size, max_mb = service.limits().vocab_size, service.config.max_body_mb
    made = partial(encode_text, service.tokenizer, vocab_size, max_mb)
    body = await service.in_thread(made, wire.tokens, is_long=len(wire.tokens) > MANY)
    return web.Response(body=body, content_type="application/json")


def encode_text(tokenizer: Tokenizer, vocab_size: int, max_mb: int, tokens: Sequence[int]) -> bytes:
    """Builds the answer in a thread, in parts, between which other threads run.

    Raises ApiError (400) for a text of more than `max_mb` MiB, among others.
    """
    ids = parse_token_ids(tokens) if tokens else np.zeros(0, np.int32)
    check_vocabulary(ids, vocab_size, "tokens")
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    parts: list[bytes] = []
    num_bytes = 0
    for start in range(0, ids.size, PART):
        parts.append(ENCODER.encode(detokenizer.push(ids[start : start + PART].tolist()))[1:-1])
        num_bytes += len(parts[-1])
        if num_bytes > max_mb << 20:
            raise bad_request(
                f"the text of 'tokens' has more than limits.max_body_mb ({max_mb} MiB); send fewer", param="tokens"
            )
    parts.append(ENCODER.encode(detokenizer.finish())[1:-1])
    return ENCODER.encode(DetokenizeResponse(msgspec.Raw(b'"%b"' % b"".join(parts))))
