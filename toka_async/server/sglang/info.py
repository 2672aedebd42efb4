"""SGLang's routes that say what is served."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from toka_async.server.http.respond import SERVICE, json_response


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    model_path: str
    served_model_name: str
    tokenizer_path: str
    weight_version: str
    is_generation: Literal[True] = True
    has_image_understanding: Literal[False] = False
    has_audio_understanding: Literal[False] = False


async def get_model_info(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    version, name = service.engine.control.weight_version, service.name
    return json_response(
        ModelInfo(model_path=name, served_model_name=name, tokenizer_path=name, weight_version=version)
    )
