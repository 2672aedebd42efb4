"""SGLang's own routes: the handler of each, and its description for the document."""

from __future__ import annotations

from toka_async.server.http.document import Operation
from toka_async.server.http.routes import OF_GENERATION, Routes
from toka_async.server.sglang.generate import generate
from toka_async.server.sglang.requests import SglangRequest
from toka_async.server.sglang.responses import SglangSample

ROUTES: Routes = {
    ("POST", "/generate"): (
        generate,
        Operation(
            name="generate",
            summary="Samples that go on with one or many prompts, as SGLang's: one, or a list",
            body=SglangRequest,
            answer=SglangSample,
            is_list=True,
            event=SglangSample,
            statuses=OF_GENERATION,
        ),
    ),
}
