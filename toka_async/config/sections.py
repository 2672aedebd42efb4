"""The sections of the configuration: typed fields with their defaults and meanings. Each component gets its own only.

Knows nothing of what a section's reader does with it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Auto = Literal["auto"]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
LONGEST = 10**6  # seconds; what waits for descriptors counts milliseconds in 32 bits


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A section: every field has a type, a default and a line of meaning."""


class ModelConfig(Section, frozen=True, kw_only=True):
    path: Annotated[str, Meta(description="model directory, hub id, or `demo` for the built-in model")] = "demo"
    tokenizer: Annotated[str, Meta(description="directory or hub id of the tokenizer; empty: the model's own")] = ""
    impl: Annotated[
        Literal["auto", "native", "transformers"],
        Meta(
            description="whose code computes the layers; native: ours; transformers: that library's, with our "
            "attention; auto: ours if it has the model's family"
        ),
    ] = "auto"
    trust_remote_code: Annotated[
        bool, Meta(description="let transformers run Python code that the model's folder or repository has")
    ] = False
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="type of weights and activations; auto: float32 on a CPU, else the checkpoint's"),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda", "simulated"],
        Meta(description="auto: cuda if there is a GPU, else cpu; simulated: random tokens, without weights"),
    ] = "auto"
    load: Annotated[
        Literal["weights", "random"],
        Meta(description="weights: those of the checkpoint; random: random weights of the same shapes"),
    ] = "weights"
    quantize: Annotated[
        Literal["none", "fp8", "fp8_block"],
        Meta(
            description="make 8-bit floats of weights as they are loaded; fp8: with a scale for each output; "
            "fp8_block: for each 128 x 128 values"
        ),
    ] = "none"
    batch_invariant: Annotated[
        bool,
        Meta(description="answer a request with the same tokens to the last bit, whatever runs beside it; slower"),
    ] = False
    fp32_logits: Annotated[
        bool,
        Meta(
            description="keep logits in float32 instead of rounding them to model.dtype; a decoding row's logits then "
            "take twice the memory, and reading them twice the time"
        ),
    ] = False
    served_name: Annotated[str, Meta(description="the model's name in the API; empty: model.path as given")] = ""
    max_context: Annotated[
        Count | Auto, Meta(description="most tokens of a sequence, prompt and completion; auto: the model's own limit")
    ] = "auto"
    generation_config: Annotated[
        Literal["auto", "none"],
        Meta(description="sampling defaults; auto: those of the model's generation_config.json; none: OpenAI's"),
    ] = "auto"
    logprobs_mode: Annotated[
        Literal["raw", "temperature", "processed"],
        Meta(
            description="distribution of log-probs for requests that do not say; raw: the model's; temperature: after "
            "penalties and temperature; processed: after top_k, top_p and min_p too"
        ),
    ] = "raw"
    chat_template: Annotated[str, Meta(description="file with a jinja chat template; empty: the tokenizer's")] = ""
    tool_format: Annotated[
        Literal["auto", "none", "hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "harmony"],
        Meta(description="how the model writes tool calls; auto: as its response_template or chat template shows"),
    ] = "auto"
    reasoning_format: Annotated[
        Literal["auto", "none", "think", "mistral", "harmony"],
        Meta(description="how the model marks its reasoning; think: <think>…</think>; auto: as above"),
    ] = "auto"

    @property
    def needs_weights(self) -> bool:
        """Whether the checkpoint's weights are read."""
        return self.device != "simulated" and self.load == "weights"


class ServerConfig(Section, frozen=True, kw_only=True):
    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0: a free one")] = 10210
    tls_cert: Annotated[str, Meta(description="PEM file of the certificate and its chain; empty: no TLS")] = ""
    tls_key: Annotated[str, Meta(description="PEM file of the private key of tls_cert, without a passphrase")] = ""
    data_dir: Annotated[
        str,
        Meta(description="folder for uploaded files and batches, used by one server only; empty: no Files and Batches"),
    ] = ""
    admin: Annotated[
        bool,
        Meta(description="open the routes by which RL trainers pause the engine and change the model's weights"),
    ] = False
    control_timeout: Annotated[
        float,
        Meta(gt=0, le=LONGEST, description="seconds that a trainer's action may take, or an update wait for the next"),
    ] = 300.0
    page: Annotated[bool, Meta(description="serve a page at / that shows what the server does")] = True
    vllm_metrics: Annotated[
        bool, Meta(description="repeat metrics at /metrics under vLLM's names, such as vllm:num_requests_running")
    ] = False
    drain_timeout: Annotated[
        float, Meta(ge=0, le=LONGEST, description="seconds that running requests have to finish after SIGTERM")
    ] = 30.0
    hang_timeout: Annotated[
        float,
        Meta(
            ge=0,
            le=LONGEST,
            description="seconds without a sign of life after which a process is killed as hung; 0: never",
        ),
    ] = 30.0
    step_timeout: Annotated[
        float, Meta(ge=0, le=LONGEST, description="seconds after which a step on a GPU counts as hung; 0: never")
    ] = 300.0


class LimitsConfig(Section, frozen=True, kw_only=True):
    max_requests: Annotated[
        int, Meta(ge=1, description="most requests that run or are queued in the engine; further ones wait or get 429")
    ] = 65536
    max_held_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=2**53,
            description="most tokens of these requests, each counted as prompt and n x max_tokens; 0: no limit",
        ),
    ] = 0
    max_waiting: Annotated[
        int,
        Meta(
            ge=0,
            le=2**31 - 1,
            description="most requests that wait in order when a limit is reached, instead of a 429 at once; 0: none",
        ),
    ] = 0
    request_timeout: Annotated[
        float, Meta(ge=0, le=2**31, description="seconds after its arrival when a request ends with 504; 0: no limit")
    ] = 0.0
    max_n: Annotated[int, Meta(ge=1, description="most samples (n) of one request")] = 16384
    max_logprobs: Annotated[
        int, Meta(ge=-1, description="most likeliest tokens that a request may ask for at a place; -1: the vocabulary")
    ] = 20
    max_body_mb: Annotated[int, Meta(ge=1, description="largest request body, in MiB")] = 64
    max_bodies_mb: Annotated[
        Count | Auto,
        Meta(
            description="memory for all request bodies until they are submitted, in MiB; auto: 8 x limits.max_body_mb"
        ),
    ] = "auto"
    max_text_mb: Annotated[
        int,
        Meta(ge=1, description="longest text that is tokenized, in MiB; it takes about 250 times as much memory"),
    ] = 4
    max_answer_mb: Annotated[
        int,
        Meta(ge=1, description="largest answer, in MiB, estimated from its log-probs and repeated prompts"),
    ] = 1024
    max_unsent_mb: Annotated[
        Count | Auto,
        Meta(
            description="memory for answers that clients have not taken, in MiB; beyond it the idlest connections are "
            "closed; auto: 8 x limits.max_body_mb"
        ),
    ] = "auto"
    max_connections: Annotated[
        Count | Auto,
        Meta(description="most open HTTP connections; auto: the limit of open files, less 512 and ZeroMQ's"),
    ] = "auto"
    client_timeout: Annotated[
        float,
        Meta(
            gt=0,
            le=LONGEST,
            description="seconds after which a connection without a request, or whose client takes nothing, is closed",
        ),
    ] = 75.0
    receive_timeout: Annotated[
        float,
        Meta(
            ge=0,
            le=2**31,
            description="seconds that a request's body has to arrive, and 1 more per 16 KiB; 0: no limit",
        ),
    ] = 60.0


