"""The configuration: sections of typed fields, read from TOML and `section.key=value` overrides.

Each component gets its own section only. Knows nothing of what a section's reader does with it.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from toka_async.config_text import choices, meaning, type_text, value_text

Auto = Literal["auto"]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
LONGEST = 10**6  # seconds; what waits for descriptors counts milliseconds in 32 bits


class ConfigError(ValueError):
    """A user's configuration is wrong; the message is one line that names the key and the fix."""


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A section: every field has a type, a default and a line of meaning."""


class ModelConfig(Section, frozen=True, kw_only=True):
    path: Annotated[str, Meta(description="model directory, hub id, or `demo` for the built-in model")] = "demo"
    tokenizer: Annotated[str, Meta(description="directory or hub id of the tokenizer; empty: the model's")] = ""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="type of weights and activations; auto: float32 on a CPU, else the checkpoint's"),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda", "simulated"],
        Meta(description="auto: cuda where there is one; simulated: random tokens, without weights"),
    ] = "auto"
    load: Annotated[Literal["weights", "random"], Meta(description="random: random weights of the right shape")] = (
        "weights"
    )
    served_name: Annotated[str, Meta(description="name in the API; empty: model.path as given")] = ""
    max_context: Annotated[
        Count | Auto, Meta(description="tokens a sequence can have; auto: the model's own limit")
    ] = "auto"
    generation_config: Annotated[
        Literal["auto", "none"],
        Meta(description="auto: sampling defaults from the model's generation_config.json; none: OpenAI's"),
    ] = "auto"
    chat_template: Annotated[str, Meta(description="file of a jinja chat template; empty: the tokenizer's")] = ""


class ServerConfig(Section, frozen=True, kw_only=True):
    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0: a free one")] = 10210
    max_n: Annotated[int, Meta(ge=1, description="most samples (n) of one request")] = 16384
    max_body_mb: Annotated[int, Meta(ge=1, description="largest request body, in MiB")] = 64
    max_bodies_mb: Annotated[
        Count | Auto,
        Meta(description="all bodies at once until their requests are submitted, in MiB; auto: 8 x max_body_mb"),
    ] = "auto"
    max_text_mb: Annotated[
        int, Meta(ge=1, description="longest text that is tokenized, in MiB; that takes some 250 times as much memory")
    ] = 4
    max_answer_mb: Annotated[
        int,
        Meta(ge=1, description="largest answer, in MiB, estimated before: log-probs, and prompts that it repeats"),
    ] = 1024
    max_unsent_mb: Annotated[
        Count | Auto,
        Meta(
            description="answers that clients have yet to take, in MiB; auto: 8 x max_body_mb; more: idle ones are cut"
        ),
    ] = "auto"
    max_requests: Annotated[
        int, Meta(ge=1, description="requests held at once, in the engine and its queue; more wait, or get 429")
    ] = 65536
    max_held_tokens: Annotated[
        int,
        Meta(ge=0, le=2**53, description="tokens held at once, prompts and n x max_tokens; likewise; 0: no limit"),
    ] = 0
    max_waiting: Annotated[
        int, Meta(ge=0, le=2**31 - 1, description="requests that wait in order for room; more get 429; 0: none waits")
    ] = 0
    request_timeout: Annotated[
        float, Meta(ge=0, le=2**31, description="seconds that a request may take, then it gets 504; 0: any")
    ] = 0.0
    api_keys: Annotated[
        str,
        Meta(description="file of API keys, one a line; TOKA_API_KEYS can have more; none at all: open to everybody"),
    ] = ""
    key_max_requests: Annotated[
        int, Meta(ge=0, description="as max_requests, of each API key without a limit of its own; 0: no limit")
    ] = 0
    key_max_held_tokens: Annotated[
        int, Meta(ge=0, le=2**53, description="as max_held_tokens, of each API key likewise; 0: no limit")
    ] = 0
    key_max_waiting: Annotated[
        int, Meta(ge=0, le=2**31 - 1, description="as max_waiting, of each API key likewise; 0: no limit of its own")
    ] = 0
    share_cache: Annotated[
        bool,
        Meta(description="API keys reuse each other's cached prompts; then cached_tokens tells what others have asked"),
    ] = False
    open_metrics: Annotated[bool, Meta(description="answer /metrics without an API key")] = False
    allowed_origins: Annotated[
        str,
        Meta(description="origins of web pages that may use the API, with commas between; *: any; empty: its own only"),
    ] = ""
    allowed_hosts: Annotated[
        str,
        Meta(description="further names of a server without API keys that a proxy on this machine asks for; *: any"),
    ] = ""
    vllm_metrics: Annotated[
        bool, Meta(description="/metrics also has vLLM's names (vllm:num_requests_running, …) with the model's name")
    ] = False
    tls_cert: Annotated[str, Meta(description="PEM file of the certificate and its chain; empty: no TLS")] = ""
    tls_key: Annotated[str, Meta(description="PEM file of its private key, without a passphrase")] = ""
    log_prompts: Annotated[bool, Meta(description="write every prompt to the log")] = False
    zmq_bind: Annotated[
        str, Meta(description="address for direct submission, such as tcp://127.0.0.1:10211; empty: none")
    ] = ""
    zmq_key: Annotated[str, Meta(description="its secret key, a file of `toka-async keys`; empty: no encryption")] = ""
    zmq_clients: Annotated[str, Meta(description="folder with the public keys of the clients that may connect")] = ""
    zmq_insecure: Annotated[bool, Meta(description="allow an address that others can reach without keys")] = False
    zmq_credit: Annotated[int, Meta(ge=1, le=2**20, description="requests that a client may have open at once")] = 16384
    zmq_buffer_mb: Annotated[
        int, Meta(ge=1, description="results kept for a client that does not take them, in MiB; more: it is cut off")
    ] = 256
    zmq_grace: Annotated[
        float, Meta(gt=0, le=86400, description="seconds that a lost client's requests run on, for it to come back")
    ] = 30.0
    stats_interval: Annotated[float, Meta(ge=0, description="seconds between status lines while busy; 0: none")] = 5.0
    hang_timeout: Annotated[
        float,
        Meta(
            ge=0,
            le=LONGEST,
            description="seconds without a sign of life after which a process is taken for dead; 0: never",
        ),
    ] = 30.0
    step_timeout: Annotated[
        float,
        Meta(
            ge=0, le=LONGEST, description="seconds after which a step on a GPU counts as hung; 0: it may take any time"
        ),
    ] = 300.0
    client_timeout: Annotated[
        float,
        Meta(
            gt=0, le=LONGEST, description="seconds after which a connection that neither sends nor takes data is closed"
        ),
    ] = 75.0
    max_connections: Annotated[
        Count | Auto, Meta(description="HTTP connections at once; auto: what the limit of open files allows, less 512")
    ] = "auto"
    max_address_connections: Annotated[
        int, Meta(ge=0, le=2**31 - 1, description="HTTP connections at once from one address; 0: no limit of its own")
    ] = 0
    receive_timeout: Annotated[
        float,
        Meta(ge=0, le=2**31, description="seconds for a header to arrive, or a body, with 1 more per 16 KiB; 0: any"),
    ] = 60.0
    log_format: Annotated[Literal["text", "json"], Meta(description="json: a JSON object a line")] = "text"
    log_requests: Annotated[
        bool, Meta(description="log a line for each HTTP request: id, path, status, seconds, tokens; never its content")
    ] = False
    drain_timeout: Annotated[
        float, Meta(ge=0, le=LONGEST, description="seconds that running requests get to finish on SIGTERM")
    ] = 30.0
    data_dir: Annotated[
        str, Meta(description="folder of files and batches, one server's own; empty: no Files and Batches")
    ] = ""
    max_file_mb: Annotated[int, Meta(ge=1, description="largest file that can be uploaded, in MiB")] = 4096
    max_batch_lines: Annotated[Count, Meta(description="most lines of a batch")] = 10_000_000
    key_max_open_batches: Annotated[
        int,
        Meta(ge=0, le=2**31 - 1, description="batches of an API key that have not ended; more get 429; 0: no limit"),
    ] = 1000
    key_max_files: Annotated[
        int, Meta(ge=0, le=2**31 - 1, description="files of an API key, results included; more get 429; 0: no limit")
    ] = 100_000
    key_max_files_mb: Annotated[
        int, Meta(ge=0, le=2**31 - 1, description="size of all files of an API key, in MiB; more get 429; 0: no limit")
    ] = 0


class CacheConfig(Section, frozen=True, kw_only=True):
    page_size: Annotated[int, Meta(ge=1, le=1024, description="tokens of a KV cache page")] = 16
    num_tokens: Annotated[Count | Auto, Meta(description="tokens in the KV cache; auto: what memory allows")] = "auto"
    memory_fraction: Annotated[
        float, Meta(gt=0, le=1, description="share of the GPU's memory for weights, activations and cache")
    ] = 0.9
    prefix: Annotated[bool, Meta(description="reuse cached pages of earlier prompts")] = True


class ScheduleConfig(Section, frozen=True, kw_only=True):
    max_seqs: Annotated[
        Count | Auto,
        Meta(description="sequences that run at once; auto: 256 on a CPU, else 8192, no more than max_tokens"),
    ] = "auto"
    max_tokens: Annotated[Count | Auto, Meta(description="tokens of one step; auto: 2048 on a CPU, else 32768")] = (
        "auto"
    )
    steps_ahead: Annotated[
        Annotated[int, Meta(ge=1, le=16)] | Auto,
        Meta(description="steps queued on the ranks; auto: as many as hide the scheduler's latency, 2 to 16"),
    ] = "auto"
    group_min_seqs: Annotated[
        Annotated[int, Meta(ge=0, le=2**31 - 1)] | Auto,
        Meta(description="sequences of the smallest group whose shared prefix is read once; 0: none; auto: the rank's"),
    ] = "auto"
    group_min_tokens: Annotated[
        Count | Auto, Meta(description="tokens of the shortest such prefix; auto: the rank's")
    ] = "auto"


class ParallelConfig(Section, frozen=True, kw_only=True):
    dp: Annotated[int, Meta(ge=1, le=64, description="data-parallel replicas, each on a GPU of its own")] = 1
    pp: Annotated[int, Meta(ge=1, description="pipeline stages, each of some of the layers")] = 1
    tp: Annotated[int, Meta(ge=1, description="tensor-parallel ranks, of each stage")] = 1
    pp_micro_batches: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | Auto,
        Meta(description="parts of a step that are in the pipeline at once; auto: pp + 1"),
    ] = "auto"
    async_tp_min_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=2**31 - 1)] | Auto,
        Meta(
            description="tokens of the smallest step whose matrices overlap with what tensor ranks exchange; 0: none; "
            "auto: as measured at the start"
        ),
    ] = "auto"

    @property
    def num_micro_batches(self) -> int:
        """Of a step, at most; without a pipeline it stays whole."""
        return self.pp + (self.pp > 1) if self.pp_micro_batches == "auto" else self.pp_micro_batches


class AttentionConfig(Section, frozen=True, kw_only=True):
    backend: Annotated[
        Literal["auto", "reference", "triton", "flashinfer"],
        Meta(description="auto: on a GPU the fastest for each batch, as measured at the start, else reference"),
    ] = "auto"
    num_threads: Annotated[Count | Auto, Meta(description="CPU threads of a rank; auto: by the model's size")] = "auto"


class CompileConfig(Section, frozen=True, kw_only=True):
    enabled: Annotated[bool, Meta(description="torch.compile the model")] = False
    tune: Annotated[
        bool, Meta(description="time algorithms for products with the model's matrices, use the fastest")
    ] = True
    tuning_dir: Annotated[
        str,
        Meta(
            description="folder of what earlier starts measured; auto: in the user's cache folder; empty: none is kept"
        ),
    ] = "auto"
    graphs: Annotated[bool, Meta(description="capture decoding steps in CUDA graphs, with our attention kernels")] = (
        True
    )
    max_graph_seqs: Annotated[int, Meta(ge=1, le=8192, description="rows of the largest captured step")] = 512


class SimulatedConfig(Section, frozen=True, kw_only=True):
    step_ms: Annotated[float, Meta(ge=0, le=60000, description="milliseconds that a simulated step takes")] = 0.0
    end_rate: Annotated[
        float, Meta(ge=0, le=1, description="chance that a simulated token is one of the request's end tokens")
    ] = 0.0


class Config(Section, frozen=True, kw_only=True):
    """All sections."""

    model: ModelConfig = msgspec.field(default_factory=ModelConfig)
    server: ServerConfig = msgspec.field(default_factory=ServerConfig)
    cache: CacheConfig = msgspec.field(default_factory=CacheConfig)
    schedule: ScheduleConfig = msgspec.field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = msgspec.field(default_factory=ParallelConfig)
    attention: AttentionConfig = msgspec.field(default_factory=AttentionConfig)
    compile: CompileConfig = msgspec.field(default_factory=CompileConfig)
    simulated: SimulatedConfig = msgspec.field(default_factory=SimulatedConfig)


class Field(msgspec.Struct, frozen=True):
    """One key of the configuration, for people: everything as text."""

    key: str
    type: str
    default: str
    meaning: str


_SECTIONS: dict[str, type[Section]] = {field.name: field.type for field in msgspec.structs.fields(Config)}
_FIELDS = {
    f"{name}.{field.name}": field for name, section in _SECTIONS.items() for field in msgspec.structs.fields(section)
}


def load_config(path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a TOML file, then `section.key=value` overrides, then defaults for the rest.

    Raises:
        ConfigError: unreadable file, unknown key, ill-typed value, or values that make no sense.
    """
    values: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    if path is not None:
        for key, value in _file_values(path):
            section, name = _known(key)
            values[section][name] = _convert(key, value, strict=True)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text!r}: expected section.key=value{_nearest(text, _FIELDS)}")
        section, name = _known(key)
        values[section][name] = _convert(key, value, strict=False)
    config = msgspec.convert(values, Config)
    _check(config)
    return config


