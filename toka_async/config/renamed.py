"""Keys of the configuration that have a new name, or are gone. Nothing accepts them: the error says what to do."""

from __future__ import annotations

from collections.abc import Mapping

RENAMED: Mapping[str, str] = {
    "server.max_n": "limits.max_n",
    "server.max_body_mb": "limits.max_body_mb",
    "server.max_bodies_mb": "limits.max_bodies_mb",
    "server.max_text_mb": "limits.max_text_mb",
    "server.max_answer_mb": "limits.max_answer_mb",
    "server.max_unsent_mb": "limits.max_unsent_mb",
    "server.max_requests": "limits.max_requests",
    "server.max_held_tokens": "limits.max_held_tokens",
    "server.max_waiting": "limits.max_waiting",
    "server.request_timeout": "limits.request_timeout",
    "server.max_connections": "limits.max_connections",
    "server.client_timeout": "limits.client_timeout",
    "server.receive_timeout": "limits.receive_timeout",
    "server.api_keys": "auth.api_keys",
    "server.key_max_requests": "auth.key_max_requests",
    "server.key_max_held_tokens": "auth.key_max_held_tokens",
    "server.key_max_waiting": "auth.key_max_waiting",
    "server.share_cache": "auth.share_cache",
    "server.open_metrics": "auth.open_metrics",
    "server.allowed_origins": "auth.allowed_origins",
    "server.allowed_hosts": "auth.allowed_hosts",
    "server.zmq_bind": "zmq.bind",
    "server.zmq_key": "zmq.key",
    "server.zmq_clients": "zmq.clients",
    "server.zmq_insecure": "zmq.insecure",
    "server.zmq_max_connections": "zmq.max_connections",
    "server.zmq_credit": "zmq.credit",
    "server.zmq_buffer_mb": "zmq.buffer_mb",
    "server.zmq_grace": "zmq.grace",
    "server.max_file_mb": "batches.max_file_mb",
    "server.max_batch_lines": "batches.max_batch_lines",
    "server.key_max_open_batches": "batches.key_max_open_batches",
    "server.key_max_files": "batches.key_max_files",
    "server.key_max_files_mb": "batches.key_max_files_mb",
    "server.log_format": "log.format",
    "server.log_requests": "log.requests",
    "server.log_prompts": "log.prompts",
    "server.stats_interval": "log.stats_interval",
    "compile.graphs": "graphs.enabled",
    "compile.max_graph_seqs": "graphs.max_rows",
    "compile.tune": "tuning.products",
    "compile.tuning_dir": "tuning.dir",
}

GONE: Mapping[str, str] = {
    "compile.enabled": "leave it out: torch.compile was slower than our kernels",
    "server.max_address_connections": "limit connections by address in a reverse proxy, see configs/proxy",
}