class AuthConfig(Section, frozen=True, kw_only=True):
    api_keys: Annotated[
        str,
        Meta(
            description="file with one API key per line, besides those in TOKA_API_KEYS; without any key, everybody "
            "has access"
        ),
    ] = ""
    admin_keys: Annotated[
        str,
        Meta(
            description="file with the API keys that may change the model, besides those in TOKA_ADMIN_KEYS; needed "
            "by server.admin unless server.host is a loopback address"
        ),
    ] = ""
    key_max_requests: Annotated[
        int, Meta(ge=0, description="limits.max_requests for each API key without a limit of its own; 0: no limit")
    ] = 0
    key_max_held_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=2**53,
            description="limits.max_held_tokens for each API key without a limit of its own; 0: no limit",
        ),
    ] = 0
    key_max_waiting: Annotated[
        int,
        Meta(
            ge=0,
            le=2**31 - 1,
            description="limits.max_waiting for each API key without a limit of its own; 0: no limit",
        ),
    ] = 0
    share_cache: Annotated[
        bool,
        Meta(
            description="let API keys reuse each other's cached prompts; cached_tokens then reveals what others asked"
        ),
    ] = False
    open_metrics: Annotated[bool, Meta(description="answer /metrics without an API key")] = False
    allowed_origins: Annotated[
        str,
        Meta(
            description="origins of web pages that may use the API, separated by commas; *: any; empty: this server's "
            "own page only"
        ),
    ] = ""
    allowed_hosts: Annotated[
        str,
        Meta(
            description="further host names under which a server without API keys answers, separated by commas; *: any"
        ),
    ] = ""


