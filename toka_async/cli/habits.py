"""Options of vLLM, SGLang and Tokasaurus, and what they are here. One table for each way of writing.

`OPTIONS` are dashed options, with dashes for underscores; `ASSIGNMENTS` are Tokasaurus's `name=value`. A name either
becomes a configuration key or is answered with what to do instead: nothing is accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TOOL_FORMATS = {
    **dict.fromkeys(("qwen3_xml", "qwen3_coder", "qwen35_coder"), "qwen3_coder"),
    **dict.fromkeys(("qwen", "qwen25"), "hermes"),
    **dict.fromkeys(("llama3", "llama4_json"), "llama3_json"),
    "llama4_pythonic": "pythonic",
    **dict.fromkeys(("openai", "gpt-oss"), "harmony"),
}
REASONING_FORMATS = {
    **dict.fromkeys(("qwen3", "qwen3-thinking", "deepseek_r1", "deepseek-r1"), "think"),
    **dict.fromkeys(("openai_gptoss", "gpt-oss"), "harmony"),
}
NO_LORA = "LoRA adapters are not supported; merge the adapter into the checkpoint"
NO_DRAFTS = "speculative decoding is not supported"
OWN_PROCESSES = "leave it out: `toka-async serve` starts processes on its machine, `toka-async node` on others"
BY_NODE = "start `toka-async node --leader tcp://HOST:PORT --index K --size M` on every machine"
ALWAYS_ON = "leave it out: it is always so"
NO_COMPILER = "leave it out: torch.compile was slower than our kernels"
BY_REQUEST = "leave it out: a request asks for it"


@dataclass(frozen=True, slots=True)
class Habit:
    """Our counterpart of another engine's option.

    Args:
        key: our configuration key; empty: there is none, and `answer` says what to do.
        value: the value of a flag; empty: the option has a value of its own.
        words: other engines' names of values, and ours.
        answer: the error if there is no key, after the option's name.
    """

    key: str = ""
    value: str = ""
    words: Mapping[str, str] = field(default_factory=dict)
    answer: str = ""

    def assignment(self, value: str) -> str:
        """The option as `section.key=value`."""
        return f"{self.key}={self.words.get(value, value)}"


DTYPES = {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
TRUTHS = {"T": "true", "F": "false", "True": "true", "False": "false", "1": "true", "0": "false"}


def _flag(key: str, value: str) -> Habit:
    return Habit(key, value)


def _refuse(answer: str) -> Habit:
    return Habit(answer=answer)


OPTIONS: Mapping[str, Habit] = {
    # The model.
    "--model": Habit("model.path"),
    "--model-path": Habit("model.path"),
    "--tokenizer": Habit("model.tokenizer"),
    "--tokenizer-path": Habit("model.tokenizer"),
    "--served-model-name": Habit("model.served_name"),
    "--dtype": Habit("model.dtype", words=DTYPES),
    "--device": Habit("model.device"),
    "--model-impl": Habit("model.impl", words={"vllm": "native", "sglang": "native"}),
    "--trust-remote-code": _flag("model.trust_remote_code", "true"),
    "--max-model-len": Habit("model.max_context", words={"-1": "auto"}),
    "--context-length": Habit("model.max_context"),
    "--chat-template": Habit("model.chat_template"),
    "--logprobs-mode": Habit("model.logprobs_mode", words={"raw_logprobs": "raw", "processed_logprobs": "processed"}),
    "--max-logprobs": Habit("limits.max_logprobs"),
    "--generation-config": Habit("model.generation_config", words={"vllm": "none"}),
    "--enable-deterministic-inference": _flag("model.batch_invariant", "true"),
    "--enable-fp32-lm-head": _flag("model.fp32_logits", "true"),
    "--load-format": Habit("model.load", words={"dummy": "random", "auto": "weights", "safetensors": "weights"}),
    # The server.
    "--host": Habit("server.host"),
    "--port": Habit("server.port"),
    "--ssl-certfile": Habit("server.tls_cert"),
    "--ssl-keyfile": Habit("server.tls_key"),
    "--enable-log-requests": _flag("log.requests", "true"),
    "--disable-log-requests": _flag("log.requests", "false"),
    "--log-requests": _flag("log.requests", "true"),
    "--disable-log-stats": _flag("log.stats_interval", "0"),
    # Memory and scheduling.
    "--gpu-memory-utilization": Habit("cache.memory_fraction"),
    "--mem-fraction-static": Habit("cache.memory_fraction"),
    "--block-size": Habit("cache.page_size"),
    "--page-size": Habit("cache.page_size"),
    "--max-total-tokens": Habit("cache.num_tokens"),
    "--enable-prefix-caching": _flag("cache.prefix", "true"),
    "--no-enable-prefix-caching": _flag("cache.prefix", "false"),
    "--disable-radix-cache": _flag("cache.prefix", "false"),
    "--max-num-seqs": Habit("schedule.max_seqs"),
    "--max-running-requests": Habit("schedule.max_seqs"),
    "--max-num-batched-tokens": Habit("schedule.max_tokens"),
    "--chunked-prefill-size": Habit("schedule.max_tokens"),
    # Several GPUs.
    "--tensor-parallel-size": Habit("parallel.tp"),
    "--tp-size": Habit("parallel.tp"),
    "--tp": Habit("parallel.tp"),
    "-tp": Habit("parallel.tp"),
    "--pipeline-parallel-size": Habit("parallel.pp"),
    "--pp-size": Habit("parallel.pp"),
    "--pp": Habit("parallel.pp"),
    "-pp": Habit("parallel.pp"),
    "--data-parallel-size": Habit("parallel.dp"),
    "--dp-size": Habit("parallel.dp"),
    "--dp": Habit("parallel.dp"),
    "-dp": Habit("parallel.dp"),
    # What computes.
    "--enable-expert-parallel": _refuse("set parallel.ep to the number of parallel.tp"),
    "--expert-parallel-size": Habit("parallel.ep"),
    "--ep-size": Habit("parallel.ep"),
    "--ep": Habit("parallel.ep"),
    "--attention-backend": Habit("attention.backend"),
    "--kv-cache-dtype": Habit("cache.dtype", words={"fp8_e4m3": "fp8"}),
    "--mamba-ssm-cache-dtype": Habit("cache.state_dtype", words={"auto": "float32"}),
    "--mamba-ssm-dtype": Habit("cache.state_dtype"),
    "--enforce-eager": _flag("graphs.enabled", "false"),
    "--disable-cuda-graph": _flag("graphs.enabled", "false"),
    "--enable-torch-compile": _refuse(NO_COMPILER),
    "--cuda-graph-max-bs": Habit("graphs.max_rows"),
    # What has no key.
    "--api-key": _refuse("set TOKA_API_KEYS in the environment, or auth.api_keys to a file of keys, one a line"),
    "--seed": _refuse("leave it out: each request has a `seed`"),
    "--random-seed": _refuse("leave it out: each request has a `seed`"),
    "--quantization": Habit("model.quantize"),
    "-q": Habit("model.quantize"),
    "--num-gpu-blocks-override": _refuse("set cache.num_tokens, in tokens"),
    "--revision": _refuse("give a directory: model.path=DIR, as `hf download --revision` makes it"),
    "--download-dir": _refuse("set HF_HOME in the environment"),
    "--hf-token": _refuse("set HF_TOKEN in the environment"),
    "--enable-chunked-prefill": _refuse(ALWAYS_ON),
    "--enable-sleep-mode": _refuse(ALWAYS_ON),
    "--swap-space": _refuse("leave it out: nothing is swapped to the CPU"),
    "--cpu-offload-gb": _refuse("weights stay on the GPU; raise parallel.tp or parallel.pp"),
    "--enable-lora": _refuse(NO_LORA),
    "--lora-modules": _refuse(NO_LORA),
    "--lora-paths": _refuse(NO_LORA),
    "--enable-auto-tool-choice": _refuse(ALWAYS_ON),
    "--tool-call-parser": Habit("model.tool_format", words=TOOL_FORMATS),
    "--reasoning-parser": Habit("model.reasoning_format", words=REASONING_FORMATS),
    "--guided-decoding-backend": _refuse("there is one backend, llguidance"),
    "--speculative-config": _refuse(NO_DRAFTS),
    "--speculative-model": _refuse(NO_DRAFTS),
    "--speculative-algorithm": _refuse(NO_DRAFTS),
    "--distributed-executor-backend": _refuse(OWN_PROCESSES),
    "--nnodes": Habit("cluster.nodes"),
    "--dist-init-addr": Habit("cluster.address"),
    "--node-rank": _refuse(BY_NODE),
    "--master-addr": _refuse(BY_NODE),
    "--master-port": _refuse(BY_NODE),
    "--api-server-count": _refuse("leave it out: one process serves HTTP"),
}

ASSIGNMENTS: Mapping[str, Habit] = {
    "model": Habit("model.path"),
    "tokenizer": Habit("model.tokenizer"),
    "dtype": Habit("model.dtype", words=DTYPES),
    "port": Habit("server.port"),
    "stats_report_seconds": Habit("log.stats_interval"),
    "dp_size": Habit("parallel.dp"),
    "pp_size": Habit("parallel.pp"),
    "tp_size": Habit("parallel.tp"),
    "async_tp_threshold": Habit("parallel.async_tp_min_tokens"),
    "pp_num_buffer_stages": _refuse("leave it out, or set parallel.pp_micro_batches"),
    "page_size": Habit("cache.page_size"),
    "kv_cache_num_tokens": Habit("cache.num_tokens"),
    "max_num_tokens_per_request": Habit("model.max_context"),
    "max_seqs_per_forward": Habit("schedule.max_seqs"),
    "max_tokens_per_forward": Habit("schedule.max_tokens"),
    "scheduling_steps_ahead": Habit("schedule.steps_ahead"),
    "use_hydragen": Habit("schedule.group_min_seqs", words={"T": "auto", "F": "0", "True": "auto", "False": "0"}),
    "hydragen_min_group_size": Habit("schedule.group_min_seqs"),
    "hydragen_min_prefix_len": Habit("schedule.group_min_tokens"),
    "torch_compile": _refuse(NO_COMPILER),
    "use_cudagraphs": Habit("graphs.enabled", words=TRUTHS),
    "cudagraph_max_size": Habit("graphs.max_rows"),
    "trust_remote_code": Habit("model.trust_remote_code", words=TRUTHS),
    "rope_scaling": _refuse("leave it out: it is read from config.json"),
    "local_proc_name": _refuse(OWN_PROCESSES),
    "statsd_server_url": _refuse("leave it out: /metrics is for Prometheus"),
    "cudagraph_step": _refuse("leave it out: sizes are chosen at the start"),
    "cudagraph_max_kv_indices_per_seq": _refuse("leave it out: graphs take any length"),
    "prefill_round_up_multiple": _refuse("leave it out: prompts are not padded"),
    "stop_string_num_token_lookback": _refuse("leave it out: it follows from each request's stop strings"),
    "max_topk_logprobs": Habit("limits.max_logprobs"),
    "enable_chosen_logprobs": _refuse(BY_REQUEST),
    "track_early_stopping": _refuse("leave it out: the scheduler does so by itself"),
    "greedy_prefill": _refuse("leave it out: there is nothing to set"),
}
