"""Programs as vLLM's documentation shows them for offline work run after only their imports are changed.

Ports of its examples basic, chat (with its command line), prefix caching, async streaming, pausing, structured outputs
and data parallelism, and of what it says of prompts, samples and log-probs. The model is the built-in one.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.drivers.until import SECONDS

BASIC = """
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import StructuredOutputsParams

prompts = [
    "Question: Ben has 3 apples and buys 4.",
    "Question: There are 25 people on a bus.",
    "Question: Wei has 24 apples.",
    "Question:",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)


def main():
    llm = LLM(model="demo", gpu_memory_utilization=0.4, max_model_len=512, enforce_eager=True, seed=0)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}, {len(generated_text) > 0}, {len(output.outputs[0].token_ids) <= 16}")

    # The log-probs of a prompt.
    (scored,) = llm.generate([prompts[0]], SamplingParams(temperature=0.0, prompt_logprobs=1, max_tokens=1))
    assert scored.prompt_logprobs[0] is None
    total = 0.0
    for token_id, logprobs in zip(scored.prompt_token_ids[1:], scored.prompt_logprobs[1:]):
        total += logprobs[token_id].logprob
        assert isinstance(logprobs[token_id].decoded_token, str)
    print("scored", total < 0)

    # Many samples of a prompt, with the log-probs of their tokens.
    (many,) = llm.generate(prompts[2], SamplingParams(n=4, temperature=1.0, max_tokens=20, logprobs=2, seed=1))
    for completion in many.outputs:
        assert len(completion.logprobs) == len(completion.token_ids)
        assert completion.cumulative_logprob <= 0
        assert completion.finish_reason in ("stop", "length")
    print("samples", [completion.index for completion in many.outputs])

    # Token ids.
    tokenizer = llm.get_tokenizer()
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    greedy = SamplingParams(temperature=0, max_tokens=8)
    by_ids = llm.generate([TokensPrompt(prompt_token_ids=each) for each in ids], greedy, use_tqdm=False)
    by_dicts = llm.generate([{"prompt_token_ids": each} for each in ids], [greedy] * 4, use_tqdm=False)
    by_text = llm.generate([{"prompt": prompt} for prompt in prompts], sampling_params=greedy, use_tqdm=False)
    print("same", [each.outputs[0].text for each in by_ids] == [each.outputs[0].text for each in by_text])
    print("same", [each.outputs[0].text for each in by_dicts] == [each.outputs[0].text for each in by_text])

    # Structured outputs.
    choice = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"]))
    (chosen,) = llm.generate(prompts=prompts[0], sampling_params=choice)
    print("choice", chosen.outputs[0].text in ("Positive", "Negative"))

    # Prefix caching.
    warmed = llm.generate([prompts[0] * 20], greedy)
    cached = llm.generate([prompts[0] * 20], greedy)
    print("cached", cached[0].num_cached_tokens > 0, warmed[0].outputs[0].text == cached[0].outputs[0].text)
    print("context", llm.llm_engine.model_config.max_model_len)
    del llm


if __name__ == "__main__":
    main()
"""

CHAT = """
from vllm import LLM, EngineArgs
from vllm.outputs import RequestOutput
from vllm.utils.argparse_utils import FlexibleArgumentParser


def create_parser():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="meta-llama/Llama-3.2-1B-Instruct")
    sampling_group = parser.add_argument_group("Sampling parameters")
    sampling_group.add_argument("--max-tokens", type=int)
    sampling_group.add_argument("--temperature", type=float)
    return parser


def print_outputs(outputs: list[RequestOutput]):
    for output in outputs:
        print(f"Generated: {len(output.outputs[0].text) > 0}")


def main(args):
    max_tokens, temperature = args.pop("max_tokens"), args.pop("temperature")
    llm = LLM(**args)
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = max_tokens
    sampling_params.temperature = temperature

    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "What is 3 + 4?"},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": [{"type": "text", "text": "And 7 + 5?"}]},
    ]
    print_outputs(llm.chat(conversation, sampling_params, use_tqdm=False))

    conversations = [conversation for _ in range(10)]
    outputs = llm.chat(conversations, sampling_params, use_tqdm=True)
    print_outputs(outputs)

    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\\n{% endfor %}assistant:"
    outputs = llm.chat(conversations, sampling_params, use_tqdm=False, chat_template=template)
    print(repr(outputs[0].prompt))
    print(llm.llm_engine.model_config.max_model_len)