class ZmqConfig(Section, frozen=True, kw_only=True):
    bind: Annotated[
        str, Meta(description="address for direct submission, such as tcp://127.0.0.1:10211; empty: none")
    ] = ""
    key: Annotated[
        str, Meta(description="file with the server's secret key, made by `toka-async keys`; empty: no encryption")
    ] = ""
    clients: Annotated[str, Meta(description="folder with the public keys of the clients that may connect")] = ""
    admins: Annotated[
        str,
        Meta(
            description="folder with the public keys of those of zmq.clients that may control the engine, with "
            "server.admin; without zmq.key all clients may"
        ),
    ] = ""
    insecure: Annotated[bool, Meta(description="allow a zmq.bind that others can reach without keys")] = False
    max_connections: Annotated[
        Count | Auto, Meta(description="most ZeroMQ connections; auto: 2048, or a quarter of the open files allowed")
    ] = "auto"
    credit: Annotated[int, Meta(ge=1, le=2**20, description="most unfinished requests of one client")] = 16384
    buffer_mb: Annotated[
        int,
        Meta(ge=1, description="results kept for a client that does not take them, in MiB; beyond it, it is cut off"),
    ] = 256
    grace: Annotated[
        float,
        Meta(gt=0, le=86400, description="seconds that the requests of a lost client keep running"),
    ] = 30.0


class BatchesConfig(Section, frozen=True, kw_only=True):
    max_file_mb: Annotated[int, Meta(ge=1, description="largest uploaded file, in MiB")] = 4096
    max_batch_lines: Annotated[Count, Meta(description="most lines of one batch")] = 10_000_000
    key_max_open_batches: Annotated[
        int,
        Meta(ge=0, le=2**31 - 1, description="most unfinished batches of one API key; more get 429; 0: no limit"),
    ] = 1000
    key_max_files: Annotated[
        int,
        Meta(ge=0, le=2**31 - 1, description="most files of one API key, results included; more get 429; 0: no limit"),
    ] = 100_000
    key_max_files_mb: Annotated[
        int, Meta(ge=0, le=2**31 - 1, description="size of all files of one API key, in MiB; more get 429; 0: no limit")
    ] = 0


class LogConfig(Section, frozen=True, kw_only=True):
    format: Annotated[
        Literal["text", "json"], Meta(description="format of log lines; json: one JSON object per line")
    ] = "text"
    requests: Annotated[
        bool,
        Meta(description="log each HTTP request: id, path, status, seconds, tokens; never its content"),
    ] = False
    prompts: Annotated[bool, Meta(description="log every prompt")] = False
    stats_interval: Annotated[
        float, Meta(ge=0, description="seconds between status lines while the server is busy; 0: no status lines")
    ] = 5.0


class CacheConfig(Section, frozen=True, kw_only=True):
    page_size: Annotated[int, Meta(ge=1, le=1024, description="tokens per page of the KV cache")] = 16
    num_tokens: Annotated[Count | Auto, Meta(description="tokens in the KV cache; auto: as many as fit in memory")] = (
        "auto"
    )
    num_window_tokens: Annotated[
        Count | Auto,
        Meta(
            description="of a model whose layers have a sliding window: tokens that these layers keep, over all "
            "sequences; auto: 3/8 of num_tokens, more where sequences are short, and no more than max_seqs need"
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "fp8"],
        Meta(
            description="type of stored keys and values; auto: model.dtype; fp8: E4M3, a byte each, with the "
            "checkpoint's scales if it has any"
        ),
    ] = "auto"
    memory_fraction: Annotated[
        float, Meta(gt=0, le=1, description="share of the GPU's memory for weights, activations and KV cache")
    ] = 0.9
    prefix: Annotated[bool, Meta(description="reuse the cached pages of earlier prompts (prefix caching)")] = True
    state_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        Meta(
            description="type of stored states of recurrent layers, which are computed in float32; 16 bits halve what "
            "a sequence keeps and a step of decoding reads, and round each state after each step"
        ),
    ] = "float32"
    num_snapshots: Annotated[
        Count | Auto,
        Meta(
            description="states of recurrent layers that are kept beside those of running sequences, for samples that "
            "have not started and for prompts that begin alike; auto: a quarter of schedule.max_seqs, at least 16"
        ),
    ] = "auto"


