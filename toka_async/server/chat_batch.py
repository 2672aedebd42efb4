"""POST /v1/chat/completions/batch: many conversations in one request, answered together.

As vLLM has it: the fields of a chat, but that `messages` is a list of conversations; one choice a conversation and
sample, in order.
"""

from __future__ import annotations

from aiohttp import web

from toka_async.openai.errors import bad_request
from toka_async.openai.generation import chat_generation
from toka_async.openai.requests import ChatBatchRequest
from toka_async.server.answers import new_header
from toka_async.server.chat import ChatAnswer, one_chat
from toka_async.server.completions import check_counts
from toka_async.server.guard import account_of
from toka_async.server.receive import read_request
from toka_async.server.respond import SERVICE, respond
from toka_async.server.service import Chat
from toka_async.server.slices import SLICE


async def chat_batch(request: web.Request) -> web.StreamResponse:
    """Handles one request."""
    service = request.app[SERVICE]
    wire = await read_request(request, ChatBatchRequest)
    service.check_model(wire.model)
    for name, is_given in (("stream", wire.stream), ("prompt_logprobs", wire.prompt_logprobs is not None)):
        if is_given:
            raise bad_request(f"'{name}' is not supported for many conversations", param=name)
    generation = chat_generation(wire, service.limits(), service.defaults)
    check_counts(len(wire.messages), generation.n, service.config, "messages")
    texts = await service.render_all(await service.in_thread(conversations, wire, is_long=len(wire.messages) > SLICE))
    prompts = await service.encode(texts, wire.add_special_tokens, "messages", generation)
    del wire, texts  # while the request runs, nobody needs what its body was parsed to
    async with service.running(generation, prompts, "messages", account_of(request)) as run:
        return await respond(request, run, ChatAnswer(service, new_header("chatcmpl", service.name), of_many=True))


def conversations(wire: ChatBatchRequest) -> list[Chat]:
    """Raises ApiError (400) that names the place."""
    if not wire.messages:
        raise bad_request("'messages' must not be empty", param="messages")
    chats = []
    for index, messages in enumerate(wire.messages):
        where = f"messages[{index}]"
        if not isinstance(messages, list):
            raise bad_request(f"'{where}' must be a list of messages: one conversation", param=where)
        chats.append(one_chat(wire, messages, where))
    return chats
