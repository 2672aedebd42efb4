"""The engine as a model of lm_eval (EleutherAI's lm-evaluation-harness). Importing this module registers `toka`.

Contexts are encoded, cut and continued as by lm_eval's own `hf` model, so that both score the same tokens.
"""

from __future__ import annotations

import json
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    maybe_truncate,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from toka_async import LLM, RequestOutput, SamplingParams, TokensPrompt
from toka_async.evaluation.scores import cut_context, make_sampling, sum_logprobs

ROOM = 2  # tokens of the model's context that scoring leaves: the last scored one, and one to generate


@register_model("toka")
class TokaLM(TemplateLM):  # type: ignore[misc]
    """A model that this process runs.

    Args:
        pretrained: a folder, a hub id, or `demo` for the built-in model.
        max_length: most tokens before one that is scored; None: what the context of the model allows.
        add_bos_token: put the begin token before every text; None: as the tokenizer is configured.
        prefix_token_id: what an empty context is; None: the begin token, or else the end token.
        enable_thinking: of chat templates that know it.
        think_end_token: a text; an answer begins after it.
        chat_template_args: further names that the chat template sees.
        device: `cpu`; `cuda` and `cuda:0`, which is lm_eval's default, leave the choice to the engine.
        batch_size, max_batch_size: lm_eval's. The engine gets all requests at once and forms its own batches.
        options: the configuration, by the names that `toka_async.LLM` takes.

    Raises:
        ConfigError, ModelError, TokenizerError, EngineDeadError: as `toka_async.LLM`.
    """

    def __init__(
        self,
        pretrained: str = "demo",
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | None = None,
        chat_template_args: dict[str, Any] | None = None,
        device: str = "cuda",
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._name = pretrained
        self.llm = LLM(pretrained, device="auto" if device in ("cuda", "cuda:0") else device, **options)
        self.tokenizer = self.llm.get_tokenizer()
        longest = self.llm.llm_engine.model_config.max_model_len - ROOM
        if max_length is not None and not 0 < max_length <= longest:
            raise ValueError(f"max_length={max_length}: expected 1 to {longest} tokens")
        self.max_length = longest if max_length is None else max_length
        self.max_gen_toks = max_gen_toks
        self.batch_size, self.max_batch_size = batch_size, max_batch_size
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id
        self._think_end_token = think_end_token
        self._template_args = dict(chat_template_args or {})
        if enable_thinking is not None:
            self._template_args["enable_thinking"] = enable_thinking

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        return self._name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self._template_args,
        )
        assert isinstance(text, str)
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_others: Any) -> list[int]:
        """Encode a text; a begin token that it has already is not put before it once more."""
        if add_special_tokens is None:
            add_special_tokens = self._add_bos_token
            if has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
                add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **special))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihoods of whole texts, in windows of the model's context."""
        windows = [self._list_windows(request.args[0]) for request in requests]
        pieces = iter(self._loglikelihood_tokens([each for some in windows for each in some], disable_tqdm))
        totals = [sum(next(pieces)[0] for _ in some) for some in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _list_windows(self, text: str) -> list[tuple[None, list[int], list[int]]]:
        tokens, prefix = self.tok_encode(text), self.prefix_token_id
        windows = get_rolling_token_windows(tokens, prefix, self.max_length, context_len=1)
        return [(None, *make_disjoint_window(window)) for window in windows]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_others: Any
    ) -> list[tuple[float, bool]]:
        prompts = [cut_context(context, continuation, self.max_length + 1) for _, context, continuation in requests]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
        outputs = self._generate([tokens for tokens, _ in prompts], params, disable_tqdm)
        scores = []
        for (key, *_), (tokens, num_context), output in zip(requests, prompts, outputs, strict=True):
            assert output.prompt_logprobs is not None
            scores.append(sum_logprobs(tokens, output.prompt_logprobs, num_context))
            if key is not None:  # a window of a longer text has none
                self.cache_hook.add_partial("loglikelihood", key, scores[-1])
        return scores

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        known: dict[str, SamplingParams] = {}  # equal ones are one object, which the engine gets once
        prompts, params, stops = [], [], []
        for request in requests:
            text, given = request.args
            generation = normalize_gen_kwargs(given, self.max_gen_toks)
            stop = handle_stop_sequences(list(generation["until"]), self.tokenizer.decode(self.eot_token_id))
            tokens, max_tokens = maybe_truncate(self.tok_encode(text), generation["max_gen_toks"], self.max_length)
            # A model's thoughts may have the stop strings of its answer.
            sampling = make_sampling(generation, max_tokens, [] if self._think_end_token else stop)
            key = json.dumps(sampling, sort_keys=True)
            prompts.append(tokens)
            params.append(known.setdefault(key, SamplingParams(**sampling)))
            stops.append(stop)
        texts = []
        outputs = self._generate(prompts, params, disable_tqdm)
        for request, stop, output in zip(requests, stops, outputs, strict=True):
            texts.append(postprocess_generated_text(output.outputs[0].text, stop, self._think_end_token))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _generate(
        self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams], disable_tqdm: bool
    ) -> list[RequestOutput]:
        return self.llm.generate(
            [TokensPrompt(prompt_token_ids=tokens) for tokens in prompts], params, use_tqdm=not disable_tqdm
        )
