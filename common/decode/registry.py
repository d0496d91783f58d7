"""From a row of common.decoders to the function that decodes."""

from collections.abc import Callable, Generator

from common.decode import plain, speculative
from common.decode.run import Run
from common.ops import Array

Decode = Callable[[Run], Generator[tuple[int, Array], None, None]]

FAMILIES: dict[str, Decode] = {"plain": plain.decode, "speculative": speculative.decode}


def decode(run: Run) -> Generator[tuple[int, Array], None, None]:
    """Yield (token, the logits row (1, vocab) it was drawn from) until the state is full or the caller stops."""
    return FAMILIES[run.options.decoder.family](run)
