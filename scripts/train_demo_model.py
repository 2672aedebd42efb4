"""Trains the demo model that ships inside the package, measures it, and writes everything that loading it needs.

It knows the recipe: the byte-level tokenizer, the sizes of the Qwen2 network, the batches, the optimizer, the rounding
to bfloat16. The problems are made by ``demo_problems`` and the model is measured by ``demo_measure``. It does not know
the engine: training uses transformers, so that the weights are independent of the code that will serve them. The same
processor type, library versions and arguments give the same weights; another processor may round differently.

    python scripts/train_demo_model.py --out somewhere
    python scripts/train_demo_model.py --out somewhere --evaluate-only
"""

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from demo_measure import measure, write_card
from demo_problems import END, EXAMPLE_SEPARATOR, generate
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.nn import functional
from transformers import Qwen2Config, Qwen2ForCausalLM

PACKAGE_FOLDER = Path(__file__).resolve().parent.parent / "toka_async" / "demo"

SPECIAL_TOKENS = (END, "<|im_start|>", "<|im_end|>")
# The pieces and the normalizer of Qwen2, digit for digit: transformers builds a Qwen2 tokenizer with these whatever the
# file says, so any others would give other tokens there. Every digit is a piece of its own, so sums are done on digits.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['content'] is string -%}{%- set text = message['content'] | trim -%}"
    "{%- else -%}{%- set text = message['content'] | map(attribute='text') | join(' ') | trim -%}{%- endif -%}"
    "{%- if message['role'] == 'user' -%}"
    "{%- if text.startswith('Question:') -%}{%- set text = text[9:] | trim -%}{%- endif -%}"
    "{%- if text.endswith('Answer:') -%}{%- set text = text[:-7] | trim -%}{%- endif -%}"
    "{{- 'Question: ' + text + '\\n' -}}"
    "{%- elif message['role'] == 'assistant' -%}{{- 'Answer: ' + text + '<|endoftext|>\\n' -}}"
    "{%- elif message['role'] not in ('system', 'developer') -%}"
    "{{- raise_exception('the demo model knows no role ' + message['role']) -}}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'Answer:' -}}{%- endif -%}"
)
"""Renders a chat as the text the model was trained on, also when a question comes with its own ``Question:``.

System messages are dropped: the model was never trained on any.
"""

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 608,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}

GENERATION_CONFIG: dict[str, Any] = {"do_sample": True, "eos_token_id": [0, 2], "pad_token_id": 0, "temperature": 0.3}
"""The temperature is high so that samples differ and about half are wrong; at 1.0 most of them are right."""

BATCH_TOKENS = 4096
WINDOWS = (256, 256, 256, 256, 256, 1024)
"""Window lengths in turn: short ones are cheap, and the long ones teach every position and long few-shot prompts."""
QUESTION_WEIGHT = 0.15
"""How much a token of a question counts in the loss: most of one is chance, which no model can learn."""
MUON_RATE = 6e-3
ADAM_RATE = 3e-3
SHARDS = 2
"""Parts that a batch is cut into, so that two cores work on one each."""


