"""Each module is found from its test and back: tests/unit/<folder>/test_<module>.py, or test_<module>_<topic>.py."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE, TESTS = ROOT / "toka_async", ROOT / "tests"

# These are of the repository, and not of a module.
OF_THE_REPOSITORY = {"demo_model", "documentation", "layers", "mirror", "ray/promises"}
# Modules that are tested as parts of others, or that only whole processes show; by the test that covers them.
COVERED = {
    "e2e/test_batches.py": ["procs/batch"],
    "e2e/test_bench.py": ["bench/control_plane"],
    "e2e/test_direct.py": ["procs/direct"],
    "e2e/test_life.py": ["launch", "procs/engine_link"],
    "e2e/fleet/test_lifeline.py": ["lifeline"],
    "e2e/fleet/test_ray.py": ["ray/replica", "ray/status"],
    "e2e/offline/test_async_llm.py": ["llm/async_llm"],
    "e2e/offline/test_engine_process.py": ["llm/engine_process", "llm/local_engine"],
    "e2e/offline/test_llm.py": ["llm/llm"],
    "e2e/test_serve.py": ["procs/server"],
    "e2e/trainers/test_adapters.py": ["integrations/openrlhf", "integrations/verl"],
    "e2e/trainers/test_updates.py": ["transfer/torch_group"],
    "e2e/test_tensor_parallel.py": ["startup/process_groups", "startup/rank_coords"],
    "parity/test_transformers.py": ["startup/build_model", "transformers/attention", "transformers/build"],
    "unit/transformers/test_decoder.py": [
        "transformers/layers",
        "transformers/names",
        "transformers/parallel",
        "transformers/stage",
        "transformers/vocabulary",
    ],
    "unit/transformers/test_describe.py": ["checkpoint/foreign_spec", "transformers/loading", "transformers/probe"],
    "parity/test_weight_updates.py": ["weights/catalog", "weights/checksums", "weights/update"],
    "parity/test_decoder.py": [
        "kernels/activation",
        "model/attention",
        "model/layers",
        "model/mixer",
    ],
    "unit/attention/states/test_build.py": ["attention/states/backend"],
    "unit/attention/states/test_triton_ops.py": [
        "kernels/delta/chunks",
        "kernels/delta/convolution",
        "kernels/delta/layer",
        "kernels/delta/norm",
        "kernels/delta/step",
    ],
    "parity/test_families.py": ["startup/rank_attention"],
    "unit/attention/test_paged.py": ["attention/triton"],
    "unit/attention/test_reference.py": ["attention/blocks", "attention/copies"],
    "unit/attention/test_flashinfer.py": ["attention/wrappers"],
    "unit/batches/test_store.py": ["batches/disk", "batches/records"],
    "unit/batches/test_work.py": ["batches/results"],
    "unit/bench/policy/test_policy.py": ["bench/policy/baselines", "bench/policy/replay"],
    "unit/attention/layered/test_backend.py": ["attention/base"],
    "unit/bench/test_commands.py": ["bench/rate_plot"],  # that its extra is missing; it is not installed here
    "unit/bench/test_serve_load.py": ["bench/client", "bench/loads/served"],
    "unit/checkpoint/test_spec.py": [
        "checkpoint/attention_spec",
        "checkpoint/delta_net_spec",
        "checkpoint/read_attention",
        "checkpoint/read_mixers",
        "checkpoint/rope_spec",
    ],
    "unit/model/test_weights.py": ["model/matrices/pieces"],
    "unit/cli/test_batch_run.py": ["batches/retry"],
    "unit/client/test_client.py": ["client/base_client", "client/connection"],
    "unit/client/test_exchange.py": ["client/errors", "client/pending"],
    "unit/config/test_load.py": ["config/sections", "config/text"],
    "unit/kernels/experts/test_mixture.py": ["kernels/experts/sums"],
    "unit/kernels/sampling/test_edit.py": ["kernels/sampling/raw"],
    "unit/kernels/fp8/test_products.py": ["kernels/scaled_weight"],
    "unit/model/matrices/test_fp8.py": ["kernels/fp8/ops"],
    "unit/kernels/sampling/test_kernels.py": [
        "kernels/sampling/candidates",
        "kernels/sampling/draw",
        "kernels/sampling/reject",
        "kernels/sampling/row",
        "kernels/sampling/stats",
    ],
    "e2e/nodes/test_nodes.py": ["nodes/messages", "procs/coordinator", "procs/node", "replica_lives"],
    "unit/test_supervisor.py": ["procs/launched"],
    "unit/text/formats/test_choice.py": ["text/formats/format", "text/formats/template"],
    "unit/text/formats/test_output_grammar.py": [
        "text/formats/harmony",
        "text/formats/hermes",
        "text/formats/qwen3_coder",
    ],
    "unit/text/formats/test_parser.py": [
        "text/formats/contents",
        "text/formats/llama_json",
        "text/formats/mistral",
        "text/formats/pythonic",
        "text/formats/typed_text",
    ],
    "unit/openai/test_parse.py": ["openai/errors"],
    "unit/runner/test_pipeline.py": ["runner/inputs", "runner/links"],
    "unit/runner/test_results.py": ["runner/prompt_logprobs"],
    "unit/runner/test_runner.py": ["runner/slab_sampler", "runner/token_history"],
    "unit/scheduler/admission/test_lookahead.py": ["scheduler/admission/running_usage"],
    "unit/scheduler/test_builder.py": ["scheduler/output_pages", "scheduler/sequences/step_draft"],
    "unit/model/test_dense_feed.py": ["model/feed"],
    "unit/startup/test_compile_ahead.py": ["startup/layer_trials"],
    "unit/scheduler/test_statistics.py": ["scheduler/sequences/prompt_counts"],
    "unit/server/engine/test_engine.py": ["server/engine/load", "server/engine/request_columns"],
    "unit/server/vllm/test_info.py": ["server/engine/facts"],
    "unit/server/engine/test_metrics.py": ["server/engine/vllm_metrics"],
    "unit/server/generate/test_completions.py": [
        "server/generate/service",
        "server/generate/whole_body",
    ],
    "unit/server/generate/test_events.py": ["server/generate/block_texts"],
    "unit/server/http/test_document.py": ["server/http/routes"],
    "unit/server/http/test_unsent.py": ["server/limits/free_memory"],
    "unit/server/limits/test_accounts.py": ["server/limits/account"],
    "unit/server/responses/test_events.py": ["server/responses/items"],
    "unit/server/sglang/test_generate.py": ["server/sglang/answer", "server/sglang/prompts"],
    "unit/server/zmq/test_endpoint_limits.py": [
        "server/zmq/direct_requests",
        "server/zmq/fields_cache",
        "server/zmq/session",
        "server/zmq/submissions",
    ],
    "unit/text/test_stop.py": ["text/automaton"],
    "unit/transport/test_local.py": ["transport/base"],
    "unit/tuning/test_gemm.py": ["tuning/dense"],
}


def modules() -> dict[str, bool]:
    """Whether each has something to test: a function that does something, as methods of protocols do not."""
    return {
        str(path.relative_to(PACKAGE).with_suffix("")): any(map(is_code, ast.walk(ast.parse(path.read_text("utf-8")))))
        for path in PACKAGE.rglob("*.py")
        if not path.name.startswith("__")
    }


def is_code(node: ast.AST) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return not all(isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) for each in node.body)


def longest(modules: Iterable[str], name: str) -> str | None:
    """The module with the longest of the names that `name` begins with."""
    return max((each for each in modules if name == each or name.startswith(f"{each}_")), key=len, default=None)


def modules_of_tests(found: dict[str, bool]) -> dict[str, str | None]:
    """The module of each test."""
    paths = (path.relative_to(TESTS / "unit") for path in (TESTS / "unit").rglob("test_*.py"))
    names = (str(path.with_name(path.stem.removeprefix("test_"))) for path in paths)
    return {name: longest(found, name) for name in names}


def test_every_test_names_a_module() -> None:
    assert {name for name, module in modules_of_tests(modules()).items() if module is None} == OF_THE_REPOSITORY


def test_every_module_has_a_test() -> None:
    """Of its own, or of the module that it is a part of by its name: <module>_<part>.py."""
    found = modules()
    having = {module for module in modules_of_tests(found).values() if module is not None}
    missing = {each for each, has_code in found.items() if has_code and longest(having, each) is None}
    assert missing == {module for covered in COVERED.values() for module in covered}
    assert [test for test in COVERED if not (TESTS / test).is_file()] == []
