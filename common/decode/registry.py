"""From a row of common.decoders to the function that decodes."""

from collections.abc import Callable, Generator

from common.decode import plain, speculative, wedlm
from common.decode.run import Run
from common.decoders import Speculation
from common.models import Model
from common.ops import Array
from common.sampling import Sampler

Decode = Callable[[Run], Generator[tuple[int, Array], None, None]]

FAMILIES: dict[str, Decode] = {"plain": plain.decode, "speculative": speculative.decode, "wedlm": wedlm.decode}


def check(options: Speculation, model: Model, sampler: Sampler) -> None:
    """Refuse a decoder that `model` cannot run, or not with that sampling. Raises UsageError."""
    if options.drafts:
        speculative.check(options, model)
    elif options.decoder.family == "wedlm":
        wedlm.check(options, plain.target_of(model), sampler)


def decode(run: Run) -> Generator[tuple[int, Array], None, None]:
    """Yield (token, the logits row (1, vocab) it was drawn from) until the state is full or the caller stops."""
    return FAMILIES[run.options.decoder.family](run)