class ScheduleConfig(Section, frozen=True, kw_only=True):
    max_seqs: Annotated[
        Count | Auto,
        Meta(
            description="most sequences that run at once; auto: 256 on a CPU, else 8192, and at most "
            "schedule.max_tokens"
        ),
    ] = "auto"
    max_tokens: Annotated[
        Count | Auto,
        Meta(description="most tokens of one step; longer prompts are split; auto: 2048 on a CPU, else 32768"),
    ] = "auto"
    max_step_ms: Annotated[
        Annotated[float, Meta(ge=0, le=60000)] | Auto,
        Meta(
            description="milliseconds of a step that computes prompts, as far as can be foretold and decoding leaves "
            "time; auto: 125, and while a client reads a stream at most 40, and less where steps without prompts are "
            "short; 0: no limit"
        ),
    ] = "auto"
    steps_ahead: Annotated[
        Annotated[int, Meta(ge=1, le=16)] | Auto,
        Meta(
            description="steps queued on the ranks in advance; auto: as many as hide the scheduler's latency, 2 to 16"
        ),
    ] = "auto"
    group_min_seqs: Annotated[
        Annotated[int, Meta(ge=0, le=2**31 - 1)] | Auto,
        Meta(
            description="sequences of the smallest group whose shared prefix is read once (Hydragen); 0: no groups; "
            "auto: measured at startup"
        ),
    ] = "auto"
    group_min_tokens: Annotated[
        Count | Auto,
        Meta(description="tokens of the shortest shared prefix that is read once; auto: measured at startup"),
    ] = "auto"


class ParallelConfig(Section, frozen=True, kw_only=True):
    dp: Annotated[int, Meta(ge=1, le=64, description="data-parallel replicas of the model")] = 1
    pp: Annotated[
        int, Meta(ge=1, description="pipeline-parallel stages of a replica, each with some of the layers")
    ] = 1
    tp: Annotated[int, Meta(ge=1, description="tensor-parallel ranks of a stage, each on a GPU of its own")] = 1
    ep: Annotated[
        int,
        Meta(
            ge=1,
            description="groups of a stage's tensor-parallel ranks, each of which has some of the experts; 1: every "
            "rank has a part of each expert",
        ),
    ] = 1
    pp_micro_batches: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | Auto,
        Meta(description="parts that a step is split into for the pipeline; auto: pp + 1"),
    ] = "auto"
    async_tp_min_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=2**31 - 1)] | Auto,
        Meta(
            description="tokens of the smallest step that overlaps matrix products with communication between tensor "
            "ranks; 0: no step does; auto: measured at startup"
        ),
    ] = "auto"

    gpu_locks: Annotated[
        str,
        Meta(
            description="folder with a lock for each GPU, which keeps two engines from using one; auto: /run/lock, or "
            "/tmp where not everybody may write there; empty: no locks"
        ),
    ] = "auto"

    @property
    def num_micro_batches(self) -> int:
        """The micro-batches of a step, at most; without a pipeline a step is not cut."""
        return self.pp + (self.pp > 1) if self.pp_micro_batches == "auto" else self.pp_micro_batches


