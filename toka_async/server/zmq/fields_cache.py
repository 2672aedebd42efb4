"""How a client of direct submission wants its requests generated, worked out once for equal wishes.

Knows the fields; knows no prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from toka_async.openai.errors import bad_request
from toka_async.openai.generation import GenerationParams, direct_generation
from toka_async.openai.parse import fault_in, parse_fields
from toka_async.openai.requests import DirectRequest
from toka_async.server.generate.service import Service

MOST = 1024  # plans that are kept
LONGEST = 65536  # bytes of the fields of a plan that is kept


@dataclass(frozen=True, slots=True)
class RequestFields:
    """text: it is wanted. in_columns: token ids in, token ids out, and nothing else: no work for each request.

    knows_grammar: tells whether the grammar was checked; the first requests wait for that, one by one.
    """

    generation: GenerationParams
    add_special_tokens: bool
    text: bool
    knows_grammar: Callable[[str], bool]

    @property
    def in_columns(self) -> bool:
        generation = self.generation
        is_plain = not self.text and not generation.stops and generation.num_prompt_logprobs < 0
        is_plain = is_plain and generation.thinking_budget is None
        return is_plain and self.knows_grammar(generation.sampling.grammar)


class FieldsCache:
    """Plans by the bytes of their fields."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._plans: dict[bytes, RequestFields] = {}

    def get(self, fields: bytes) -> RequestFields:
        """The plan of a msgpack map.

        Raises:
            ApiError: 400 that names the field.
            NotServingError: the engine is not ready.
        """
        plan = self._plans.get(fields)
        if plan is None:
            plan = self._make(fields)
            if len(self._plans) >= MOST:
                self._plans.clear()
            if len(fields) <= LONGEST:
                self._plans[fields] = plan
        return plan

    def _make(self, fields: bytes) -> RequestFields:
        request = parse_fields(decode(fields), DirectRequest)
        self._service.check_model(request.model)
        generation = direct_generation(request, self._service.limits(request.n), self._service.defaults)
        return RequestFields(generation, request.add_special_tokens, request.text, self._service.grammars.knows)


def decode(fields: bytes) -> dict[str, object]:
    """The map. Raises ApiError (400) for anything else, also for numbers that are not finite."""
    try:
        values = msgspec.msgpack.decode(fields, type=dict[str, object])
        faults = {name[:64]: fault for name, value in values.items() if (fault := fault_in(value))}
    except RecursionError:
        raise bad_request("'fields' is nested too deeply", param="fields") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"'fields' is no map of fields: {error}", param="fields") from None
    for name, fault in faults.items():
        raise bad_request(f"'{name}' has {fault}", param=name)
    return values
