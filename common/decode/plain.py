"""Plain autoregressive decoding: one row per step."""

from collections.abc import Callable, Generator

from common.decode.run import Run
from common.models import Model
from common.models.dflash import Pair
from common.ops import Array
from common.sampling import Sampler
from common.step import State, Step


def decode(run: Run) -> Generator[tuple[int, Array], None, None]:
    """Decode without a draft; one that was loaded is left alone."""
    return plain(target_of(run.model), run.state, run.logits, run.sampler)


def target_of(model: Model) -> Model:
    """The model without its draft."""
    return model.target if isinstance(model, Pair) else model


def plain(
    model: Model, state: State, logits: Array, sampler: Sampler, goes_on: Callable[[], bool] | None = None
) -> Generator[tuple[int, Array], None, None]:
    """Yield (token, the logits row (1, vocab) it was drawn from) until the state is full or the caller stops.

    logits   of the last prompt row. The state then holds all tokens but the newest, so a caller may stop after any
             yield and go on later from that token.
    goes_on  called once per token, before it is read; False ends the generator after that token
    """
    ops = model.ops
    runs_ahead = ops.runs_ahead and ops.chooses(sampler)
    token = ops.sample(logits, sampler)
    while True:
        ahead, is_last = None, goes_on is not None and not goes_on()
        if runs_ahead and not is_last and state.length < state.capacity:
            ahead = _step(model, state, token)  # the device computes it while the host reads and prints the token
            next_token = ops.sample(ahead, sampler)
        value = int(ops.read(token)[0])
        sampler.accept(value)
        yield value, logits
        if is_last or state.length >= state.capacity:
            return
        if ahead is None:
            ahead = _step(model, state, token)
            next_token = ops.sample(ahead, sampler)
        state.commit([0])
        logits, token = ahead, next_token


def _step(model: Model, state: State, token: Array) -> Array:
    return model.forward(state, Step.chain(token, state.length))
