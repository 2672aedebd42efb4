"""The web application: routes to handlers, and the threads that the handlers' text work runs in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

from aiohttp import hdrs, web

from toka_async.batches.store import Store
from toka_async.config import ServerConfig
from toka_async.model.generation import GenerationDefaults
from toka_async.openai.errors import ApiError
from toka_async.server import batch_routes, files, info
from toka_async.server.batch_service import BatchService
from toka_async.server.chat import chat_completions
from toka_async.server.chat_batch import chat_batch
from toka_async.server.completions import completions
from toka_async.server.engine import Engine
from toka_async.server.errors import add_headers, error_response, json_errors
from toka_async.server.guard import GUARD, OPEN, Guard, check_keys
from toka_async.server.guard_metrics import GuardCollector
from toka_async.server.keys import Keys
from toka_async.server.load import show_load
from toka_async.server.observed import Observed
from toka_async.server.respond import SERVICE, check_length
from toka_async.server.service import Service, make_defaults
from toka_async.server.status import StatusLine
from toka_async.text.chat import ChatTemplate
from toka_async.text.tokenizer import Tokenizer

NUM_THREADS = 2  # for text; they hold the interpreter's lock much of the time


def create_app(
    config: ServerConfig,
    served_name: str,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    defaults: GenerationDefaults,
    engine: Engine,
    store: Store | None = None,
    keys: Callable[[], Keys] = Keys,
) -> web.Application:
    """The app; it answers 503 until the engine is ready, so it may listen before. `store`: of files and batches.

    keys: those that are accepted now.
    """
    app = web.Application(client_max_size=config.max_body_mb << 20)
    Observed(engine.metrics, config.log_requests).install(app)
    app.middlewares.extend([json_errors, check_keys])
    show_load(engine)
    service = app[SERVICE] = create_service(config, served_name, tokenizer, chat_template, defaults, engine)
    guard = app[GUARD] = Guard(keys, service.accounts, OPEN | ({"/metrics"} if config.open_metrics else set()))
    batches = app[files.BATCHES] = None if store is None else BatchService(store, service, guard.owner_account)
    engine.metrics.registry.register(GuardCollector(guard))
    app.on_response_prepare.append(add_headers)
    add_routes(app)

    async def text_threads(_app: web.Application) -> AsyncIterator[None]:
        yield
        service.executor.shutdown(wait=False, cancel_futures=True)

    async def status_line(_app: web.Application) -> AsyncIterator[None]:
        status = StatusLine(engine, config.stats_interval)
        engine.on_busy = status.start
        yield
        status.stop()

    async def batch_work(_app: web.Application) -> AsyncIterator[None]:
        assert batches is not None
        await batches.start()
        yield
        await batches.stop()

    app.cleanup_ctx.extend([text_threads, status_line, *([] if batches is None else [batch_work])])
    return app


def create_service(
    config: ServerConfig,
    served_name: str,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    defaults: GenerationDefaults,
    engine: Engine,
) -> Service:
    """What answers requests, whoever asks."""
    executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")
    ends = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return Service(config, served_name, tokenizer, chat_template, make_defaults(defaults, ends), engine, executor)


def add_routes(app: web.Application) -> None:
    router = app.router
    router.add_post("/v1/completions", completions, expect_handler=expect)
    router.add_post("/v1/chat/completions", chat_completions, expect_handler=expect)
    router.add_post("/v1/chat/completions/batch", chat_batch, expect_handler=expect)
    router.add_post("/v1/files", files.create_file, expect_handler=expect_upload)
    router.add_get("/v1/files", files.list_files)
    router.add_get("/v1/files/{file}", files.get_file)
    router.add_get("/v1/files/{file}/content", files.get_content)
    router.add_delete("/v1/files/{file}", files.delete_file)
    router.add_post("/v1/batches", batch_routes.create_batch, expect_handler=expect)
    router.add_get("/v1/batches", batch_routes.list_batches)
    router.add_get("/v1/batches/{batch}", batch_routes.get_batch)
    router.add_post("/v1/batches/{batch}/cancel", batch_routes.cancel_batch)
    router.add_post("/tokenize", info.tokenize, expect_handler=expect)
    router.add_post("/detokenize", info.detokenize, expect_handler=expect)
    router.add_get("/v1/models", info.models)
    router.add_get("/v1/models/{model:.+}", info.model)
    router.add_get("/health", info.health)
    router.add_get("/ping", info.ping)
    router.add_get("/load", info.load)
    router.add_get("/version", info.version)
    router.add_get("/metrics", info.metrics)


async def expect(request: web.Request) -> web.StreamResponse | None:
    """Tells a client that asks first (curl does) whether to send its body."""
    return await answer_expect(request, check_length)


async def expect_upload(request: web.Request) -> web.StreamResponse | None:
    """The same of a file."""
    return await answer_expect(request, files.check_upload)


async def answer_expect(request: web.Request, check: Callable[[web.Request], None]) -> web.StreamResponse | None:
    if request.headers.get(hdrs.EXPECT, "").lower() != "100-continue":
        return error_response(ApiError(417, "the only expectation that is met is 100-continue"))
    try:
        request.app[GUARD].key(request)
        check(request)
    except ApiError as error:
        return error_response(error)
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # what aiohttp's own handler does: nothing of the response is sent yet
    return None