class ClusterConfig(Section, frozen=True, kw_only=True):
    nodes: Annotated[
        int, Meta(ge=1, le=1024, description="machines of each replica, which divide its pipeline stages equally")
    ] = 1
    address: Annotated[
        str,
        Meta(
            description="where the leader waits for the other machines: tcp://HOST:PORT, an address of its own that "
            "they reach; port 0: a free one; no port: 10212"
        ),
    ] = ""
    interface: Annotated[
        str,
        Meta(description="network interface of the leader's machine to the others; empty: that of cluster.address"),
    ] = ""
    join_timeout: Annotated[
        float, Meta(gt=0, le=LONGEST, description="seconds at a start for all machines to join, and for one to rejoin")
    ] = 300.0
    insecure: Annotated[bool, Meta(description="let machines join without the shared secret in TOKA_CLUSTER_KEY")] = (
        False
    )


class AttentionConfig(Section, frozen=True, kw_only=True):
    backend: Annotated[
        Literal["auto", "reference", "triton", "flashinfer"],
        Meta(description="auto: on a GPU the fastest for each batch, as measured at startup; on a CPU reference"),
    ] = "auto"
    num_threads: Annotated[
        Count | Auto, Meta(description="CPU threads of a rank; auto: depends on the model's size")
    ] = "auto"


class GraphsConfig(Section, frozen=True, kw_only=True):
    enabled: Annotated[
        bool, Meta(description="capture small steps in CUDA graphs, with the triton attention kernels")
    ] = True
    max_rows: Annotated[
        Annotated[int, Meta(ge=1, le=8192)] | Auto,
        Meta(
            description="sequences of the largest captured decode step; auto: 512, and up to 4096 as long as the host "
            "takes longer to launch a step than the GPU to compute it"
        ),
    ] = "auto"
    max_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=32768)] | Auto,
        Meta(
            description="tokens of the largest captured step with prompts; 0: none is captured; auto: up to 4096, as "
            "many as two percent of the GPU's memory holds"
        ),
    ] = "auto"


class TuningConfig(Section, frozen=True, kw_only=True):
    products: Annotated[
        bool, Meta(description="measure the algorithms for matrix products at startup and use the fastest")
    ] = True
    dir: Annotated[
        str,
        Meta(
            description="folder that keeps measurements for later starts; auto: in the user's cache folder; empty: "
            "they are not kept"
        ),
    ] = "auto"


class SimulatedConfig(Section, frozen=True, kw_only=True):
    step_ms: Annotated[
        float, Meta(ge=0, le=60000, description="milliseconds that a simulated step takes, whatever it computes")
    ] = 0.0
    token_us: Annotated[
        float,
        Meta(
            ge=0, le=1_000_000, description="microseconds that a simulated step takes for each token that it computes"
        ),
    ] = 0.0
    key_ns: Annotated[
        float,
        Meta(
            ge=0,
            le=1_000_000,
            description="nanoseconds that a simulated step takes for each key that its decoding rows read",
        ),
    ] = 0.0
    end_rate: Annotated[
        float, Meta(ge=0, le=1, description="probability that a simulated token is one of the request's end tokens")
    ] = 0.0
    gpu: Annotated[
        str,
        Meta(
            description="name of GPUs that are counted and locked as real ones, each rank's with its number in "
            "CUDA_VISIBLE_DEVICES added; empty: none"
        ),
    ] = ""


class Config(Section, frozen=True, kw_only=True):
    """All sections."""

    model: ModelConfig = msgspec.field(default_factory=ModelConfig)
    server: ServerConfig = msgspec.field(default_factory=ServerConfig)
    limits: LimitsConfig = msgspec.field(default_factory=LimitsConfig)
    auth: AuthConfig = msgspec.field(default_factory=AuthConfig)
    zmq: ZmqConfig = msgspec.field(default_factory=ZmqConfig)
    batches: BatchesConfig = msgspec.field(default_factory=BatchesConfig)
    log: LogConfig = msgspec.field(default_factory=LogConfig)
    cache: CacheConfig = msgspec.field(default_factory=CacheConfig)
    schedule: ScheduleConfig = msgspec.field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = msgspec.field(default_factory=ParallelConfig)
    cluster: ClusterConfig = msgspec.field(default_factory=ClusterConfig)
    attention: AttentionConfig = msgspec.field(default_factory=AttentionConfig)
    graphs: GraphsConfig = msgspec.field(default_factory=GraphsConfig)
    tuning: TuningConfig = msgspec.field(default_factory=TuningConfig)
    simulated: SimulatedConfig = msgspec.field(default_factory=SimulatedConfig)