if __name__ == "__main__":
    main(vars(create_parser().parse_args()))
"""

PREFIX = """
from vllm import LLM, SamplingParams

prefix = "Wei has 24 apples. Ivan has 2 times as many apples as Wei. " * 8
prompts = [prefix + end for end in ("How many has Ivan?", "How many have they together?", "Rosa has 3.")]
sampling_params = SamplingParams(temperature=0.0)


def main():
    regular_llm = LLM(model="demo", enable_prefix_caching=False, gpu_memory_utilization=0.4)
    outputs = regular_llm.generate(prompts, sampling_params)
    regular = [output.outputs[0].text for output in outputs]
    del regular_llm

    llm = LLM(model="demo", enable_prefix_caching=True, gpu_memory_utilization=0.4)
    llm.generate(prompts[0], sampling_params)
    outputs = llm.generate(prompts, sampling_params)
    print("same", [output.outputs[0].text for output in outputs] == regular)
    print("cached", all(output.num_cached_tokens > 0 for output in outputs))


if __name__ == "__main__":
    main()
"""

ASYNC = """
import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def stream_response(engine: AsyncLLM, prompt: str, request_id: str) -> None:
    sampling_params = SamplingParams(
        max_tokens=100,
        temperature=0.8,
        top_p=0.95,
        seed=42,
        output_kind=RequestOutputKind.DELTA,
    )
    pieces = []
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=sampling_params):
        for completion in output.outputs:
            new_text = completion.text
            if new_text:
                pieces.append(new_text)
        if output.finished:
            print(f"{request_id} finished", len("".join(pieces)) > 1)
            break


async def main():
    engine_args = AsyncEngineArgs(model="demo", enforce_eager=True)
    engine = AsyncLLM.from_engine_args(engine_args)
    try:
        prompts = ["Question: Ben has 3 apples and buys 4. How many has he?\\nAnswer:", "Question: Wei", "Question:"]
        for i, prompt in enumerate(prompts, 1):
            await stream_response(engine, prompt, f"stream-example-{i}")
            if i < len(prompts):
                await asyncio.sleep(0)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
"""

PAUSE = """
import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM


async def main():
    engine_args = AsyncEngineArgs(model="demo", enforce_eager=True)
    engine = AsyncLLM.from_engine_args(engine_args)
    sampling_params = SamplingParams(max_tokens=200, ignore_eos=True)
    counts: list[int] = []

    async def generator_task():
        prompt = "Write a story about a dragon. Once upon a time"
        async for output in engine.generate(request_id="test-req", prompt=prompt, sampling_params=sampling_params):
            counts.append(len(output.outputs[0].token_ids))
        return output

    async def controller_task():
        while len(counts) < 5:
            await asyncio.sleep(0.01)
        await engine.pause_generation(mode="keep")
        await asyncio.sleep(0.2)  # for what was on its way
        paused_at = len(counts)
        await asyncio.sleep(0.5)
        print("paused", await engine.is_paused(), len(counts) == paused_at)
        await engine.resume_generation()

    final_output, _ = await asyncio.gather(generator_task(), controller_task())
    print("finished", final_output.finished, len(final_output.outputs[0].token_ids))
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
"""

STRUCTURED = """
import json
import re
from enum import Enum

from pydantic import BaseModel

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

MAX_TOKENS = 50

sampling_params_regex = SamplingParams(
    structured_outputs=StructuredOutputsParams(regex=r"[a-z]{1,8}@[a-z]{1,8}\\.com\\n"),
    stop=["\\n"],
    max_tokens=MAX_TOKENS,
)


class CarType(str, Enum):
    sedan = "sedan"
    suv = "SUV"


class CarDescription(BaseModel, extra="forbid"):
    doors: bool
    car_type: CarType


json_schema = CarDescription.model_json_schema()
sampling_params_json = SamplingParams(
    structured_outputs=StructuredOutputsParams(json=json_schema, disable_any_whitespace=True), max_tokens=MAX_TOKENS
)

simplified_sql_grammar = \'\'\'
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
\'\'\'
sampling_params_grammar = SamplingParams(
    structured_outputs=StructuredOutputsParams(grammar=simplified_sql_grammar), max_tokens=MAX_TOKENS
)


