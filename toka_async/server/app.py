"""The web application: what is around its routes, and the threads that the handlers' text work runs in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from toka_async import __version__
from toka_async.batches.store import Store
from toka_async.checkpoint.generation import GenerationDefaults
from toka_async.config import Config
from toka_async.openai.generation import KINDS
from toka_async.server.access.access_log import AccessLog
from toka_async.server.access.errors import CLOSED, add_headers, answer_errors
from toka_async.server.access.guard import GUARD, OPEN, Guard, add_cors_headers, check_sender
from toka_async.server.access.keys import Keys
from toka_async.server.access.origins import read_origins
from toka_async.server.batch.batch_service import BatchService
from toka_async.server.engine.engine import Engine
from toka_async.server.engine.facts import facts_of
from toka_async.server.engine.load import show_load
from toka_async.server.engine.status import StatusLine
from toka_async.server.engine.vllm_metrics import VllmCollector
from toka_async.server.generate.service import Service, make_defaults
from toka_async.server.http import files
from toka_async.server.http.receive import RECEIVING, give_room_back, make_receiving, show_bodies
from toka_async.server.http.respond import ROUNDS, SERVICE
from toka_async.server.http.rounds import Rounds
from toka_async.server.http.routes import add_routes
from toka_async.server.http.unsent import UNSENT, count_answers, create_unsent
from toka_async.server.limits.accounts import Accounts
from toka_async.server.page.page import open_page, page_paths, page_routes
from toka_async.server.sglang import routes as sglang
from toka_async.server.sglang.weights import NAP, OPEN_UPDATE, Nap, OpenUpdate
from toka_async.server.vllm import routes as vllm
from toka_async.server.vllm.info import FACTS
from toka_async.text.chat import ChatTemplate
from toka_async.text.template_file import find_response_format
from toka_async.text.tokenizer import Tokenizer

NUM_THREADS = 2  # for text; they hold the interpreter's lock much of the time


def create_app(
    config: Config,
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
    app = web.Application(client_max_size=config.limits.max_body_mb << 20)
    AccessLog(engine.metrics, config.log.requests).install(app)
    app.middlewares.extend([count_answers, answer_errors, check_sender, give_room_back])
    show_load(engine)
    engine.metrics.show_server(model_name=served_name, version=__version__)
    if config.server.vllm_metrics:
        engine.metrics.aliases.register(VllmCollector(engine, served_name))
    service = app[SERVICE] = create_service(config, served_name, tokenizer, chat_template, defaults, engine)
    app[ROUNDS] = Rounds()
    app[RECEIVING] = make_receiving(config.limits, service.executor)
    show_bodies(app[RECEIVING].bodies, engine.metrics)
    unsent = app[UNSENT] = create_unsent(config.limits)
    unsent.show(engine.metrics)
    page = page_routes() if config.server.page else {}
    open_paths = OPEN | page_paths(page) | ({"/metrics"} if config.auth.open_metrics else set())
    of_admins = vllm.ADMIN_ROUTES | sglang.ADMIN_ROUTES
    admin_paths = frozenset(path for _, path in of_admins)
    app[OPEN_UPDATE], app[NAP] = OpenUpdate(), Nap()
    app[FACTS], app[CLOSED] = facts_of(config), frozenset() if config.server.admin else admin_paths
    origins = read_origins(config.auth, config.server.host)
    guard = app[GUARD] = Guard(keys, service.accounts, open_paths, origins, admin_paths)
    batches = app[files.BATCHES] = (
        None if store is None else BatchService(store, service, config.batches, guard.open_owner_account)
    )
    app.on_response_prepare.extend([add_headers, add_cors_headers])
    add_routes(app, vllm.ROUTES | sglang.ROUTES | page | (of_admins if config.server.admin else {}))
    if page:
        open_page(app)

    async def text_threads(_app: web.Application) -> AsyncIterator[None]:
        yield
        service.executor.shutdown(wait=False, cancel_futures=True)
        service.grammars.close()

    async def status_line(_app: web.Application) -> AsyncIterator[None]:
        status = StatusLine(engine, config.log.stats_interval)
        engine.on_busy.append(status.start)
        yield
        status.stop()

    async def unsent_answers(_app: web.Application) -> AsyncIterator[None]:
        yield
        unsent.stop()

    async def batch_work(_app: web.Application) -> AsyncIterator[None]:
        assert batches is not None
        await batches.start()
        yield
        await batches.stop()

    app.cleanup_ctx.extend([text_threads, status_line, unsent_answers, *([] if batches is None else [batch_work])])
    return app


def create_service(
    config: Config,
    served_name: str,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    defaults: GenerationDefaults,
    engine: Engine,
) -> Service:
    """Creates the service that answers all requests, over HTTP or not."""
    executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")
    return Service(
        config.limits,
        served_name,
        tokenizer,
        chat_template,
        make_defaults(defaults, tokenizer, KINDS[config.model.logprobs_mode]),
        engine,
        executor,
        Accounts(config.limits, config.auth),
        logs_prompts=config.log.prompts,
        response_format=find_response_format(config.model, tokenizer, chat_template),
    )
