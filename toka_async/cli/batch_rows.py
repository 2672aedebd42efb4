"""`toka-async batch run` on rows: of a Parquet or JSONL file, or a data set's folder, to a file with their answers."""

from __future__ import annotations

import argparse
from codecs import BOM_UTF8
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from toka_async.cli.batch_run import BatchFileError, Ran, describe_end, make_job, run_job
from toka_async.config import Config, LimitsConfig
from toka_async.logs import configure_parent
from toka_async.openai.errors import ApiError
from toka_async.openai.generation import Defaults, RequestLimits, chat_generation, completion_generation
from toka_async.openai.parse import parse_fields
from toka_async.openai.requests import ChatRequest, CompletionRequest
from toka_async.tables.requests import COLUMNS, RowRequests, check_sampling
from toka_async.tables.source import SUFFIXES, TableError, find_source
from toka_async.tables.table_job import TableJob, make_table_job
from toka_async.tables.write import TableFormat

SAMPLING = ("temperature", "top_p", "max_tokens", "stop")  # options that are fields of the request
ANY_SIZE = 2**31 - 1  # of a model: each row's request is checked against the real one
OF_ROWS = ("column", "split", "keep", "chat", "system", "n", "seed", "extra_body", "answer_column", "response_column")


def has_rows(options: argparse.Namespace) -> bool:
    """Tells whether the input has rows, and not lines of OpenAI's batches.

    Raises BatchFileError for options that do not fit the lines.
    """
    source: Path = options.input
    if source.is_dir() or SUFFIXES.get(source.suffix, "jsonl") != "jsonl" or options.column:
        return True
    names = _read_names(source)
    given = [name for name in (*OF_ROWS, *SAMPLING) if getattr(options, name) is not None]
    is_table = options.output.suffix == ".parquet"
    if "custom_id" not in names:
        return is_table or bool(given) or any(name in names for name in COLUMNS)
    if given:
        raise BatchFileError(
            f"{_name_option(given[0])} is for rows, and {source} has lines of OpenAI's batches, which say themselves "
            "what they ask; for rows name the column of their prompts with --column"
        )
    if is_table:
        raise BatchFileError(f"--output {options.output}: lines of OpenAI's batches are answered as JSON lines")
    return False


def run_rows(config: Config, options: argparse.Namespace) -> int:
    """Run the command on rows; returns the exit code as for a file of OpenAI's batches.

    Raises:
        BatchFileError, ModelError: nothing was begun, or the output cannot be written.
    """
    if options.errors is not None:
        raise BatchFileError("--errors: rows that failed are in the output, with a column 'error'")
    tell = configure_parent(config.log.format)
    try:
        table = make_table(options)
        check_request(table.requests, config.limits)
        num_rows = table.write_requests()
        job = make_job(table.requests_path, table.answers_path, table.errors_path, config.model)
        ran = run_job(config, job, tell, retry=options.retry_failed)
        return _finish(table, num_rows, ran, tell)
    except TableError as error:
        raise BatchFileError(str(error)) from None


def _finish(table: TableJob, num_rows: int, ran: Ran, tell: Callable[[str], None]) -> int:
    if ran.finished is None:
        return ran.code
    if not table.is_written():
        tell(f"writing {table.output}")
        table.write_output(num_rows)
    tell(describe_end(ran, table.output, "see its column 'error'"))
    return ran.code


def make_table(options: argparse.Namespace) -> TableJob:
    """Raises TableError for a data set, column or option that cannot be used."""
    extra = _read_object(options.extra_body) if options.extra_body else {}
    check_sampling(extra)
    sampling = {name: value for name in SAMPLING if (value := getattr(options, name)) is not None}
    requests = RowRequests(
        column=options.column or "",
        chat=bool(options.chat),
        system=options.system or "",
        n=options.n or 1,
        seed=options.seed,
        sampling=extra | sampling,
    )
    keep = None if options.keep is None else [name for name in options.keep.split(",") if name]
    table = TableFormat((), options.answer_column or TableFormat(()).answer, options.response_column or "")
    return make_table_job(find_source(options.input, options.split or ""), options.output, requests, table, keep)


def check_request(requests: RowRequests, most: LimitsConfig) -> None:
    """Raise TableError for fields with which every row would fail, whatever its column has."""
    fields = {**requests.sampling, "n": requests.n, "seed": requests.seed}
    max_logprobs = ANY_SIZE if most.max_logprobs < 0 else most.max_logprobs
    limits = RequestLimits(ANY_SIZE, ANY_SIZE, ANY_SIZE, most.max_n, max_logprobs)
    try:
        completion = parse_fields({**fields, "prompt": [0]}, CompletionRequest)
        completion_generation(completion, limits, Defaults())
    except ApiError as of_text:
        try:
            chat = parse_fields({**fields, "messages": [{"role": "user", "content": ""}]}, ChatRequest)
            chat_generation(chat, limits, Defaults())
        except ApiError:
            raise TableError(f"every row would fail: {of_text}") from None


def _name_option(name: str) -> str:
    return "-n" if name == "n" else f"--{name.replace('_', '-')}"


def _read_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise TableError(f"--extra-body is not a JSON object: {error}") from None


def _read_names(source: Path) -> list[str]:
    """The names in the first line of a file of JSON objects; none if there is no such line."""
    try:
        with source.open("rb") as file:
            first = next(line for line in file if line.strip()).removeprefix(BOM_UTF8)
            return list(msgspec.json.decode(first, type=dict[str, msgspec.Raw]))
    except (OSError, StopIteration, msgspec.MsgspecError, UnicodeDecodeError):
        return []  # the check of the lines says what is wrong
