"""gpt-oss' format, harmony: messages in channels, whose headers name the channel and the recipient.

The recipient may stand in the channel's header or, as gpt-oss also writes it, before the channel.
"""

from __future__ import annotations

from toka_async.grammars.lark import rename_start, write_json, write_text
from toka_async.text.formats.format import Format
from toka_async.text.formats.output_grammar import (
    CallRules,
    GrammarTokens,
    Thought,
    UnwritableError,
)

ENDS = ["<|end|>", "<|return|>", "<|call|>"]
AUTHOR = r"(?:<\|start\|>assistant)?"
CONSTRAIN = r"[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
CHANNEL = r"<\|channel\|>(?:commentary|analysis)"

MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")


def write_calls(rules: CallRules, tokens: GrammarTokens) -> str:
    """One call, which ends the answer. Where the model may choose, messages to the user stand instead, or before."""
    text, marks = _find_marks(tokens)
    start, channel, constrain, message, end = marks
    json_tail = f'(" "? {constrain} "json" | " json")? {message}'
    arguments = {
        name: write_json(schema or {"type": "object"}, strict=is_strict)
        for name, (schema, is_strict) in rules.schemas.items()
    }
    named = [(write_text(f" to=functions.{name}"), each) for name, each in arguments.items()]
    after_channel = " | ".join(f"{to} {json_tail} {each}" for to, each in named)
    in_role = " | ".join(f'{to} {channel} "commentary" {json_tail} {each}' for to, each in named)
    calls = f'{channel} "commentary" ({after_channel}) | {in_role}'
    if rules.is_forced:
        return f"start: {calls}\n"
    return (
        "start: toka_preamble* (toka_call | toka_final)\n"
        f"toka_call: {calls}\n"
        f'toka_preamble: {channel} "commentary" {message} {text}* {end} {start} "assistant"\n'
        f'toka_final: {channel} "final" {message} {text}*\n'
    )


def wrap_content(grammar: str, tokens: GrammarTokens) -> str:
    """The message to the user."""
    _, (_, channel, constrain, message, _) = _find_marks(tokens)
    head = f'{channel} "final" (" "? {constrain} "json")? {message}'
    return f"start: {head} toka_content\n{rename_start(grammar, 'toka_content')}"


def write_rest(tokens: GrammarTokens) -> str:
    """Anything but one more thought."""
    _, (_, channel, *_) = _find_marks(tokens)
    other = tokens.write_any(*[each for each in [tokens.find("<|channel|>")] if each is not None])
    return f'start: {other}* ({channel} ("final" | "commentary") {other}*)*\n'


def _find_marks(tokens: GrammarTokens) -> tuple[str, list[str]]:
    """Any one token of a text, and the tokens that mark messages. Raises UnwritableError."""
    ids = [found for each in MARKS if (found := tokens.find(each)) is not None]
    if len(ids) < len(MARKS):
        raise UnwritableError(f"the tokenizer does not have all of the format's tokens: {', '.join(MARKS)}")
    return tokens.write_any(*ids), [f"<[{each}]>" for each in ids]


HARMONY = Format(
    name="harmony",
    signs=(("<|channel|>", "<|message|>"),),
    fields={
        "reasoning_content": {"open_pattern": rf"{AUTHOR}<\|channel\|>analysis<\|message\|>", "close": ENDS},
        "tool_calls": {
            "open_pattern": rf"{AUTHOR}(?:{CHANNEL})? to=functions\.(?P<name>[\w-]+)(?:{CHANNEL})?{CONSTRAIN}",
            "close": ENDS,
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {
            "open_pattern": rf"{AUTHOR}<\|channel\|>(?:final|commentary) ?(?:<\|constrain\|>\w*)?<\|message\|>",
            "close": ENDS,
            "repeats": True,
        },
        "other": {},
    },
    write_calls=write_calls,
    thought=Thought("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant"),
    wrap_content=wrap_content,
    write_rest=write_rest,
)
