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
ANSWERED: list[Message] = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}]
LEAST_HEADER = 4  # characters of a header that the template always writes: shorter ones are frequent in messages too

Render = Callable[..., ChatPrompt]  # of messages, and variables of the template


def turns_of(
    render: Render,
    messages: Sequence[Message],
    prompt: ChatPrompt,
    header: Sequence[int],
    ends: frozenset[int],
    tools: bool = False,
) -> Turns:
    """Find the turns of `prompt`, which is `render(messages)`.

    header  tokens by which the template begins a reply: `reply_header`
    ends    tokens that end a reply
    tools   whether the template shows tools, which come before the first message
    """
    later = _rendered(render, [*messages, *ANSWERED])
    if later is None:
        return Turns()
    shared = common_length(prompt.tokens, later.tokens)
    replies = replies_in(prompt.tokens, header, ends)
    begun = replies.pop()[0] if replies and replies[-1][0] == replies[-1][1] else 0
    cuts = [at for at in (begun, *(at for span in replies for at in span)) if 0 < at <= shared]
    shared = max(cuts, default=shared)  # a template may change a reply in its middle, where no later prompt has a cut
    return Turns(shared or None, _system(render, messages, prompt, tools), replies, begun)


def reply_header(render: Render) -> list[int]:
    """Return the tokens by which the template begins a reply; none where it writes nothing before one."""
    user = {"role": "user", "content": "a"}
    prompt = _rendered(render, [user], tools=None)
    later = _rendered(render, [user, *ANSWERED], tools=None)
    if prompt is None or later is None:
        return []
    shared = common_length(prompt.tokens, later.tokens)
    bare = _rendered(render, [user], tools=None, add_generation_prompt=False)
    before = shared if bare is None else common_length(prompt.tokens, bare.tokens)
    if before < shared:
        return prompt.tokens[before:shared]
    other = _rendered(render, [{"role": "user", "content": "b."}], tools=None)  # the template always writes the header
    return [] if other is None else _after_user(prompt, other, prompt.tokens[shared:])


def _after_user(one: ChatPrompt, other: ChatPrompt, unshared: Sequence[int]) -> list[int]:
    """Return the tokens between a user's message and the reply.

    one, other  prompts that end with different messages of a user
    unshared    tokens at the end of a prompt that the next turn's prompt lacks
    """
    same = common_length(one.tokens[::-1], other.tokens[::-1])
    last, kept = one.tokens[len(one.tokens) - same :], same - len(unshared)
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(one.text), reversed(other.text), strict=False))
    text = "".join(character for character, _ in alike).strip()
    return last[:kept] if kept > 0 and last[kept:] == list(unshared) and len(text) >= LEAST_HEADER else []


def _system(render: Render, messages: Sequence[Message], prompt: ChatPrompt, tools: bool) -> int:
    """Return tokens that any conversation with the same system messages and tools begins with."""
    count = sum(1 for _ in takewhile(lambda message: message["role"] in SYSTEM, messages))
    if not count and not tools:
        return 0
    others = [_rendered(render, [*messages[:count], {"role": "user", "content": text}]) for text in "ab"]
    return min(common_length(prompt.tokens, other.tokens) if other else 0 for other in others)


def _rendered(render: Render, messages: Sequence[Message], **variables: Any) -> ChatPrompt | None:
    try:
        return render(messages, **variables)
    except BimetalError:  # the conversation was made up here
        return None
