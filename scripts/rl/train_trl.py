"""TRL 1.16's GRPOTrainer, unmodified, trains the built-in model on a CPU with rollouts from a running server.

    toka-async serve server.admin=true &
    python scripts/rl/train_trl.py http://127.0.0.1:10210 toka_async/demo

The reward is the share of an answer's characters that are digits. It has to rise, and the server's checksums at the end
have to be those of the trainer's weights.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from toka_async.integrations.trl import TrlRollout
from toka_async.transfer.checksum import sum_tensors

STEPS = 30


def reward_digits(completions: list[str], **_: object) -> list[float]:
    return [sum(char.isdigit() for char in text) / max(1, len(text)) for text in completions]


def main(url: str, model_path: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    prompts = [f"Question: what is {a} + {b}?" for a in range(2, 10) for b in range(2, 10)]
    rollout = TrlRollout(url, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=32,
            num_generations=16,
            max_completion_length=24,
            temperature=1.0,
            learning_rate=2e-3,
            beta=0.0,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward_digits,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            rollout_func=rollout,
        )
        trainer.train()
        rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    rollout.send(model)
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    print(f"reward of the first and the last 5 of {len(rewards)} steps: {first:.3f}, {last:.3f}")
    ours, servers = sum_tensors(dict(model.named_parameters())), rollout.transfer.sender.read_checksums()
    rollout.transfer.destroy()
    assert last > first + 0.05, "the reward has to rise"
    assert ours == servers, "the server has to have the trainer's weights"
    print(f"{len(servers)} checksums are equal, after {rollout.transfer.num_updates} updates")


if __name__ == "__main__":
    main(*sys.argv[1:3])