def describe(config: Config | None = None) -> list[Field]:
    """Every key, in order; `default` is the value in `config` when one is given."""
    config = config or Config()
    return [
        Field(
            key=key,
            type=type_text(field.type),
            default=value_text(getattr(getattr(config, key.partition(".")[0]), field.name)),
            meaning=meaning(field.type),
        )
        for key, field in _FIELDS.items()
    ]


def _file_values(path: Path) -> Iterable[tuple[str, Any]]:
    """(section.key, value) of each entry of a TOML file."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    for name, table in tables.items():
        if name not in _SECTIONS:
            raise ConfigError(f"unknown section {name!r} in {path}{_nearest(name, _SECTIONS)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{name} in {path}: expected a section, [{name}], got {table!r}")
        for key, value in table.items():
            yield f"{name}.{key}", value


def _known(key: str) -> tuple[str, str]:
    if key not in _FIELDS:
        raise ConfigError(f"unknown key {key!r}{_nearest(key, _FIELDS)}")
    section, _, name = key.partition(".")
    return section, name


def _nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean …?` with the most similar of `known`; a bare field name matches its full key."""
    names = {name: name for name in known} | {name.partition(".")[2]: name for name in known if "." in name}
    close = difflib.get_close_matches(word.partition("=")[0], names, n=1, cutoff=0.0)
    return f"; did you mean {names[close[0]]}?" if close else ""


