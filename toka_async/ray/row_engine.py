"""The actor of a Ray Data job: an engine, and the rows of batches as its requests. A row that is wrong is an error in
its row. An engine that is lost ends the worker: only that makes Ray Data begin its rows again elsewhere.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import msgspec
import pyarrow as pa

from toka_async.client import Client, ConnectionLostError, RequestError, Result, Sample
from toka_async.ray.replica import ReplicaActor
from toka_async.ray.status import ReplicaPlace, ReplicaPlan

ERROR = "__inference_error__"
SAMPLING = "sampling_params"  # a column with parameters of single rows
TIMEOUT = 60.0  # seconds for the first connection: the engine serves already
TOKENIZED = 16  # chats at once
OUTPUT: dict[str, pa.DataType] = {  # of one sample; of several, lists of these
    "generated_text": pa.string(),
    "generated_tokens": pa.list_(pa.int32()),
    "num_generated_tokens": pa.int32(),
    "finish_reason": pa.string(),
}


@dataclass(frozen=True, slots=True)
class RowPlan:
    """What becomes of a row.

    prompt_column: a text, token ids, or chat messages. id_column: gives the seed, together with `seed`. samples: of
    each row. sampling: parameters of all rows.
    """

    prompt_column: str
    id_column: str | None
    samples: int
    seed: int
    sampling: Mapping[str, Any]


class RowEngine:
    """Answers batches, several at once. Raises ReplicaStartError."""

    def __init__(self, replica: ReplicaPlan, rows: RowPlan) -> None:
        self._rows = rows
        self._replica = ReplicaActor(replica)  # ends this process when the engine is lost
        with ThreadPoolExecutor(1) as thread:
            self._place: ReplicaPlace = thread.submit(asyncio.run, self._replica.start()).result()
        self._folder = TemporaryDirectory(prefix="toka-client-")
        key, server_key = replica.keys.write_for_client(Path(self._folder.name))
        self._client = Client(self._place.address, key=key, server_key=server_key, timeout=TIMEOUT)
        self._connecting: asyncio.Task[None] | None = None

    async def _connect(self) -> None:
        await self._client.__aenter__()
        self._http = aiohttp.ClientSession(self._place.url, connector=aiohttp.TCPConnector(limit=TOKENIZED))

    async def __call__(self, batch: pa.Table) -> pa.Table:
        if self._rows.prompt_column not in batch.column_names:
            raise ValueError(f"there is no column {self._rows.prompt_column!r}; there are {batch.column_names}")
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
        try:
            await asyncio.shield(self._connecting)
            answers = await asyncio.gather(*map(self._answer, batch.to_pylist()))
        except (ConnectionLostError, aiohttp.ClientConnectionError):
            os._exit(1)
        return append_answers(batch, answers, self._rows.samples)

    async def _answer(self, row: dict[str, Any]) -> Result | str:
        """A row's result, or what is wrong with the row."""
        try:
            fields = make_fields(row, self._rows)
            seed = fields.pop("seed", None)
            if seed is None and self._rows.id_column is not None:
                seed = make_seed(self._rows.seed, row[self._rows.id_column])
            prompt = row[self._rows.prompt_column]
            if is_chat(prompt):
                prompt = await tokenize_chat(self._http, prompt)
            return await self._client.generate(prompt, seed=seed, **fields)
        except RequestError as error:
            if error.code == "engine_stopped":
                os._exit(1)
            return str(error)


async def tokenize_chat(http: aiohttp.ClientSession, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Turn chat messages into token ids, by the template of the server's model.

    Raises RequestError, and aiohttp.ClientConnectionError when the server is lost.

    Ray Data gives every message all keys that one of them has; those without a value are left out.
    """
    given = [{name: value for name, value in each.items() if value is not None} for each in messages]
    async with http.post("/tokenize", json={"messages": given}) as response:
        answer = msgspec.json.decode(await response.read())
    if response.status != 200:
        raise RequestError(answer["error"]["message"], field="messages", status=response.status)
    tokens: list[int] = answer["tokens"]
    return tokens


def is_chat(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def make_fields(row: Mapping[str, Any], plan: RowPlan) -> dict[str, Any]:
    """Make the fields of a row's request: the job's, and the row's own in the column `sampling_params`.

    Raises RequestError if the row wants another number of samples: columns have one type.
    """
    own = row.get(SAMPLING) or {}
    if not isinstance(own, Mapping):
        raise RequestError(f"{SAMPLING!r}: expected a map, got {type(own).__name__}", field=SAMPLING)
    fields = {**plan.sampling, **{name: value for name, value in own.items() if value is not None}}
    if fields.pop("n", plan.samples) != plan.samples:
        raise RequestError(f"'n' of a row must be the job's, {plan.samples}", field="n")
    return {**fields, "n": plan.samples}


def make_seed(seed: int, row_id: object) -> int:
    """Make a row's seed: the same whenever and wherever the row is computed."""
    return int.from_bytes(blake2b(f"{seed}:{row_id}".encode(), digest_size=8).digest()) >> 1


def append_answers(batch: pa.Table, answers: Sequence[Result | str], samples: int) -> pa.Table:
    """Append the columns `OUTPUT` and the errors, in place of columns of these names."""
    values: dict[str, list[Any]] = {name: [] for name in OUTPUT}
    errors = [answer if isinstance(answer, str) else "" for answer in answers]
    for answer in answers:
        rows = [] if isinstance(answer, str) else [list_values(sample) for sample in answer.samples]
        for place, name in enumerate(OUTPUT):
            column = [row[place] for row in rows]
            values[name].append(column if samples > 1 else column[0] if column else None)
    columns = {name: pa.array(values[name], kind if samples == 1 else pa.list_(kind)) for name, kind in OUTPUT.items()}
    for name, column in {**columns, ERROR: pa.array(errors, pa.string())}.items():
        if name in batch.column_names:
            batch = batch.drop_columns([name])
        batch = batch.append_column(name, column)
    return batch


def list_values(sample: Sample) -> tuple[str, list[int], int, str | None]:
    """List what `OUTPUT` names."""
    return sample.text, sample.token_ids.tolist(), sample.token_ids.size, sample.finish_reason
