"""The server process: one event loop with the HTTP application, connected to the schedulers and to the parent.

Listens before the engine is ready (requests are answered with 503 until then). Loads no torch; knows no routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import warnings
from pathlib import Path
from typing import NoReturn

import numpy.ma  # noqa: F401  `np.unique` loads it, which would delay the first request
import uvloop
from aiohttp import BadContentDispositionHeader, BadContentDispositionParam, web

from toka_async.batches.clock import SettledClock
from toka_async.batches.disk import StorageError
from toka_async.batches.store import Store
from toka_async.checkpoint.generation import GenerationDefaults, read_generation_defaults
from toka_async.checkpoint.spec import ModelError
from toka_async.config import ConfigError
from toka_async.listening import Delays, adopt_listener, max_connections
from toka_async.procs.child import ChildSpec, Drain, Drained, Fail, Order, ParentLink, Started
from toka_async.procs.direct import DirectServer
from toka_async.procs.engine_link import EngineLink
from toka_async.server.access.keys import KeySource
from toka_async.server.app import create_app
from toka_async.server.engine.engine import Engine
from toka_async.server.generate.service import Service
from toka_async.server.http.acceptor import Acceptor
from toka_async.server.http.connections import create_runner
from toka_async.server.http.respond import SERVICE
from toka_async.server.http.tls import tls_context
from toka_async.text.chat import ChatTemplate, ChatTemplateError
from toka_async.text.template_file import load_chat_template
from toka_async.text.tokenizer import Tokenizer
from toka_async.text.tokenizer_files import TokenizerError

logger = logging.getLogger(__name__)

GC_THRESHOLD = (700, 10, 200)  # the last is 10 by default; a full pass is slow with many prompts
FLUSH_TIMEOUT = 1.0  # seconds for answers to leave once there is nothing more to compute


def run(link: ParentLink) -> None:
    """Serve until the parent orders otherwise."""
    for kind in (BadContentDispositionHeader, BadContentDispositionParam):
        warnings.simplefilter("ignore", kind)  # they quote what clients send, and Python keeps each for ever
    gc.set_threshold(*GC_THRESHOLD)
    uvloop.run(serve(link))


async def serve(link: ParentLink) -> NoReturn:
    spec, schedulers = link.spec, EngineLink(link)
    engine = schedulers.engine
    try:
        app = build_app(spec, engine)
        tls = tls_context(spec.config.server)
    except (ConfigError, ModelError, TokenizerError, ChatTemplateError) as error:
        link.fatal(str(error), user=True)
    except StorageError as error:
        link.fatal(f"server.data_dir: {error}", user=True)
    runner = create_runner(app, spec.config.server.drain_timeout)
    await runner.setup()
    listener = adopt_listener(spec.listen_fd)
    limits = spec.config.limits
    site = Acceptor(runner, listener, max_connections(limits, spec.config.zmq), limits.client_timeout, tls)
    site.show(engine.metrics)
    await site.start()
    direct = open_direct(link, app[SERVICE])
    gc.collect()  # here it delays no request
    gc.freeze()
    schedulers.start(Delays(listener))
    app[SERVICE].grammars.start(spec.shape.vocab_size)  # holds Python's lock for a second, so not once it is ready
    order = asyncio.create_task(schedulers.orders.get())
    await asyncio.wait({asyncio.create_task(schedulers.is_ready.wait()), order}, return_when=asyncio.FIRST_COMPLETED)
    if schedulers.is_ready.is_set():
        link.report(Started(direct="" if direct is None else direct.endpoint.address))
    first = await order
    await site.stop()
    await finish(link, first, schedulers.orders, engine, runner, direct)


def open_direct(link: ParentLink, service: Service) -> DirectServer | None:
    """Open the endpoint of direct submission, if configured; ends the process when it cannot listen."""
    if not link.spec.config.zmq.bind:
        return None
    try:
        return DirectServer(link.spec.config.zmq, service, takes_commands=link.spec.config.server.admin)
    except ConfigError as error:
        link.fatal(str(error), user=True)


async def finish(
    link: ParentLink,
    order: Order,
    orders: asyncio.Queue[Order],
    engine: Engine,
    runner: web.AppRunner,
    direct: DirectServer | None,
) -> NoReturn:
    """Carry out the parent's last order (a Fail may follow a Drain), and end."""
    loop = asyncio.get_running_loop()
    deadline, num_cut = loop.time(), 0
    if isinstance(order, Drain):
        deadline += order.seconds
        engine.begin_drain()
        further = asyncio.create_task(orders.get())
        idle = asyncio.create_task(engine.wait_idle())
        await asyncio.wait({further, idle}, timeout=order.seconds, return_when=asyncio.FIRST_COMPLETED)
        num_cut = engine.num_requests
        order = further.result() if further.done() else order
    engine.fail_all(order.reason if isinstance(order, Fail) else "the server is shutting down")
    timeout = max(0.0, deadline - loop.time()) + FLUSH_TIMEOUT
    await asyncio.gather(close(runner, timeout), *([] if direct is None else [direct.close(FLUSH_TIMEOUT)]))
    if isinstance(order, Fail):
        link.exit(1)
    link.report(Drained(num_cut))
    link.exit()


async def close(runner: web.AppRunner, timeout: float) -> None:
    """Wait until the handlers have answered and their answers are sent, then close all connections."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            transports = [connection.transport for connection in runner.server.connections] if runner.server else []
            await runner.cleanup()
            while any(transport is not None and transport.get_write_buffer_size() for transport in transports):
                await asyncio.sleep(0.01)


def build_app(spec: ChildSpec, engine: Engine) -> web.Application:
    """Raises ConfigError, ModelError, TokenizerError, ChatTemplateError or StorageError; the message names the file."""
    tokenizer, template, defaults = load_texts(spec)
    keys = KeySource(spec.config.auth, os.environ)
    folder = spec.config.server.data_dir
    store = Store(Path(folder).absolute(), SettledClock()) if folder else None
    return create_app(spec.config, spec.served_name, tokenizer, template, defaults, engine, store, keys)


def load_texts(spec: ChildSpec) -> tuple[Tokenizer, ChatTemplate | None, GenerationDefaults]:
    """Raises ModelError, TokenizerError or ChatTemplateError; the message names the file."""
    model, model_dir = spec.config.model, Path(spec.model_dir)
    use_file = model.generation_config == "auto"
    defaults = read_generation_defaults(model_dir, spec.shape, use_file)
    tokenizer = Tokenizer.load(Path(spec.tokenizer_dir))
    return tokenizer, load_chat_template(model, tokenizer), defaults
