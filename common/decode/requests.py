"""Requests of a decoder, and their answers. A decoder is a generator of requests: it never calls the model itself.

    done = yield Rows(step, sampler)          compute rows after the state; the answer is a Computed
    handle = yield Choose(logits, sampler)    choose a token of each row of computed logits
    answer = yield Draft(token, k, depth)     ask the draft model for the tokens after `token`
    (values,) = yield Read((handle,))         copy chosen tokens, or logits, to the host
    yield Emit(token, row)                    output a token of the reply
    yield stretch                             decode a token per step: Stretch; or speculatively: DraftStretch

The decoder itself commits to its state. The driver of a decoder may close it at an Emit or a Stretch; the state then
holds all emitted tokens but the newest (or fewer, in WeDLM's windows). It may also close it at a Rows or a Draft, which
is then not run.
"""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, Protocol

from common.coupled import Coupling
from common.decode.ddtree import Tree
from common.decode.run import DecoderRun
from common.ops import Array
from common.sampling import Sampler
from common.step import State, Step

EVERY = slice(None)
THE_ROW = (0,)  # the path of a step of one row


class Rows(NamedTuple):
    """Compute a step of one sequence.

    step         the step; its tokens may be a handle from a Computed or a Choose
    sampler      chooses a token of each of the rows `sampled`; None: no token is chosen
    mask         the mask token's id, which is excluded from the best token and the entropy of each of the rows `masked`
    target_only  whether to omit the draft's rows of a pair
    """

    step: Step
    sampler: Sampler | None = None
    sampled: slice = EVERY
    mask: int | None = None
    masked: slice = EVERY
    target_only: bool = False


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
    """Request the `k` most probable tokens of each position after `token`, which follows the state.

    coupling  random numbers with which the target will draw; the answer has the `k` tokens that it most probably draws

    The answer is (ids, log-probabilities), each (n, k), on the host; n is the draft's number of positions, at most
    `depth` if each position costs time of its own. If a position depends on the previous token, the answer is
    that of Pair.drafted.
    """

    token: int
    k: int
    depth: int
    coupling: Coupling | None = None


class Read(NamedTuple):
    """Copy handles or logits to the host; the answer is a tuple of arrays, one for each of `arrays`."""

    arrays: tuple[Any, ...]


class Emit(NamedTuple):
    """Output the next token of the reply, and the logits row (1, vocab) that it was chosen from."""

    token: int
    row: Array


class Stretch:
    """Decode a token per step, in steps that are launched before the host reads the previous token.

    For each token the driver runs `rows`, outputs the token before these rows, and calls `goes_on`. One request covers
    many steps, because a step may be as short as the host's work for a request. The decoder continues after the last.

    token      handle of the newest token
    row        the logits row (1, vocab) that it was chosen from
    remaining  number of tokens that are still to be output
    read_ids   list to which token ids are appended as they are read
    """

    __slots__ = ("read_ids", "remaining", "row", "run", "token")

    def __init__(self, run: DecoderRun, token: Any, row: Array, remaining: int, read_ids: list[int] | None = None):
        self.run, self.token, self.row, self.remaining, self.read_ids = run, token, row, remaining, read_ids

    def rows(self) -> Rows:
        """Make a request for the row of the newest token."""
        return Rows(Step.chain(self.token, self.run.state.length), self.run.sampler, target_only=True)

    def note(self, token: int) -> None:
        """Record the id of the newest token, which has been read."""
        if self.read_ids is not None:
            self.read_ids.append(token)

    def goes_on(self, done: Computed) -> bool:
        """Commit the newest token's row, and take the token that it predicts; return whether the stretch continues."""
        run = self.run
        run.state.commit(THE_ROW)
        self.token, self.row, self.remaining = done.sampled, done.logits, self.remaining - 1
        left = min(self.remaining, run.state.capacity - run.state.length)
        return left > 0 and run.runs_ahead and not run.reconsiders


class TreeSource(Protocol):
    """Makes the tree of each speculative step of a reply: speculative.py Drafter."""

    def tree(self, state: State, token: int, budget: int) -> Generator[Draft, Any, Tree]:
        """Draft at most `budget` continuations of `token`, the newest one; may request a Draft."""

    def note(self, budget: int, tokens: Sequence[int], path: Sequence[int], seconds: float) -> int:
        """Record a step and the tokens that it gave; return the budget of the next step, 0 for a plain one."""


class DraftStretch:
    """Decode speculatively, in steps that the driver drafts and verifies for several sequences at once.

    For each step the driver runs `source.tree`, verifies the tree, outputs the tokens that the model chose, commits
    their path, and calls `goes_on`. The decoder continues after the last step. A driver that answers before the first
    step declines: the decoder then makes a request for each part of a step.

    token   id of the newest token, which the state lacks
    budget  maximum number of draft tokens of the next step
    steps   number of steps so far
    kept    tokens of the last step that were not output yet: the driver may launch the next step first
    """

    __slots__ = ("budget", "kept", "run", "source", "steps", "token")

    def __init__(self, run: DecoderRun, source: TreeSource, token: int, budget: int):
        self.run, self.source, self.token, self.budget, self.steps = run, source, token, budget, 0
        self.kept: list[int] = []

    def goes_on(self, tokens: Sequence[int], path: Sequence[int], seconds: float) -> bool:
        """Note the tokens of a step, whose `path` is committed; test whether another step follows."""
        self.token, self.steps = tokens[-1], self.steps + 1
        self.budget = self.source.note(self.budget, tokens, path, seconds)
        return self.budget > 0 and self.run.state.length < self.run.state.capacity


Request = Rows | Choose | Draft | Read | Emit | Stretch | DraftStretch
ASKS_ROWS = Rows, Stretch, DraftStretch  # requests that a step of the model answers
