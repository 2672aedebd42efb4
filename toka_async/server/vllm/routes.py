"""vLLM's own routes: the handler of each, and its description for the document."""

from __future__ import annotations

from toka_async.server.http.document import Operation
from toka_async.server.http.routes import OF_GENERATION, Routes
from toka_async.server.vllm.requests import TokensRequest
from toka_async.server.vllm.responses import GeneratedTokens, GeneratedTokensChunk
from toka_async.server.vllm.tokens import generate_tokens

ROUTES: Routes = {
    ("POST", "/inference/v1/generate"): (
        generate_tokens,
        Operation(
            name="generateTokens",
            summary="Token ids that follow a prompt of token ids, as vLLM's",
            body=TokensRequest,
            answer=GeneratedTokens,
            event=GeneratedTokensChunk,
            statuses=OF_GENERATION,
        ),
    ),
}
