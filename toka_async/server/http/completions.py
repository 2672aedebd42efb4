"""POST /v1/completions, /v1/chat/completions, /v1/chat/completions/batch and /v1/responses."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from toka_async.openai.errors import bad_request
from toka_async.openai.generation import chat_generation
from toka_async.openai.requests import ChatBatchRequest, ChatRequest, CompletionRequest
from toka_async.openai.tools import ToolUse, parse_tool_use
from toka_async.server.access.guard import account_of
from toka_async.server.generate.answers import new_header
from toka_async.server.generate.batching import SLICE
from toka_async.server.generate.chat import ChatAnswer, one_chat, prepare_chat, read_answers
from toka_async.server.generate.completions import check_counts, prepare_completion
from toka_async.server.generate.service import Chat, Service
from toka_async.server.http.receive import read_request
from toka_async.server.http.respond import SERVICE, respond, respond_whole, respond_with
from toka_async.server.responses.answer import prepare_response
from toka_async.server.responses.events import ResponseEvents
from toka_async.server.responses.requests import ResponsesRequest


async def completions(request: web.Request) -> web.StreamResponse:
    """Answer one completion request."""
    service = request.app[SERVICE]
    wire = read_request(request, CompletionRequest)
    prepared, answer = await prepare_completion(service, await wire)
    async with service.running(prepared, account_of(request)) as run:
        return await respond(request, run, answer)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer one chat."""
    service = request.app[SERVICE]
    wire = read_request(request, ChatRequest)
    prepared, answer = await prepare_chat(service, await wire)
    async with service.running(prepared, account_of(request)) as run:
        return await respond(request, run, answer)


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer one request for a response. Nothing of it is stored."""
    service = request.app[SERVICE]
    wire = read_request(request, ResponsesRequest)
    prepared, answer = await prepare_response(service, await wire)
    async with service.running(prepared, account_of(request)) as run:
        if run.generation.stream:
            return await respond_with(request, run, ResponseEvents(service, run, answer))
        return await respond_whole(request, run, answer)


async def chat_batch(request: web.Request) -> web.StreamResponse:
    """Answer many conversations together, with one choice for each conversation and sample, in order.

    The fields are those of a chat, except that `messages` is a list of conversations, as in vLLM.
    """
    service = request.app[SERVICE]
    wire = await read_request(request, ChatBatchRequest)
    service.check_model(wire.model)
    for name, is_given in (("stream", wire.stream), ("prompt_logprobs", wire.prompt_logprobs is not None)):
        if is_given:
            raise bad_request(f"'{name}' is not supported for many conversations", param=name)
    ready = service.engine.check_serving()
    generation = chat_generation(wire, service.limits_of(ready), service.defaults)
    limits = service.limits_of(ready, generation.n)
    check_counts(len(wire.messages), generation.n, service.config, "messages")
    tools = parse_tool_use(wire)
    make_chats = partial(conversations, service, tools)
    texts = await service.render_all(await service.in_thread(make_chats, wire, is_long=len(wire.messages) > SLICE))
    generation, reading = read_answers(service, wire, tools, generation, texts)
    prompts = await service.encode(texts, wire.add_special_tokens, "messages", generation, limits)
    prepared = await service.prepare(generation, prompts, "messages", limits)
    del wire, texts  # while the request runs, nobody needs what its body was parsed to
    answer = ChatAnswer(service, new_header("chatcmpl", service.name), reading, of_many=True)
    async with service.running(prepared, account_of(request)) as run:
        return await respond(request, run, answer)


def conversations(service: Service, tools: ToolUse, wire: ChatBatchRequest) -> list[Chat]:
    """Raises ApiError (400) that names the place."""
    if not wire.messages:
        raise bad_request("'messages' must not be empty", param="messages")
    chats = []
    for index, messages in enumerate(wire.messages):
        where = f"messages[{index}]"
        if not isinstance(messages, list):
            raise bad_request(f"'{where}' must be a list of messages: one conversation", param=where)
        chats.append(one_chat(service, wire, messages, where, tools.shown))
    return chats