def _convert(key: str, value: object, *, strict: bool) -> object:
    """`value` as the field's type; `strict=False` reads text, as overrides are."""
    kind = _FIELDS[key].type
    try:
        converted: object = msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError:
        words = choices(kind)
        hint = _nearest(value, words) if isinstance(value, str) and words and value else ""
        raise ConfigError(f"{key}: expected {type_text(kind)}, got {value!r}{hint}") from None
    if isinstance(converted, float) and not math.isfinite(converted):
        raise ConfigError(f"{key}: expected {type_text(kind)}, got {value!r}")
    if isinstance(converted, str) and "\x00" in converted:
        raise ConfigError(f"{key}: expected text without NUL characters")
    return converted


def _check(config: Config) -> None:
    """Refuse what is well-typed and makes no sense."""
    tokens, page = config.cache.num_tokens, config.cache.page_size
    if tokens != "auto" and tokens < page:
        raise ConfigError(f"cache.num_tokens: expected at least cache.page_size ({page}), got {tokens}")
    bodies, body = config.server.max_bodies_mb, config.server.max_body_mb
    if bodies != "auto" and bodies < body:
        raise ConfigError(f"server.max_bodies_mb: expected at least server.max_body_mb ({body}), got {bodies}")
    seqs, step = config.schedule.max_seqs, config.schedule.max_tokens
    if seqs != "auto" and step != "auto" and step < seqs:
        raise ConfigError(f"schedule.max_tokens: expected at least schedule.max_seqs ({seqs}), got {step}")
    least, tp = config.parallel.async_tp_min_tokens, config.parallel.tp
    if least not in ("auto", 0) and (tp == 1 or config.model.device == "simulated"):
        missing = "parallel.tp of at least 2" if tp == 1 else "a device that computes"
        raise ConfigError(f"parallel.async_tp_min_tokens={least}: needs {missing}; use auto or 0")
    if config.schedule.group_min_seqs == 1:
        raise ConfigError("schedule.group_min_seqs: expected 0 for none, or at least 2, got 1")
    if config.model.device != "simulated" and config.simulated != SimulatedConfig():
        raise ConfigError("simulated: its keys need model.device=simulated")
    if config.parallel.pp == 1 and config.parallel.pp_micro_batches != "auto":
        raise ConfigError("parallel.pp_micro_batches: needs parallel.pp above 1, or auto")
    backend = config.attention.backend
    if backend in ("triton", "flashinfer") and config.model.device in ("cpu", "simulated"):
        raise ConfigError(f"attention.backend={backend}: needs model.device=cuda, got {config.model.device}; use auto")
    if backend == "flashinfer" and config.model.dtype == "float32":
        raise ConfigError("attention.backend=flashinfer: expected model.dtype bfloat16 or float16; use auto or triton")
    if not config.model.path:
        raise ConfigError("model.path: expected a model directory, a hub id, or demo, got ''")
