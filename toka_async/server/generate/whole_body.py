"""The response to a request that is not streamed, as JSON."""

from __future__ import annotations

import asyncio
from functools import partial

from toka_async.openai.responses import Usage
from toka_async.server.generate.answers import WholeAnswer, is_heavy, num_kept, run_usage
from toka_async.server.generate.events import ENCODER
from toka_async.server.generate.service import Output, Run, Service


async def whole_body(service: Service, run: Run, answer: WholeAnswer) -> tuple[bytes, Usage]:
    """Waits for the samples: the response as JSON, and the tokens that it took."""
    outputs = await service.outputs(run)
    build = partial(encode_whole, run, answer, outputs)
    if not is_heavy(run, outputs):
        return build()
    return await asyncio.get_running_loop().run_in_executor(service.executor, build)


def encode_whole(run: Run, answer: WholeAnswer, outputs: list[list[Output]]) -> tuple[bytes, Usage]:
    return ENCODER.encode(answer.whole(run, outputs)), run_usage(run, num_kept(outputs))
