"""Requests of a decoder, and their answers. A decoder is a generator of requests: it never calls the model itself.

    done = yield Rows(step, sampler)          compute rows after the state; the answer is a Computed
    done = yield Rows(..., newest=newest)     hand over a token of the reply once the rows have been launched
    handle = yield Choose(logits, sampler)    choose a token of each row of logits that exist already
    answer = yield Draft(token, k, depth)     ask the draft model for the tokens after `token`
    (values,) = yield Read((handle,))         bring what was chosen, or logits, to the host
    yield Emit(token, row)                    hand over a token of the reply

The decoder commits to its state itself. Whoever drives a decoder may close it at an Emit, and at Rows that hand over a
token, after which the state holds all tokens emitted so far but the newest (or fewer, in WeDLM's windows); and at other
Rows or a Draft, which then is never run.
"""

from typing import Any, NamedTuple

from common.coupled import Coupling
from common.ops import Array
from common.sampling import Sampler
from common.step import Step

EVERY = slice(None)


class Newest(NamedTuple):
    """The newest token of a reply, which the rows of a step follow: read and emitted once they have been launched.

    token  its handle
    row    the logits row (1, vocab) that it was chosen from
    read   list to which its id is appended before it is emitted; None: nobody asks for it
    """

    token: Any
    row: Array
    read: list[int] | None = None


class Rows(NamedTuple):
    """Compute a step of one sequence.

    step         its tokens may be the handle that a Computed or a Choose gave
    sampler      chooses a token of each of the rows `sampled`; None: nothing is chosen
    mask         the mask token's id: the likeliest other token of each of the rows `masked`, and their entropies
    target_only  leaves nothing for the draft of a pair
    newest       emitted before the answer, without a request of its own; None: the decoder emits its tokens itself
    """

    step: Step
    sampler: Sampler | None = None
    sampled: slice = EVERY
    mask: int | None = None
    masked: slice = EVERY
    target_only: bool = False
    newest: Newest | None = None


class Computed(NamedTuple):
    """The answer to Rows.

    logits    (T, vocab), on the device
    sampled   a handle of the chosen tokens, or None; to be read, or to be the tokens of a next step of one row
    masked    handles of ids and entropies of the rows `masked`, or ()
    """

    logits: Array
    sampled: Any
    masked: tuple[Any, ...] = ()


class Choose(NamedTuple):
    """Choose a token of each row of `logits` (T, vocab); the answer is a handle, as Computed.sampled."""

    logits: Array
    sampler: Sampler


class Draft(NamedTuple):
    """Ask for the `k` likeliest tokens of each position after `token`, which follows the state.

    coupling  random numbers with which the target will draw; the answer has the `k` tokens that it most probably draws

    The answer is (ids, log-probabilities), each (n, k), on the host; n is what the draft gives, at most `depth` where
    each position costs time of its own. Where a position depends on the token before, it is that of Pair.drafted.
    """

    token: int
    k: int
    depth: int
    coupling: Coupling | None = None


class Read(NamedTuple):
    """Bring handles or logits to the host; the answer is a tuple of arrays, one for each of `of`."""

    of: tuple[Any, ...]


class Emit(NamedTuple):
    """Hand over the next token of the reply, and the logits row (1, vocab) that it was chosen from."""

    token: int
    row: Array


Request = Rows | Choose | Draft | Read | Emit