def generate_output(prompt: str, sampling_params: SamplingParams, llm: LLM):
    outputs = llm.generate(prompt, sampling_params=sampling_params)
    return outputs[0].outputs[0].text


def main():
    llm = LLM(model="demo", max_model_len=200)
    email = generate_output("Generate an email address for Alan Turing.", sampling_params_regex, llm)
    print("regex", bool(re.fullmatch(r"[a-z]+@[a-z]+\\.com", email)))
    car = generate_output("Generate a JSON of the most iconic car from the 90's", sampling_params_json, llm)
    print("json", sorted(json.loads(car)))
    query = generate_output("Generate an SQL query.", sampling_params_grammar, llm)
    print("grammar", bool(re.fullmatch("SELECT col_[12]  from table_[12]  where col_[12] = [12] ", query)))


if __name__ == "__main__":
    main()
"""

DATA_PARALLEL = """
import os
from multiprocessing import Process

from vllm import LLM, EngineArgs, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser


def create_parser():
    parser = FlexibleArgumentParser(description="Data Parallel Inference")
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="ibm-research/PowerMoE-3b")
    parser.add_argument("--dp-num-nodes", type=int, default=1, help="Total number of nodes for data parallel.")
    return parser


def main(dp_size, global_dp_rank, engine_args):
    os.environ["VLLM_DP_RANK"] = str(global_dp_rank)
    prompts = ["Hello, my name is", "The future of AI is"] * 20
    floor = len(prompts) // dp_size
    prompts = prompts[global_dp_rank * floor : (global_dp_rank + 1) * floor]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=[16, 20][global_dp_rank % 2])
    llm = LLM(**engine_args)
    outputs = llm.generate(prompts, sampling_params, use_tqdm=False)
    assert len(outputs) == 20


if __name__ == "__main__":
    args = vars(create_parser().parse_args())
    dp_size = args.pop("data_parallel_size")
    dp_per_node = dp_size // args.pop("dp_num_nodes")
    procs = []
    for global_dp_rank in range(dp_per_node):
        proc = Process(target=main, args=(dp_size, global_dp_rank, args))
        proc.start()
        procs.append(proc)
    for proc in procs:
        proc.join()
        print("exit code", proc.exitcode)
"""

PRINTED = {
    BASIC: """
Prompt: 'Question: Ben has 3 apples and buys 4.', True, True
Prompt: 'Question: There are 25 people on a bus.', True, True
Prompt: 'Question: Wei has 24 apples.', True, True
Prompt: 'Question:', True, True
scored True
samples [0, 1, 2, 3]
same True
same True
choice True
cached True True
context 512
""",
    CHAT: "\nGenerated: True" * 11
    + """
'system: You are a helpful assistant\\nuser: What is 3 + 4?\\nassistant: 7\\nuser: And 7 + 5?\\nassistant:'
1024
""",
    PREFIX: """
same True
cached True
""",
    ASYNC: """
stream-example-1 finished True
stream-example-2 finished True
stream-example-3 finished True
""",
    PAUSE: """
paused True True
finished True 200
""",
    STRUCTURED: """
regex True
json ['car_type', 'doors']
grammar True
""",
    DATA_PARALLEL: "exit code 0\n" * 2,
}


ARGUMENTS = {
    CHAT: ["--model", "demo", "--max-tokens", "40", "--temperature", "0", "--max-model-len", "1024", "--enforce-eager"],
    DATA_PARALLEL: ["--model=demo", "-dp=2", "--max-num-seqs=8"],
}


NAMES = ["basic", "chat", "prefix caching", "async streaming", "pausing", "structured outputs", "data parallelism"]


@pytest.mark.parametrize("program", PRINTED, ids=NAMES)
def test_programs_for_vllm_run_with_other_imports(program: str) -> None:
    changed = program.replace("from vllm.utils.argparse_utils import", "from argparse import ArgumentParser as")
    changed = re.sub(r"^from vllm[\w.]* import", "from toka_async import", changed, flags=re.MULTILINE)
    assert "vllm" not in changed
    command = [sys.executable, "-c", changed, *ARGUMENTS.get(program, [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == PRINTED[program].strip()
