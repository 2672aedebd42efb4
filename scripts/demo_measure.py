"""Measures the demo model on held-out problems, and writes its model card.

It knows how to sample with transformers, how a completion is judged, the unbiased estimate of pass@k, and the wording
of the card. It measures what was written to the folder, so the rounded weights, in float32. It does not know how the
model was trained, nor the engine: the numbers in the card are independent of the code that will serve the model.
"""

import itertools
import json
import math
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from demo_problems import END, EXAMPLE_SEPARATOR, STORIES, Problem, final_answer, generate
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

EVALUATION_SEED = 1_000_003
LONGEST_ANSWER = 160
EXAMPLES = 8


def load_model(out: Path) -> tuple[Tokenizer, Qwen2ForCausalLM]:
    """What was written, in float32, so that the measurement sees the rounded weights and nothing else."""
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    model = Qwen2ForCausalLM(Qwen2Config(**{**config, "torch_dtype": "float32"}))
    weights = {name: tensor.float() for name, tensor in load_file(out / "model.safetensors").items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"the weights do not fit the configuration: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    model.train(False)
    return Tokenizer.from_file(str(out / "tokenizer.json")), model


@dataclass(frozen=True)
class Answers:
    """The completions of one problem: how many there are, how many are right, ended by themselves, and differ.

    voted: whether the most frequent answer is right.
    """

    samples: int
    right: int
    ended: int
    different: int
    voted: bool


@torch.inference_mode()
def complete(
    model: Qwen2ForCausalLM, prompts: torch.Tensor, samples: int, temperature: float, ends: set[int], seed: int
) -> list[list[int]]:
    """Sample each prompt several times (temperature 0: the likeliest token); prompts have one length, so no padding.

    A completion that did not end by itself within the limit is one that does not end with an end token.
    """
    generator = torch.Generator().manual_seed(seed)
    cache = DynamicCache(config=model.config)
    logits = model(input_ids=prompts, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    cache.batch_repeat_interleave(samples)
    logits = logits.repeat_interleave(samples, dim=0)
    stop = torch.tensor(sorted(ends))
    written: list[torch.Tensor] = []
    finished = torch.zeros(len(logits), dtype=torch.bool)
    for _ in range(LONGEST_ANSWER):
        if temperature == 0.0:
            token = logits.argmax(dim=-1)
        else:
            token = torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator).squeeze(1)
        written.append(token)
        finished |= torch.isin(token, stop)
        if finished.all():
            break
        logits = model(input_ids=token[:, None], past_key_values=cache, use_cache=True).logits[:, -1]
    completions = []
    for row in torch.stack(written, dim=1).tolist():
        length = next((index for index, token in enumerate(row) if token in ends), len(row) - 1)
        completions.append(row[: length + 1])
    return completions


def answer_problems(
    tokenizer: Tokenizer,
    model: Qwen2ForCausalLM,
    problems: list[tuple[str, Problem]],
    *,
    samples: int,
    temperature: float,
    threads: int,
) -> list[Answers]:
    """Complete every prompt and judge the final answers; prompts of one length share a batch."""
    ends = {tokenizer.encode(token).ids[0] for token in (END, "<|im_end|>")}
    by_length: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
    for index, (prompt, _) in enumerate(problems):
        ids = tokenizer.encode(prompt).ids
        by_length[len(ids)].append((ids, index))
    at_once = max(1, 256 // samples)
    batches = [
        group[start : start + at_once]
        for _, group in sorted(by_length.items())
        for start in range(0, len(group), at_once)
    ]

    def judge(batch: list[tuple[list[int], int]]) -> list[tuple[int, Answers]]:
        prompts = torch.tensor([ids for ids, _ in batch])
        # Seeded by the first problem of the batch: the samples are the same whichever thread draws them, and when.
        completions = complete(model, prompts, samples, temperature, ends, seed=EVALUATION_SEED + batch[0][1])
        judged = []
        for place, (_, index) in enumerate(batch):
            own = completions[place * samples : (place + 1) * samples]
            found = [final_answer(tokenizer.decode(tokens)) for tokens in own]
            answers = Answers(
                samples=samples,
                right=sum(answer == problems[index][1].answer for answer in found),
                ended=sum(tokens[-1] in ends for tokens in own),
                different=len(set(found)),
                voted=Counter(found).most_common(1)[0][0] == problems[index][1].answer,
            )
            judged.append((index, answers))
        return judged

    with ThreadPoolExecutor(threads) as pool:
        by_index = dict(itertools.chain.from_iterable(pool.map(judge, batches)))
    return [by_index[index] for index in range(len(problems))]


def pass_at(answers: list[Answers], k: int) -> float:
    """The unbiased estimate of the share of problems that have a right answer among k samples."""
    estimates = [1.0 - math.comb(one.samples - one.right, k) / math.comb(one.samples, k) for one in answers]
    return sum(estimates) / len(estimates)


def measure(out: Path, count: int, samples: int, temperature: float, threads: int) -> dict[str, float]:
    """Measure what was written to the folder, on held-out problems with distinct questions."""
    tokenizer, model = load_model(out)
    source = generate(EVALUATION_SEED, held_out=True)
    problems = list({problem.question: problem for problem in itertools.islice(source, 2 * count)}.values())[:count]
    plain = [(problem.prompt, problem) for problem in problems]
    # The examples come from the training side; the problem that is asked is held out.
    examples = list(itertools.islice(generate(EVALUATION_SEED, held_out=False), EXAMPLES * count))
    with_examples = []
    for index, problem in enumerate(problems):
        shots = [shot.prompt + shot.completion for shot in examples[EXAMPLES * index : EXAMPLES * (index + 1)]]
        with_examples.append((EXAMPLE_SEPARATOR.join([*shots, problem.prompt]), problem))
    greedy = answer_problems(tokenizer, model, plain, samples=1, temperature=0.0, threads=threads)
    few_shot = answer_problems(tokenizer, model, with_examples, samples=1, temperature=0.0, threads=threads)
    sampled = answer_problems(tokenizer, model, plain, samples=samples, temperature=temperature, threads=threads)
    plain_sampled = answer_problems(tokenizer, model, plain, samples=samples, temperature=1.0, threads=threads)
    for story in sorted({problem.story for problem in problems}):
        own = [answers for answers, problem in zip(sampled, problems, strict=True) if problem.story == story]
        rates = f"pass@1 {pass_at(own, 1):.3f}, pass@{samples} {pass_at(own, samples):.3f}"
        print(f"  {story}: {len(own)} problems, {rates}")
    return {
        "parameters": float(sum(parameter.numel() for parameter in model.parameters())),
        "problems": float(len(problems)),
        "greedy": pass_at(greedy, 1),
        "greedy_eight_examples": pass_at(few_shot, 1),
        "pass@1": pass_at(sampled, 1),
        "pass@8": pass_at(sampled, 8),
        f"pass@{samples}": pass_at(sampled, samples),
        "pass@1 at temperature 1": pass_at(plain_sampled, 1),
        f"pass@{samples} at temperature 1": pass_at(plain_sampled, samples),
        "vote": sum(one.voted for one in plain_sampled) / len(plain_sampled),
        "ended": sum(one.ended for one in sampled) / sum(one.samples for one in sampled),
        "different_answers": sum(one.different for one in plain_sampled) / len(plain_sampled),
    }


CARD = """# The demo model

A small Qwen2 network ({parameters:.0f} parameters, {layers} layers, width {width}, {heads} attention heads of \
{head_dim} sharing {kv_heads} key-value heads, tied embeddings) with a byte-level BPE tokenizer of {vocabulary} tokens.
It was trained from nothing, by `scripts/train_demo_model.py`, on arithmetic word problems that \
`scripts/demo_problems.py` generates, written as

    {example}

The weights are stored in bfloat16 ({size:.1f} MB). The model exists so that everything in this project runs with no
download. It knows {stories} kinds of story about whole numbers and no other language; anything else gets nonsense.

## Measured

With the stored, rounded weights, run in float32 by transformers, on {problems:.0f} problems whose chain of equations
(in that kind of story) was held out from training, whatever the names and objects in it:

| | |
|---|---|
| pass@1 at temperature {temperature} (that of `generation_config.json`), {samples} samples a problem | {pass_1:.3f} |
| pass@8 at temperature {temperature} | {pass_8:.3f} |
| pass@{samples} at temperature {temperature} | {pass_n:.3f} |
| pass@1 at temperature 1 | {plain_1:.3f} |
| pass@{samples} at temperature 1 | {plain_n:.3f} |
| the most frequent answer of {samples} samples at temperature 1 | {vote:.3f} |
| greedy | {greedy:.3f} |
| greedy, after eight solved examples parted by empty lines | {greedy_eight_examples:.3f} |
| samples that end by themselves within {longest} tokens, at temperature {temperature} | {ended:.4f} |
| different final answers of a problem, of {samples} at temperature 1 | {different_answers:.1f} |

The pass@k are the unbiased estimates. The held-out problems are told in the same words as the training problems, so
these numbers say how well the model does sums inside stories that it knows, and not how it would do on GSM8K.
The difficulty, the number of steps and the temperature were chosen while looking at problems of this generator.

## Chat

The chat template writes a user message as `Question: ...` and an assistant message as its answer, which makes earlier
turns solved examples. System messages are dropped, since the model was never trained on any.

## Reproduce

    {command}

took {seconds:.0f} s of processor time, training and measuring together, on two cores that had other work too.
The run is seeded. Six steps, repeated, gave identical weights; the whole run was not repeated, and another processor
may round differently.
"""


def write_card(
    out: Path, measured: dict[str, float], samples: int, temperature: float, command: str, seconds: float
) -> None:
    """State what was measured, beside the weights it was measured on."""
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    problem = next(generate(EVALUATION_SEED, held_out=True))
    text = CARD.format(
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        heads=config["num_attention_heads"],
        head_dim=config["hidden_size"] // config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        vocabulary=tokenizer.get_vocab_size(),
        example=(problem.prompt + problem.completion + END).replace("\n", "\n    "),
        size=(out / "model.safetensors").stat().st_size / 1e6,
        stories=len(STORIES),
        temperature=temperature,
        samples=samples,
        command=command,
        seconds=seconds,
        longest=LONGEST_ANSWER,
        plain_1=measured["pass@1 at temperature 1"],
        plain_n=measured[f"pass@{samples} at temperature 1"],
        pass_1=measured["pass@1"],
        pass_8=measured["pass@8"],
        pass_n=measured[f"pass@{samples}"],
        **{name: value for name, value in measured.items() if "@" not in name},
    )
    (out / "MODEL_CARD.md").write_text(text, encoding="utf-8")
