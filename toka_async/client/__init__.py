"""Clients of direct submission over ZeroMQ: token ids or text in, samples out, thousands of requests in a message.

    async with Client("tcp://127.0.0.1:10211") as client:
        result = await client.generate([1, 15, 27], n=4, max_tokens=64, text=False)
        result.samples[0].token_ids, result.samples[0].finish_reason

`Client` is for one server and `Pool` for many replicas, both for asyncio; `SyncClient` and `SyncPool` are for all other
code. They reconnect after a break and repeat open requests under the same id, so each runs once. `Trainer` pauses a
server and gives it new weights. Nothing loads torch before tensors are sent, or a web server. PROTOCOL.md describes the
protocol for clients in other languages.
"""

from toka_async.client.client import Client
from toka_async.client.errors import CommandError, ConnectionLostError, ReplicaLostError, RequestError
from toka_async.client.fields import Fields
from toka_async.client.pool import Pool, PooledReplica
from toka_async.client.results import Event, PromptScores, Result, Sample
from toka_async.client.sync import SyncClient, SyncPool
from toka_async.client.trainer import Trainer

__all__ = [
    "Client",
    "CommandError",
    "ConnectionLostError",
    "Event",
    "Fields",
    "Pool",
    "PooledReplica",
    "PromptScores",
    "ReplicaLostError",
    "RequestError",
    "Result",
    "Sample",
    "SyncClient",
    "SyncPool",
    "Trainer",
]
