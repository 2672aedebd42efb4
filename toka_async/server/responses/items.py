"""Writes the items of a response as the parts of its answer come, and the events that tell of it in a stream.

Items come one after the other, in the order in which the model wrote them. What follows an item of another kind is an
item of its own. An item ends when the next one begins or the answer ends, calls too: the last item of an answer that is
cut off is incomplete, and that is known no earlier.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from toka_async.openai.responses import TokenLogprob
from toka_async.server.responses.objects import (
    ArgumentsDelta,
    ArgumentsDone,
    EventInItem,
    FunctionCall,
    ItemEvent,
    OutputItem,
    OutputMessage,
    OutputText,
    PartEvent,
    ReasoningDelta,
    ReasoningDone,
    ReasoningItem,
    ReasoningText,
    SummaryDelta,
    SummaryDone,
    SummaryPartEvent,
    SummaryText,
    TextDelta,
    TextDone,
)
from toka_async.server.responses.requests import ItemStatus
from toka_async.text.formats.parser import Call, Part

Logprobs = Sequence[TokenLogprob]
PartStep = Literal["response.content_part.added", "response.content_part.done"]
SummaryStep = Literal["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"]
PART_STEPS: tuple[PartStep, PartStep] = get_args(PartStep)
SUMMARY_STEPS: tuple[SummaryStep, SummaryStep] = get_args(SummaryStep)
Events = list[ItemEvent | EventInItem]


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


@dataclass(slots=True)
class OpenMessage:
    """An item while its text comes: the message. index: its place among the items."""

    PREFIX: ClassVar = "msg"

    index: int
    id: str
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def make_delta(self, text: str, logprobs: Logprobs) -> EventInItem:
        return TextDelta(output_index=self.index, item_id=self.id, delta=text, logprobs=list(logprobs))

    def make_part(self, *, is_done: bool) -> EventInItem:
        part = OutputText(text=self.text, logprobs=self.logprobs)
        return PartEvent(type=PART_STEPS[is_done], output_index=self.index, item_id=self.id, part=part)

    def make_done(self) -> EventInItem:
        return TextDone(output_index=self.index, item_id=self.id, text=self.text, logprobs=self.logprobs)

    def make_item(self, status: ItemStatus) -> OutputItem:
        parts = [] if status == "in_progress" else [OutputText(text=self.text, logprobs=self.logprobs)]
        return OutputMessage(id=self.id, status=status, content=parts)


class OpenReasoning(OpenMessage):
    """The same of a thought."""

    PREFIX = "rs"

    def make_delta(self, text: str, logprobs: Logprobs) -> EventInItem:
        del logprobs  # answers have those of messages only
        return ReasoningDelta(output_index=self.index, item_id=self.id, delta=text)

    def make_part(self, *, is_done: bool) -> EventInItem:
        part = ReasoningText(text=self.text)
        return PartEvent(type=PART_STEPS[is_done], output_index=self.index, item_id=self.id, part=part)

    def make_done(self) -> EventInItem:
        return ReasoningDone(output_index=self.index, item_id=self.id, text=self.text)

    def make_item(self, status: ItemStatus) -> OutputItem:
        parts = [] if status == "in_progress" else [ReasoningText(text=self.text)]
        return ReasoningItem(id=self.id, status=status, content=parts)


class OpenSummary(OpenMessage):
    """The same of a thought that is written as its own summary."""

    PREFIX = "rs"

    def make_delta(self, text: str, logprobs: Logprobs) -> EventInItem:
        del logprobs
        return SummaryDelta(output_index=self.index, item_id=self.id, delta=text)

    def make_part(self, *, is_done: bool) -> EventInItem:
        part = SummaryText(text=self.text)
        return SummaryPartEvent(type=SUMMARY_STEPS[is_done], output_index=self.index, item_id=self.id, part=part)

    def make_done(self) -> EventInItem:
        return SummaryDone(output_index=self.index, item_id=self.id, text=self.text)

    def make_item(self, status: ItemStatus) -> OutputItem:
        parts = [] if status == "in_progress" else [SummaryText(text=self.text)]
        return ReasoningItem(id=self.id, status=status, summary=parts)


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call, before it is known what follows it."""

    index: int
    id: str
    call_id: str
    call: Call

    def make_item(self, status: ItemStatus) -> FunctionCall:
        arguments = "" if status == "in_progress" else self.call.arguments
        return FunctionCall(id=self.id, status=status, call_id=self.call_id, name=self.call.name, arguments=arguments)


class OutputWriter:
    """The items of one response.

    Args:
        new_call_id: makes the id of a call.
        summarizes: reasoning is written as a summary, word for word.

    Attributes:
        items: those that are done.
    """

    def __init__(self, new_call_id: Callable[[], str], *, summarizes: bool) -> None:
        self.items: list[OutputItem] = []
        self._new_call_id = new_call_id
        self._kinds = {"content": OpenMessage, "reasoning": OpenSummary if summarizes else OpenReasoning}
        self._open: OpenMessage | OpenCall | None = None
        self._thoughts: list[str] = []

    @property
    def reasoning(self) -> str:
        """All that the model thought."""
        return "".join(self._thoughts)

    def add(self, part: Part, logprobs: Logprobs = ()) -> Events:
        """Returns the events of a part; `logprobs` are those of the tokens that wrote it."""
        if isinstance(part, Call):
            return [*self._close("completed"), *self._add_call(part)]
        name, text = part
        kind, events = self._kinds[name], Events()
        if type(self._open) is not kind:
            events += [*self._close("completed"), *self._begin(kind)]
        assert isinstance(self._open, OpenMessage)
        self._open.texts.append(text)
        self._open.logprobs += logprobs
        if name == "reasoning":
            self._thoughts.append(text)
        return [*events, self._open.make_delta(text, logprobs)]

    def end(self, *, is_cut: bool) -> Events:
        """Closes the last item. An answer without any has a message without text, since clients look for one."""
        events = [] if self.items or self._open else self._begin(OpenMessage)
        return [*events, *self._close("incomplete" if is_cut else "completed")]

    def _begin(self, kind: type[OpenMessage]) -> Events:
        made = self._open = kind(len(self.items), new_id(kind.PREFIX))
        item = made.make_item("in_progress")
        return [
            ItemEvent(type="response.output_item.added", output_index=made.index, item=item),
            made.make_part(is_done=False),
        ]

    def _close(self, status: ItemStatus) -> Events:
        done, self._open = self._open, None
        if done is None:
            return []
        self.items.append(done.make_item(status))
        event = ItemEvent(type="response.output_item.done", output_index=done.index, item=self.items[-1])
        return [event] if isinstance(done, OpenCall) else [done.make_done(), done.make_part(is_done=True), event]

    def _add_call(self, call: Call) -> Events:
        made = self._open = OpenCall(len(self.items), new_id("fc"), self._new_call_id(), call)
        item, index = made.make_item("in_progress"), made.index
        return [
            ItemEvent(type="response.output_item.added", output_index=index, item=item),
            ArgumentsDelta(output_index=index, item_id=made.id, delta=call.arguments),
            ArgumentsDone(output_index=index, item_id=made.id, name=call.name, arguments=call.arguments),
        ]
