"""Batch inference over Ray Data: a dataset of prompts in, the same rows with their answers out. Public API only."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from typing import Any

import ray
from ray.data import ActorPoolStrategy, Dataset
from ray.data.checkpoint import CheckpointConfig

from toka_async.checkpoint.limits import MAX_SEQS
from toka_async.config import Config, load_config
from toka_async.openai.errors import ApiError
from toka_async.openai.parse import parse_fields
from toka_async.openai.requests import DirectRequest
from toka_async.ray.fleet import count_gpus, list_overrides
from toka_async.ray.keys import FleetKeys
from toka_async.ray.row_engine import RowEngine, RowPlan
from toka_async.ray.status import ReplicaPlan

AT_ONCE = 4  # batches of a block that Ray Data gives an async function at once
BLOCKS = 2  # at once in an engine, so that it stays full while one ends
IN_FLIGHT = 4  # blocks that are sent to an engine
AHEAD = 1.25  # times the samples that run at once
BLOCK_SECONDS = 120  # of an engine: what may be lost with it, and how evenly engines end
TOKEN_RATE = 30  # of a sequence among many, a second; a guess
MAX_TOKENS = 16  # unless the sampling parameters say otherwise


def generate(
    ds: Dataset,
    *,
    model: str,
    prompt_column: str = "prompt",
    id_column: str | None = None,
    output: str | None = None,
    samples: int = 1,
    sampling: Mapping[str, Any] | None = None,
    seed: int = 0,
    replicas: int | tuple[int, int] = 1,
    tp: int = 1,
    pp: int = 1,
    num_cpus: float = 1.0,
    resources: Mapping[str, float] | None = None,
    batch_size: int | None = None,
    block_rows: int | None = None,
    checkpoint: str | None = None,
    **config: Any,
) -> Dataset:
    """Answer every row of a dataset, with engines as actors of the job.

    The rows keep their columns and get `generated_text`, `generated_tokens`, `num_generated_tokens`, `finish_reason`
    and `__inference_error__`, as from `ray.data.llm`. With several samples the first four are lists. A row that cannot
    be answered has its reason in the last one, which is empty otherwise. Parameters of single rows are in the column
    `sampling_params`, if there is one. When an engine is lost, its rows are computed again by another one.

    Args:
        model: a hub id, or a directory that every node has.
        prompt_column: texts, lists of token ids, or lists of chat messages.
        id_column: makes seeds, so that a row that is computed again gets the same random numbers.
        output: a folder, also of an object store, where Parquet files are written now. The job can be started again
            with the same arguments: it computes what is missing. Needs `id_column`, with ids that are unique, and a
            dataset that is read from files. None: nothing runs yet.
        samples: of each row. sampling: fields of requests, such as {"max_tokens": 256}.
        replicas: engines, or the least and the most of them.
        tp, pp, num_cpus, resources: of each engine; see `Fleet`.
        batch_size: rows of a batch; an engine has 4 to 8 at once. None: so many that their samples keep it full.
        block_rows: rows of a block, and of a file. None: about two minutes' work of an engine, guessed by `max_tokens`.
        checkpoint: the folder that says which rows are done. None: `output` with `.checkpoint` behind it.
        config: the configuration; see `Fleet`.

    Returns:
        The dataset with answers; with `output`, as read from there.

    Raises:
        ConfigError: the configuration is wrong.
        ValueError: `output` without `id_column`, what is wrong in `sampling`, or the column that is not there.
    """
    fields = dict(sampling or {})
    if output is not None and id_column is None:
        raise ValueError("output needs id_column: it says which rows are done")
    if "n" in fields:
        raise ValueError("the number of samples is `samples`, not n of `sampling`")
    try:
        parse_fields({**fields, "n": samples}, DirectRequest)  # otherwise every row would be answered by this error
    except ApiError as error:
        raise ValueError(f"sampling: {error}") from None
    overrides = [f"parallel.tp={tp}", f"parallel.pp={pp}", *list_overrides(model, config)]
    loaded = load_config(None, overrides)
    num_gpus = count_gpus(loaded)
    replica = ReplicaPlan(
        fleet=f"toka-{secrets.token_hex(8)}",
        overrides=tuple(overrides),
        keys=FleetKeys.make(),
        num_gpus=num_gpus,
        num_cpus=num_cpus,
        resources=resources or {},
    )
    columns = ds.columns(fetch_if_missing=False)  # what a dataset is made of says it, or nothing does yet
    for column in (prompt_column, id_column):
        if columns is not None and column is not None and column not in columns:
            raise ValueError(f"there is no column {column!r}; there are {', '.join(columns)}")
    most = find_max_seqs(loaded)
    rows = block_rows or guess_block_rows(most, samples, fields)
    least_replicas, most_replicas = (replicas, replicas) if isinstance(replicas, int) else replicas
    answered = ds.repartition(target_num_rows_per_block=rows).map_batches(
        RowEngine,
        fn_constructor_args=(replica, RowPlan(prompt_column, id_column, samples, seed, fields)),
        batch_format="pyarrow",
        batch_size=batch_size or max(1, math.ceil(AHEAD * most / samples / AT_ONCE)),
        compute=ActorPoolStrategy(
            min_size=least_replicas,
            max_size=most_replicas,
            max_tasks_in_flight_per_actor=IN_FLIGHT,
            max_concurrent_calls_per_actor=BLOCKS,
        ),
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        resources=dict(replica.resources) or None,
    )
    if output is None:
        return answered
    context = answered.context
    before = context.checkpoint_config
    context.checkpoint_config = CheckpointConfig(
        id_column, checkpoint or f"{output.rstrip('/')}.checkpoint", delete_checkpoint_on_success=False
    )
    try:
        answered.write_parquet(output)
    finally:
        context.checkpoint_config = before
    return ray.data.read_parquet(output)


def find_max_seqs(config: Config) -> int:
    """Find how many samples an engine runs at once."""
    most = config.schedule.max_seqs
    return MAX_SEQS.get(config.model.device, MAX_SEQS["cuda"]) if most == "auto" else most


def guess_block_rows(max_seqs: int, samples: int, sampling: Mapping[str, Any]) -> int:
    """Guess how many rows an engine answers in `BLOCK_SECONDS`."""
    tokens = samples * int(sampling.get("max_tokens", MAX_TOKENS))
    return max(1, BLOCK_SECONDS * TOKEN_RATE * max_seqs // max(1, tokens))
