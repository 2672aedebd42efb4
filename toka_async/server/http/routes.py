"""All routes: the handler of each, and its description for the document. Every route is described."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from aiohttp import hdrs, web

from toka_async.openai.batches import (
    BatchDeleted,
    BatchList,
    BatchObject,
    CreateBatch,
    FileDeleted,
    FileList,
    FileObject,
)
from toka_async.openai.errors import ApiError
from toka_async.openai.parse import prepare_parsing
from toka_async.openai.requests import (
    ChatBatchRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from toka_async.openai.responses import (
    ChatChunk,
    ChatCompletion,
    Completion,
    DetokenizeResponse,
    Health,
    Model,
    ModelList,
    TokenizeResponse,
    Version,
)
from toka_async.server.access.errors import Handler, make_error_response
from toka_async.server.access.guard import GUARD, note_sender
from toka_async.server.engine.load import ServerLoad
from toka_async.server.http import batch_routes, files, info
from toka_async.server.http.completions import chat_batch, chat_completions, completions, create_response
from toka_async.server.http.document import JSON, Facts, Operation, build_document
from toka_async.server.http.receive import check_length
from toka_async.server.http.respond import SERVICE
from toka_async.server.responses.objects import EVENTS, ResponseObject
from toka_async.server.responses.requests import ResponsesRequest

OF_GENERATION = (404, 429, 504)  # another model; a limit is reached; limits.request_timeout
OF_FILES = (404,)  # no such file or batch, or no server.data_dir


Routes = dict[tuple[str, str], tuple[Handler, Operation]]


@dataclass(slots=True)
class DocumentCache:
    """The document, made at its first request. routes: the described routes. facts: what it was made from."""

    routes: Routes
    facts: Facts | None = None
    encoded: bytes = b""


DOCUMENT_CACHE: web.AppKey[DocumentCache] = web.AppKey("document_cache", DocumentCache)


async def openapi(request: web.Request) -> web.Response:
    """Answers 503 until the engine is ready, because the bounds of fields depend on the model."""
    service, guard, cache = request.app[SERVICE], request.app[GUARD], request.app[DOCUMENT_CACHE]
    has_keys = bool(guard.source())
    facts = Facts(model=service.name, limits=service.limits(), has_keys=has_keys, open_paths=guard.open_paths)
    if facts != cache.facts:
        operations = {place: operation for place, (_, operation) in cache.routes.items()}
        cache.encoded, cache.facts = msgspec.json.encode(build_document(operations, facts)), facts
    return web.Response(body=cache.encoded, content_type=JSON)


ROUTES: Routes = {
    ("POST", "/v1/completions"): (
        completions,
        Operation(
            name="createCompletion",
            summary="Samples that go on with one or many prompts",
            body=CompletionRequest,
            answer=Completion,
            event=(Completion,),
            statuses=OF_GENERATION,
        ),
    ),
    ("POST", "/v1/chat/completions"): (
        chat_completions,
        Operation(
            name="createChatCompletion",
            summary="Samples of the answer in a conversation",
            body=ChatRequest,
            answer=ChatCompletion,
            event=(ChatChunk,),
            statuses=OF_GENERATION,
        ),
    ),
    ("POST", "/v1/chat/completions/batch"): (
        chat_batch,
        Operation(
            name="createChatCompletions",
            summary="Samples of the answers in many conversations: choices in their order, n of each",
            body=ChatBatchRequest,
            answer=ChatCompletion,
            statuses=OF_GENERATION,
        ),
    ),
    ("POST", "/v1/responses"): (
        create_response,
        Operation(
            name="createResponse",
            summary="The answer in a conversation, as items; nothing is stored",
            body=ResponsesRequest,
            answer=ResponseObject,
            event=EVENTS,
            statuses=OF_GENERATION,
        ),
    ),
    ("POST", "/v1/files"): (
        files.create_file,
        Operation(
            name="createFile",
            summary="Upload the input of a batch",
            form=files.FORM,
            answer=FileObject,
            statuses=(*OF_FILES, 507),
        ),
    ),
    ("GET", "/v1/files"): (
        files.list_files,
        Operation(
            name="listFiles", summary="Files, a page", query=files.LIST_QUERY, answer=FileList, statuses=OF_FILES
        ),
    ),
    ("GET", "/v1/files/{file}"): (
        files.get_file,
        Operation(name="getFile", summary="What is known of a file", answer=FileObject, statuses=OF_FILES),
    ),
    ("GET", "/v1/files/{file}/content"): (
        files.get_content,
        Operation(
            name="getFileContent",
            summary="A file's bytes, or a range of them",
            answer="application/octet-stream",
            statuses=OF_FILES,
            empty=(206, 304, 412, 416),
        ),
    ),
    ("DELETE", "/v1/files/{file}"): (
        files.delete_file,
        Operation(name="deleteFile", summary="Delete a file", answer=FileDeleted, statuses=(*OF_FILES, 409, 507)),
    ),
    ("POST", "/v1/batches"): (
        batch_routes.create_batch,
        Operation(
            name="createBatch",
            summary="Run the requests in a file",
            body=CreateBatch,
            answer=BatchObject,
            statuses=(*OF_FILES, 507),
        ),
    ),
    ("GET", "/v1/batches"): (
        batch_routes.list_batches,
        Operation(
            name="listBatches",
            summary="Batches, a page, the newest first",
            query=batch_routes.LIST_QUERY,
            answer=BatchList,
            statuses=OF_FILES,
        ),
    ),
    ("GET", "/v1/batches/{batch}"): (
        batch_routes.get_batch,
        Operation(name="getBatch", summary="How far a batch is", answer=BatchObject, statuses=OF_FILES),
    ),
    ("DELETE", "/v1/batches/{batch}"): (
        batch_routes.delete_batch,
        Operation(
            name="deleteBatch",
            summary="Forget a batch that has ended",
            answer=BatchDeleted,
            statuses=(*OF_FILES, 409, 507),
        ),
    ),
    ("POST", "/v1/batches/{batch}/cancel"): (
        batch_routes.cancel_batch,
        Operation(name="cancelBatch", summary="Cancel a batch", answer=BatchObject, statuses=(*OF_FILES, 507)),
    ),
    ("POST", "/tokenize"): (
        info.tokenize,
        Operation(
            name="tokenize",
            summary="Token ids of a prompt or of a conversation",
            body=TokenizeRequest,
            answer=TokenizeResponse,
            statuses=(404,),
        ),
    ),
    ("POST", "/detokenize"): (
        info.detokenize,
        Operation(
            name="detokenize",
            summary="The text of token ids",
            body=DetokenizeRequest,
            answer=DetokenizeResponse,
            statuses=(404,),
        ),
    ),
    ("GET", "/v1/models"): (
        info.models,
        Operation(name="listModels", summary="The served model, in a list", answer=ModelList),
    ),
    ("GET", "/v1/models/{model:.+}"): (
        info.model,
        Operation(
            name="getModel", summary="The served model, whose name may have slashes", answer=Model, statuses=(404,)
        ),
    ),
    ("GET", "/health"): (
        info.health,
        Operation(name="health", summary="503 unless requests are taken and every process answers", answer=Health),
    ),
    ("GET", "/ping"): (info.ping, Operation(name="ping", summary="The server's process answers", answer=Health)),
    ("GET", "/load"): (info.load, Operation(name="load", summary="How busy the server is", answer=ServerLoad)),
    ("GET", "/version"): (info.version, Operation(name="version", summary="The server's version", answer=Version)),
    ("GET", "/metrics"): (
        info.metrics,
        Operation(name="metrics", summary="Metrics, in Prometheus' format", answer="text/plain"),
    ),
    ("GET", "/openapi.json"): (
        openapi,
        Operation(name="openapi", summary="This document; 503 until the engine is ready", answer=JSON),
    ),
}


def add_routes(app: web.Application, more: Routes) -> None:
    """Adds the routes that every server has, and `more`."""
    app[DOCUMENT_CACHE] = DocumentCache(ROUTES | more)
    for (method, path), (handler, operation) in app[DOCUMENT_CACHE].routes.items():
        asked = expect if operation.form is None else expect_upload
        if operation.body is not None:
            prepare_parsing(operation.body)
        if method == "GET":
            app.router.add_get(path, handler, expect_handler=asked)  # adds HEAD too
        else:
            app.router.add_route(method, path, handler, expect_handler=asked)


async def expect(request: web.Request) -> web.StreamResponse | None:
    """Tells a client that asks first (curl does) whether to send its body."""
    return await answer_expect(request, check_length)


async def expect_upload(request: web.Request) -> web.StreamResponse | None:
    """Tells a client that asks first whether to send its file."""
    return await answer_expect(request, files.check_upload)


async def answer_expect(request: web.Request, check: Callable[[web.Request], None]) -> web.StreamResponse | None:
    if request.headers.get(hdrs.EXPECT, "").lower() != "100-continue":
        return make_error_response(ApiError(417, "the only expectation that is met is 100-continue"))
    try:
        note_sender(request)
        check(request)
    except ApiError as error:
        return make_error_response(error)
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # like aiohttp's own handler: nothing of the response is sent yet
    return None
