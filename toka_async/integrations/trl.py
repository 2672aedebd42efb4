"""TRL: the weights of `AsyncGRPOTrainer` (`weight_transfer`), and the rollouts of `GRPOTrainer` (`rollout_func`).

For a trainer on the server's machine, with or without a GPU. On another machine TRL's own NCCL transfer reaches this
server as it is. Checked against TRL 1.16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from toka_async.integrations.weight_sender import WeightSender


class TrlWeightTransfer:
    """TRL's `WeightTransferProtocol`: AsyncGRPOTrainer(..., weight_transfer=TrlWeightTransfer(url)).

    Versions are named after the number of updates. Args as in WeightSender.
    """

    def __init__(self, url: str, key: str = "", **options: Any) -> None:
        self.sender = WeightSender(url, key, **options)
        self.num_updates = 0

    def init_weight_transfer(self) -> None:
        """Checks that the server is there. Shared memory needs no rendezvous."""
        self.sender.ask("/health")

    def pause(self) -> None:
        self.sender.pause("keep")

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        self.num_updates += 1
        self.sender.send(iterator, f"step-{self.num_updates}")

    def resume(self) -> None:
        self.sender.resume()

    def destroy(self) -> None:
        self.sender.close()


class TrlRollout:
    """TRL's `rollout_func`: GRPOTrainer(..., rollout_func=TrlRollout(url)), with `use_vllm=False`.

    Before the first rollout of a step it sends the trainer's weights. Log-probs are those that were sampled from. It
    generates for each prompt as often as the trainer repeats it: one sample an entry, as TRL wants it.

    sampling: further fields of a request.
    """

    def __init__(self, url: str, key: str = "", **sampling: Any) -> None:
        self.transfer = TrlWeightTransfer(url, key)
        self._sampling = sampling
        self._step: int | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        if trainer.state.global_step != self._step:
            self.send(trainer.accelerator.unwrap_model(trainer.model))
            self._step = trainer.state.global_step
        args, tokenizer = trainer.args, trainer.processing_class
        ids = [encode(tokenizer, prompt) for prompt in prompts]
        body = {
            "prompt": ids,
            "max_tokens": args.max_completion_length,
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": args.top_k or 0,
            "min_p": args.min_p or 0.0,
            "repetition_penalty": args.repetition_penalty,
            "logprobs": 0,
            "logprobs_mode": "processed",
            "return_token_ids": True,
        }
        choices = self.transfer.sender.ask("/v1/completions", body | self._sampling)["choices"]
        return {
            "prompt_ids": ids,
            "completion_ids": [choice["token_ids"] for choice in choices],
            "logprobs": [[[value] for value in choice["logprobs"]["token_logprobs"]] for choice in choices],
        }

    def send(self, model: Any) -> None:
        """Sends a model of transformers; a head that is tied to the embeddings is one tensor with them."""
        self.transfer.pause()
        self.transfer.send_weights(iter(model.named_parameters()))
        self.transfer.resume()


def encode(tokenizer: Any, prompt: Any) -> list[int]:
    """Token ids of a text, or of a conversation."""
    if isinstance(prompt, str):
        text = prompt
    else:
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=isinstance(prompt, str))["input_ids"]
    return ids
