"""Parts of a chat prompt: the end of the system prompt, what the next turn repeats, earlier replies.

They are found by rendering other conversations and comparing tokens, which works for every template.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from common.chat import ChatPrompt, Message
from common.errors import BimetalError
from common.reading import Turns, common_length, replies_in

SYSTEM = ("system", "developer")

Render = Callable[..., ChatPrompt]  # of messages, and variables of the template


def turns_of(
    render: Render, messages: Sequence[Message], prompt: ChatPrompt, ends: frozenset[int], tools: bool = False
) -> Turns:
    """The turns of `prompt`, which is `render(messages)`.

    ends   tokens that end a reply
    tools  whether the template shows tools, which come before the first message
    """
    later = _rendered(render, [*messages, {"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}])
    bare = _rendered(render, messages, add_generation_prompt=False)
    if later is None:
        return Turns()
    shared = common_length(prompt.tokens, later.tokens)
    before = len(prompt.tokens) if bare is None else common_length(prompt.tokens, bare.tokens)
    header = prompt.tokens[before:shared]
    return Turns(shared or None, _system(render, messages, prompt, tools), replies_in(prompt.tokens, header, ends))


def _system(render: Render, messages: Sequence[Message], prompt: ChatPrompt, tools: bool) -> int:
    """Tokens that any conversation with the same system messages and tools begins with."""
    count = sum(1 for _ in takewhile(lambda message: message["role"] in SYSTEM, messages))
    if not count and not tools:
        return 0
    others = [_rendered(render, [*messages[:count], {"role": "user", "content": text}]) for text in "ab"]
    return min(common_length(prompt.tokens, other.tokens) if other else 0 for other in others)


def _rendered(render: Render, messages: Sequence[Message], **variables: Any) -> ChatPrompt | None:
    try:
        return render(messages, **variables)
    except BimetalError:  # nobody asked for this conversation
        return None
