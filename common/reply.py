"""Reasoning, text and tool calls of a reply, parsed while the model writes it."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from common.tools import OPEN, read_call, read_cut_call, schemas, syntax_of

THINK, END_THINK = "<think>", "</think>"


class Tags(NamedTuple):
    """Texts around reasoning: what opens and what closes it, and what closes it before its end.

    begins  whether every reply begins with reasoning that it opens itself
    """

    opening: str
    closing: str
    early: str
    begins: bool = False


THINKING = Tags(THINK, END_THINK, f"\n{END_THINK}\n\n")


@dataclass(slots=True)
class Parts:
    """Parts of a reply that can no longer change.

    tool_calls  as OpenAI streams them: {"index", "id", "type", "function": {"name", "arguments": JSON text}}
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


class Parser(Protocol):
    """Parser of one reply, by the format of its chat template; `calls` counts the calls so far."""

    calls: int

    @property
    def in_reasoning(self) -> bool: ...

    @property
    def takes_calls(self) -> bool: ...

    def push(self, text: str, parts: Parts) -> None: ...

    def finish(self, parts: Parts, is_cut: bool = False) -> None: ...


class ReplyParser:
    """Parser of one reply by the syntax of its chat template; no part of a tag is ever shown.

    The parts do not depend on how the reply is cut into pieces. Reasoning lasts until </think> if the prompt ends with
    <think> or the reply begins with it, and is stripped of white space; a call inside the reasoning is reasoning. Calls
    are parsed if there are tools and the template shows a syntax of common.tools. A malformed call and a call that
    never ends are text, including their tags; but where the tokens of the reply were used up, a call ends with it.
    """

    def __init__(self, template: str, prompt: str, tools: Sequence[Any] | None = None, begun: str = ""):
        """template: Jinja source; prompt: what it rendered; tools: as in OpenAI's API.

        begun  text after the prompt with which the reply has begun, and which is not shown
        """
        self._schemas = schemas(tools or ())
        self._syntax = syntax_of(template) if tools else None
        bare, self._open = (self._syntax.bare, self._syntax.open) if self._syntax else ("", OPEN)
        self._openers = (self._open, *(bare.format(name) for name in self._schemas if bare))
        self._thinks = THINK in template
        self._state: Callable[[Parts, bool], bool] = self._text
        if self._thinks:
            self._state = self._reasoning if prompt.rstrip().endswith(THINK) else self._start
        self._held = ""  # read, but not shown yet
        self._shown = False  # whether any text has been shown, or any reasoning while it lasts
        self._body = self._scan = 0  # start of a call's body in _held; position up to which its end has been searched
        self._bare = False  # whether that call began without <tool_call>
        self._after_call = self._is_cut = False
        self.calls = 0
        if begun:
            self.push(begun, Parts())
            self._held = self._held if self._state == self._call else ""

    @property
    def in_reasoning(self) -> bool:
        """Test whether what was read so far ends in the reasoning."""
        return self._state == self._reasoning

    @property
    def takes_calls(self) -> bool:
        """Test whether calls are parsed."""
        return self._syntax is not None

    def push(self, text: str, parts: Parts) -> None:
        """Read more of the reply, and add the parts that can no longer change to `parts`."""
        self._held += text
        while self._state(parts, False):
            pass

    def finish(self, parts: Parts, is_cut: bool = False) -> None:
        """Add the held text to `parts`, after the end of the reply.

        is_cut  the reply ended because its tokens were used up: a call that has begun has the arguments so far, and is
                left out if its name is not complete
        """
        self._is_cut = is_cut
        while self._state(parts, True):
            pass

    # The states. Each takes text from _held, and returns whether the state that it has set can continue. `is_last`: no
    # more text follows.

    def _start(self, parts: Parts, is_last: bool) -> bool:
        begun = self._held.lstrip()
        if begun.startswith(THINK):
            self._held, self._state = begun[len(THINK) :], self._reasoning
            return True
        if THINK.startswith(begun) and not is_last:
            return False
        self._state = self._text
        return True

    def _reasoning(self, parts: Parts, is_last: bool) -> bool:
        at = self._held.find(END_THINK)
        until = at if at >= 0 else len(self._held) - (0 if is_last else overlap(self._held, END_THINK))
        sure = self._held[:until].rstrip()
        parts.reasoning += sure if self._shown else sure.lstrip()
        self._shown |= bool(sure)
        if at < 0:
            self._held = "" if is_last else self._held[len(sure) :]
            return False
        self._held, self._state, self._shown = self._held[at + len(END_THINK) :], self._text, False
        return True

    def _text(self, parts: Parts, is_last: bool) -> bool:
        if self._thinks and not self._shown:
            self._held = self._held.lstrip("\n")
        if self._syntax is None:
            self._show(parts, len(self._held))
            return False
        found = [(at, opener) for opener in self._openers if (at := self._held.find(opener)) >= 0]
        if found:
            at, opener = min(found)
            self._show(parts, len(self._held[:at].rstrip()))
            self._bare = opener != self._open
            self._body = self._scan = self._held.find(opener) + (0 if self._bare else len(self._open))
            self._state = self._call
            return True
        if not is_last:
            keep = max(overlap(self._held, opener) for opener in self._openers)
            self._show(parts, len(self._held[: len(self._held) - keep].rstrip()))
        elif self._held.strip() or not self._after_call:
            tag = max(overlap(self._held, opener) for opener in self._openers) if self._is_cut else 0
            self._show(parts, len(self._held) - tag)
        return False

    def _call(self, parts: Parts, is_last: bool) -> bool:
        """Read a call up to its closing tag; a malformed call becomes text. False: more of the reply is needed."""
        assert self._syntax
        lead = self._syntax.lead
        if not lead.startswith(self._held[self._body :].lstrip()[: len(lead)]):
            self._show(parts, self._body)  # this is no call: show it without waiting for an end
            self._state = self._text
            return True
        close = self._syntax.close or self._open
        at = self._held.find(close, self._scan)
        if at < 0 and not is_last:
            self._scan = max(self._body, len(self._held) - len(close) + 1)
            return False
        if not self._syntax.close:
            return self._open_call(parts, at if at >= 0 else len(self._held), at < 0 and self._is_cut)
        closed = at >= 0
        after = at + len(close) if closed else len(self._held)
        function = None
        if closed or self._bare:
            try:
                function = read_call(self._syntax, self._held[self._body : at if closed else after], self._schemas)
                if function is None and closed:
                    self._scan = after
                    return True
            except ValueError:
                pass  # no call, but text
        is_cut = self._is_cut and not closed
        if is_cut and function is None:
            function = read_cut_call(self._syntax, self._held[self._body :], self._schemas)
        if function is None and not is_cut:
            self._show(parts, after)
        else:
            self._held, self._after_call = self._held[after:], True
        if function is not None:
            self._add(parts, function)
        self._state = self._text
        return True

    def _open_call(self, parts: Parts, end: int, is_cut: bool) -> bool:
        """Read the calls between a tag and `end`, of a syntax without closing tags; malformed ones become text."""
        assert self._syntax
        bodies = self._syntax.split(self._held[self._body : end]) or [""]
        found = self._read(bodies)
        if found and found[-1] is None and end < len(self._held):  # the tag belongs to a string
            self._scan = end + len(self._open)
            return True
        is_whole = None not in found if found else False
        if is_cut and not is_whole:
            found = self._read(bodies, is_cut=True)
        if is_whole or is_cut:
            self._held, self._after_call = self._held[end:], True
            for function in found:
                if function is not None:
                    self._add(parts, function)
        else:
            self._show(parts, end if end == len(self._held) else len(self._held[:end].rstrip()))
        self._state = self._text
        return True

    def _read(self, bodies: Sequence[str], is_cut: bool = False) -> list[dict[str, str] | None]:
        """Read calls, the last of which may be cut; [] if one is malformed, None for one that ends inside a string."""
        assert self._syntax
        *whole, last = bodies
        read_last = read_cut_call if is_cut else read_call
        try:
            found = [read_call(self._syntax, body, self._schemas) for body in whole]
            return [*found, read_last(self._syntax, last, self._schemas)]
        except ValueError:
            return []

    def _add(self, parts: Parts, function: dict[str, str]) -> None:
        assert self._syntax
        parts.tool_calls.append(call_object(self.calls, function, self._syntax.id))
        self.calls += 1

    def _show(self, parts: Parts, until: int) -> None:
        text, self._held = self._held[:until], self._held[until:]
        parts.text += text
        if text:
            self._shown, self._after_call = True, False


def call_object(index: int, function: dict[str, str], characters: int | None = None) -> dict[str, Any]:
    """Return a call of `Parts` with an id that is random under a seed too: ids must differ between turns.

    characters  of the id; None: any number
    """
    id = f"call_{secrets.token_hex(12)}" if characters is None else secrets.token_hex(16)[:characters]
    return {"index": index, "id": id, "type": "function", "function": function}


def overlap(text: str, tag: str) -> int:
    """Compute the length of the longest suffix of `text` that is a prefix of `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
