"""Finds a model's format: the configured one, the tokenizer's `response_template`, or what its chat template shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from toka_async.grammars.lark import rename_start
from toka_async.text.formats.format import Format, new_call_id
from toka_async.text.formats.harmony import HARMONY
from toka_async.text.formats.hermes import HERMES
from toka_async.text.formats.llama_json import LLAMA_JSON
from toka_async.text.formats.mistral import MISTRAL
from toka_async.text.formats.output_grammar import (
    CallRules,
    GrammarTokens,
    Thought,
    UnwritableError,
    allow_thought,
    write_any_text,
)
from toka_async.text.formats.parser import Parameters, ResponseParser
from toka_async.text.formats.pythonic import PYTHONIC
from toka_async.text.formats.qwen3_coder import QWEN3_CODER
from toka_async.text.formats.template import ReadCalls, ResponseTemplate, ResponseTemplateError, read_template
from toka_async.text.formats.thinking import MISTRAL_THINK, THINK

# A chat template is of the first of these whose signs it has.
TOOL_FORMATS = {each.name: each for each in (HARMONY, MISTRAL, QWEN3_CODER, HERMES, PYTHONIC, LLAMA_JSON)}
REASONING_FORMATS = {each.name: each for each in (HARMONY, MISTRAL_THINK, THINK)}
START_ANCHORS = ["<|im_start|>assistant\n", "<|start|>assistant", "<｜Assistant｜>", "[/INST]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    """How a model's answers are written.

    calls, reasoning: its formats; None where there is none, or where `template` alone reads what nothing else knows.
    """

    template: ResponseTemplate
    has_reasoning: bool
    has_calls: bool
    calls: Format | None = None
    reasoning: Format | None = None

    @property
    def new_id(self) -> Callable[[], str]:
        return new_call_id if self.calls is None else self.calls.new_id

    @property
    def thought(self) -> Thought | None:
        return None if self.reasoning is None else self.reasoning.thought

    def write_answer(
        self, tokens: GrammarTokens, written: str, *, content: str, calls: CallRules | None, budget: int | None
    ) -> str:
        """Writes the grammar of whole answers; empty: anything.

        Args:
            written: what the prompt has of the answer already.
            content: the grammar of what is no thought and no call; empty: any text.
            calls: those that an answer may have; None: whatever the model writes.
            budget: the most tokens of a thought; None: any number.

        Raises UnwritableError.
        """
        thought = self.thought
        if budget is not None and thought is None:
            raise UnwritableError("the model's format of answers has no thoughts")
        is_over = thought is not None and thought.is_over(written)
        if thought is not None and not is_over:
            tokens = tokens.hide(thought.opening)
        grammar = self._write_output(tokens, content, calls, is_over)
        if grammar == "" and budget is not None and not is_over:
            write_rest = write_any_text if self.reasoning is None else self.reasoning.write_rest or write_any_text
            grammar = write_rest(tokens)
        if grammar == "" or thought is None or is_over:
            return grammar
        return allow_thought(grammar, thought, tokens, is_open=thought.is_open(written), budget=budget)

    def _write_output(self, tokens: GrammarTokens, content: str, calls: CallRules | None, is_over: bool) -> str:
        """The grammar of what follows a thought; empty: anything."""
        wrap = next((each.wrap_content for each in (self.calls, self.reasoning) if each and each.wrap_content), None)
        if content and wrap is not None and not is_over:
            content = wrap(content, tokens)
        if calls is None:
            return content
        if self.calls is None or self.calls.write_calls is None:
            raise UnwritableError("calls in the model's format cannot be enforced")
        calls.check_spacing()
        if not content:
            return self.calls.write_calls(calls, tokens)
        forced = rename_start(self.calls.write_calls(replace(calls, is_forced=True), tokens), "toka_calls")
        return f"start: toka_calls | toka_content_alone\n{forced}{rename_start(content, 'toka_content_alone')}"

    def find_markers(self, special: Iterable[str]) -> frozenset[str]:
        """Those special tokens that the format reads, so that texts have to have them."""
        anchors = [anchor for each in self.template.regions for anchor in (each.open, each.close) if anchor is not None]
        sources = [anchor.whole.pattern for anchor in anchors]
        named = () if self.calls is None else self.calls.markers
        return frozenset(each for each in special if each in named or any(re.escape(each) in one for one in sources))

    def start(self, tools: Parameters, most_calls: int | None, keeps_reasoning: bool, written: str) -> ResponseParser:
        """The parser of one sample. written: what its prompt has of it already."""
        read_calls: ReadCalls | None = None if self.calls is None else self.calls.read_calls
        return ResponseParser(
            self.template,
            tools,
            read_calls,
            most_calls=most_calls,
            keeps_reasoning=keeps_reasoning,
            written=written,
        )


def choose_format(
    chat_template: str, tool_format: str, reasoning_format: str, own: Any = None
) -> ResponseFormat | None:
    """Returns None for a model that writes neither reasoning nor calls, as far as can be told.

    tool_format, reasoning_format: `auto`, `none` or a name. own: the tokenizer's response template, which counts where
    both are `auto`. Raises ResponseTemplateError when it is malformed.
    """
    calls = _choose(TOOL_FORMATS, tool_format, chat_template)
    reasoning = _choose(REASONING_FORMATS, reasoning_format, chat_template)
    if own is not None and tool_format == reasoning_format == "auto":
        template = read_template(own)
        if any(each.kind == "calls" for each in template.regions):
            raise ResponseTemplateError("there is no content 'calls'")
        has_reasoning = any(each.is_reasoning for each in template.regions)
        has_calls = any(each.is_calls for each in template.regions)
        return ResponseFormat(
            template=template,
            has_reasoning=has_reasoning,
            has_calls=has_calls,
            calls=calls if has_calls else None,
            reasoning=reasoning if has_reasoning else None,
        )
    if calls is None and reasoning is None:
        return None
    both = {**({} if reasoning is None else reasoning.fields), **({} if calls is None else calls.fields)}
    fields = both if HARMONY in (calls, reasoning) else {**both, "content": {}}
    if calls is None:
        fields.pop("tool_calls", None)
    return ResponseFormat(
        template=read_template({"start_anchor": START_ANCHORS, "fields": fields}),
        has_reasoning=reasoning is not None,
        has_calls=calls is not None,
        calls=calls,
        reasoning=reasoning,
    )


def _choose(formats: dict[str, Format], name: str, chat_template: str) -> Format | None:
    if name == "auto":
        return next((each for each in formats.values() if each.is_in(chat_template)), None)
    return formats.get(name)
