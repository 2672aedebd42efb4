"""An engine of this process and everything that `LLM` and `AsyncLLM` share: its texts, its client, its end."""

from __future__ import annotations

import itertools
import os
import random
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from toka_async.checkpoint.generation import read_generation_defaults
from toka_async.client import Client, ConnectionLostError, Trainer
from toka_async.client.base_client import BaseClient
from toka_async.launch import find_files
from toka_async.llm.engine_options import list_overrides, make_config
from toka_async.llm.engine_process import EngineDeadError, EngineProcess
from toka_async.llm.model_texts import ModelTexts
from toka_async.llm.outputs import OutputMaker, Submittable
from toka_async.llm.prompts import PlainPrompt
from toka_async.llm.sampling_params import SamplingParams
from toka_async.protocol import Welcome
from toka_async.text.tokenizer import writes_spaces
from toka_async.text.tokenizer_files import TokenizerError

T = TypeVar("T")
TAGS = ("weights", "kv_cache", "scheduling")  # of what sleeps, in vLLM; weights are always awake here


@dataclass(frozen=True, slots=True)
class EngineModel:
    """What the engine serves. max_model_len: most tokens of prompt and completion together."""

    model: str
    max_model_len: int
    vocab_size: int


class LocalEngine:
    """A running engine, which ends with this object, or with this process.

    Args:
        model: a directory, a hub id, or `demo`.
        config: a configuration file.
        seed: of the seeds of requests that have none; None: they differ from run to run.
        chat_template: source of a chat template or a file with one; None: the model's own.
        options: see `make_config`.

    Raises:
        ConfigError, ModelError, TokenizerError: something is wrong with the options or the model's files.
        EngineDeadError: the engine did not start.
    """

    def __init__(
        self,
        model: str,
        config: Path | str | None,
        seed: int | None,
        chat_template: Path | str | None,
        options: Mapping[str, Any],
    ) -> None:
        made = make_config(model, config, options)
        files = find_files(made)
        self.texts = ModelTexts(files.tokenizer_dir, made.model, chat_template)
        self.outputs = OutputMaker(self.texts.tokenizer)
        self._defaults = read_generation_defaults(
            files.model_dir, files.shape, use_file=made.model.generation_config == "auto"
        )
        self._has_spaces = writes_spaces(self.texts.tokenizer)
        self._seeds = random.Random(seed)
        self._ids = itertools.count()
        # The child need not look for the files again.
        found = replace(
            made.model,
            path=str(files.model_dir),
            tokenizer=str(files.tokenizer_dir),
            served_name=made.model.served_name or made.model.path,
        )
        self._process = EngineProcess(list_overrides(replace(made, model=found)))
        self._pid = os.getpid()
        self._stop = weakref.finalize(self, stop_engine, self._pid, self._process)
        welcome = self.start(read_welcome).result()
        self.model_config = EngineModel(found.served_name, welcome.max_context, welcome.vocab_size)

    def shutdown(self) -> None:
        """End the engine. Running calls fail. Further calls do nothing."""
        self._stop()

    def start(self, call: Callable[[BaseClient], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start what `call` does with the client. Raises EngineDeadError."""
        if os.getpid() != self._pid:
            raise EngineDeadError(f"the engine belongs to process {self._pid}, of which this one is a copy (os.fork)")
        with self.explaining():
            return self._process.client.start(call)

    def command(self, give: Callable[[Trainer], Coroutine[Any, Any, T]]) -> T:
        """Give the engine a command as a trainer does, and wait. Raises CommandError and EngineDeadError."""
        future = self.start(lambda client: give(Trainer(narrow(client))))
        with self.explaining():
            return future.result()

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """See `LLM.wake_up`."""
        if wrong := [tag for tag in tags or () if tag not in TAGS]:
            raise ValueError(f"tags: expected some of {', '.join(TAGS)}, got {wrong[0]!r}")
        if tags is None or "kv_cache" in tags:
            self.command(lambda trainer: trainer.wake())
        if not self.command(lambda trainer: trainer.state()).is_asleep:
            self.command(lambda trainer: trainer.resume())

    def wait(self, futures: Iterable[Future[None]]) -> None:
        """Wait until all are done, or one has failed. Raises EngineDeadError, and what that one raised."""
        with self.explaining():
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise EngineDeadError for what failed since the engine has ended."""
        try:
            yield
        except (CancelledError, ConnectionLostError):
            if self._process.end is None:
                raise
            raise self._process.end from None

    def default_params(self) -> SamplingParams:
        """Return the sampling parameters of the model's generation_config.json."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        return SamplingParams.from_optional(**{name: getattr(self._defaults, name) for name in names})

    def prepare(
        self, prompts: Sequence[PlainPrompt], params: Sequence[SamplingParams], first: int = 0
    ) -> list[Submittable]:
        """Prepare prompts, tokenized if need be. first: the place of the first one, for errors.

        Raises ValueError for a prompt that the model cannot take.
        """
        self._tokenize(prompts, first)
        return [
            self._prepare_one(place, prompt, prompt.token_ids or [], each)
            for place, (prompt, each) in enumerate(zip(prompts, params, strict=True), start=first)
        ]

    def _tokenize(self, prompts: Sequence[PlainPrompt], first: int) -> None:
        try:
            self.texts.tokenize(prompts)
        except TokenizerError as error:
            if len(prompts) == 1:
                raise ValueError(f"prompt {first} cannot be tokenized: {error}") from None
            for place, prompt in enumerate(prompts, start=first):  # one of them is at fault
                self._tokenize([prompt], place)

    def _prepare_one(self, place: int, prompt: PlainPrompt, ids: list[int], params: SamplingParams) -> Submittable:
        if self._has_spaces and not (params.spaces_between_special_tokens or params.skip_special_tokens):
            raise ValueError("spaces_between_special_tokens=False: this tokenizer writes spaces before special tokens")
        limits = self.model_config
        room = limits.max_model_len - len(ids)
        if room < 1:
            raise ValueError(
                f"prompt {place} has {len(ids)} tokens, and prompt and completion can have {limits.max_model_len} "
                "together; shorten it"
            )
        if not ids:
            raise ValueError(f"prompt {place} has no tokens")
        if not 0 <= min(ids) <= max(ids) < limits.vocab_size:
            raise ValueError(f"prompt {place} has a token id out of range; the model's are below {limits.vocab_size}")
        return Submittable(
            str(next(self._ids)),
            prompt.text,
            ids,
            params,
            room if params.max_tokens is None else min(room, params.max_tokens),
            self._seeds.getrandbits(63) if params.seed is None else params.seed,
            prompt.cache_salt,
        )


def load_tokenizer(folder: Path) -> Any:
    """Load a tokenizer as transformers does. Raises ImportError without transformers."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ImportError("get_tokenizer returns a tokenizer of transformers: pip install transformers") from None
    return AutoTokenizer.from_pretrained(folder)


async def read_welcome(client: BaseClient) -> Welcome:
    welcome = narrow(client).welcome
    assert welcome is not None
    return welcome


def narrow(client: BaseClient) -> Client:
    assert isinstance(client, Client)  # of one engine, not of a pool
    return client


def stop_engine(pid: int, process: EngineProcess) -> None:
    """End the engine, unless this is a copy of the process that started it, made by fork."""
    if os.getpid() == pid:
        process.stop()