def train_tokenizer(seed: int, vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer, trained on problems of the training side; any other text falls back to bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    problems = itertools.islice(generate(seed, held_out=False), 8000)
    tokenizer.train_from_iterator((problem.prompt + problem.completion for problem in problems), trainer)
    return tokenizer


def training_batches(tokenizer: Tokenizer, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Token ids, the ids to predict and the weight of each prediction, without end.

    A window starts at a problem and holds as many as fit, so that later problems are seen with earlier ones as
    examples. In some windows the examples are parted as people part them, by an empty line; the token to predict after
    an answer is the end-of-text token there too, so that the model stops after its answer whatever the examples do.
    """
    rng = random.Random(seed)
    problems = generate(seed, held_out=False)
    end = tokenizer.encode(END).ids[0]
    separators = (tokenizer.encode(END + "\n").ids, tokenizer.encode(EXAMPLE_SEPARATOR).ids)
    for length in itertools.cycle(WINDOWS):
        rows, targets, weights = [], [], []
        for _ in range(BATCH_TOKENS // length):
            row: list[int] = []
            target: list[int] = []
            weight: list[float] = []
            separator = rng.choices(separators, (0.6, 0.4))[0]
            while len(row) <= length:
                problem = next(problems)
                prompt = tokenizer.encode(problem.prompt).ids
                answer = tokenizer.encode(problem.completion).ids
                row += prompt + answer + separator
                # target[i] is what follows row[i - 1]; both are shifted against each other below.
                target += prompt + answer + [end] + separator[1:]
                weight += [QUESTION_WEIGHT] * len(prompt) + [1.0] * (len(answer) + 1)
                weight += [QUESTION_WEIGHT] * (len(separator) - 1)
            rows.append(row[:length])
            targets.append(target[1 : length + 1])
            weights.append(weight[1 : length + 1])
        yield torch.tensor(rows), torch.tensor(targets), torch.tensor(weights)


def schedule(step: int, steps: int) -> float:
    """The share of the peak rate: a short warm-up, then half a cosine down to a twentieth."""
    warm = max(1, steps // 40)
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return 0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * done))


class Muon:
    """Momentum whose update of a matrix is replaced by the nearest orthogonal one (Jordan et al., 2024).

    It learns these problems in roughly half of AdamW's steps. The one in torch rounds to bfloat16 on the way, which is
    slow on processors without such arithmetic, so this one stays in float32.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], momentum: float = 0.95, decay: float = 0.05) -> None:
        self.parameters = parameters
        self.buffers = [torch.zeros_like(parameter) for parameter in parameters]
        self.momentum = momentum
        self.decay = decay

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor], rate: float) -> None:
        """One update; the scale makes its size that of an AdamW update at the same rate."""
        for parameter, buffer, gradient in zip(self.parameters, self.buffers, gradients, strict=True):
            buffer.lerp_(gradient, 1.0 - self.momentum)
            update = orthogonal(gradient.lerp(buffer, self.momentum))
            parameter.mul_(1.0 - rate * self.decay)
            parameter.add_(update, alpha=-rate * 0.2 * math.sqrt(max(parameter.shape)))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Bring all singular values of a matrix near one, by five steps of a Newton-Schulz iteration."""
    tall = matrix.shape[0] > matrix.shape[1]
    x: torch.Tensor = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if tall else x


def train(tokenizer: Tokenizer, config: dict[str, Any], steps: int, seed: int, threads: int) -> Qwen2ForCausalLM:
    """Train a fresh network for a fixed number of steps; neither the clock nor the number of threads decides anything.

    A batch is always cut into the same shards, and their gradients are added in the same order, whoever computes them.
    """
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**{**config, "torch_dtype": "float32"}))
    model.train()
    names = dict(model.named_parameters())
    matrices = [parameter for name, parameter in names.items() if parameter.dim() == 2 and "embed" not in name]
    others = [parameter for name, parameter in names.items() if parameter.dim() != 2 or "embed" in name]
    muon = Muon(matrices)
    adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)

    def gradients(shard: tuple[torch.Tensor, ...]) -> tuple[float, float, tuple[torch.Tensor, ...]]:
        rows, targets, weights = shard
        logits = model(input_ids=rows, use_cache=False).logits
        losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        loss = (losses * weights.flatten()).sum()
        answers = losses.detach()[weights.flatten() == 1.0]
        return float(answers.sum()), float(len(answers)), torch.autograd.grad(loss, matrices + others)

    started, cpu_started = time.monotonic(), time.process_time()
    answer_loss = answer_tokens = 0.0
    every = max(1, min(50, steps // 4))
    with ThreadPoolExecutor(threads) as pool:
        for step, batch in enumerate(itertools.islice(training_batches(tokenizer, seed), steps)):
            done = list(pool.map(gradients, zip(*(tensor.chunk(SHARDS) for tensor in batch), strict=True)))
            weight = batch[2].sum()
            total = [sum(parts[1:], parts[0]) / weight for parts in zip(*(d[2] for d in done), strict=True)]
            size = torch.stack([gradient.norm() for gradient in total]).norm()
            total = [gradient * (1.0 / size.clamp(min=1.0)) for gradient in total]
            share = schedule(step, steps)
            muon.step(total[: len(matrices)], MUON_RATE * share)
            for parameter, gradient in zip(others, total[len(matrices) :], strict=True):
                parameter.grad = gradient
            adam.param_groups[0]["lr"] = ADAM_RATE * share
            adam.step()
            answer_loss += sum(d[0] for d in done)
            answer_tokens += sum(d[1] for d in done)
            if (step + 1) % every == 0:
                took = time.monotonic() - started
                print(
                    f"step {step + 1}/{steps}  loss {answer_loss / answer_tokens:.4f} per token of an answer  "
                    f"{took:.0f} s ({time.process_time() - cpu_started:.0f} s of processor time)",
                    flush=True,
                )
                answer_loss = answer_tokens = 0.0
    return model


def write_model(out: Path, tokenizer: Tokenizer, config: dict[str, Any], model: Qwen2ForCausalLM) -> None:
    """Write configuration, tokenizer and rounded weights; the tied output matrix is stored once, as the embedding."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", GENERATION_CONFIG)
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "add_bos_token": False,
            "bos_token": None,
            "eos_token": END,
            "pad_token": END,
            "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
    )
    tokenizer.save(str(out / "tokenizer.json"))
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write one readable JSON file."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Train unless told otherwise, then measure what was written and state it in the model card."""
    parser = argparse.ArgumentParser(description="Train and measure the demo model.")
    parser.add_argument("--out", type=Path, default=PACKAGE_FOLDER, help="folder to write, by default the package's")
    parser.add_argument("--steps", type=int, default=750, help="training steps; time never decides")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and their order")
    parser.add_argument("--problems", type=int, default=256, help="held-out problems to measure on")
    parser.add_argument("--samples", type=int, default=64, help="samples of each problem")
    parser.add_argument("--threads", type=int, default=2, help="worker threads; they change the time and nothing else")
    parser.add_argument("--evaluate-only", action="store_true", help="measure what is in the folder, train nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the threads below each take a whole piece of work: faster, and exact in any number
    torch.use_deterministic_algorithms(True)
    started, cpu_started = time.monotonic(), time.process_time()
    temperature = float(GENERATION_CONFIG["temperature"])
    if arguments.evaluate_only:
        stored = json.loads((arguments.out / "generation_config.json").read_text(encoding="utf-8"))
        temperature = float(stored["temperature"])
    else:
        tokenizer = train_tokenizer(arguments.seed, CONFIG["vocab_size"])
        model = train(tokenizer, CONFIG, arguments.steps, arguments.seed, arguments.threads)
        write_model(arguments.out, tokenizer, CONFIG, model)
    measured = measure(arguments.out, arguments.problems, arguments.samples, temperature, arguments.threads)
    print(json.dumps(measured, indent=2))
    seconds = time.process_time() - cpu_started
    print(f"took {time.monotonic() - started:.0f} s, {seconds:.0f} s of processor time")
    if not arguments.evaluate_only:
        command = f"python scripts/train_demo_model.py --steps {arguments.steps} --seed {arguments.seed}"
        write_card(arguments.out, measured, arguments.samples, temperature, command, seconds)


if __name__ == "__main__":
    main()
