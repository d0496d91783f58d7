"""Table of the decoders' functions, by the `family` of a row of common.decoders.DECODERS."""

from collections.abc import Callable, Generator
from typing import Any

from common.decode import plain, speculative, wedlm
from common.decode.requests import Request
from common.decode.run import DecoderRun
from common.decoders import Speculation
from common.models import Model
from common.sampling import Sampler

Decode = Callable[[DecoderRun], Generator[Request, Any, None]]

FAMILIES: dict[str, Decode] = {"plain": plain.decode, "speculative": speculative.decode, "wedlm": wedlm.decode}


def check(options: Speculation, model: Model, sampler: Sampler) -> None:
    """Refuse a decoder that `model` cannot run, or not with that sampling. Raises UsageError."""
    if options.drafts:
        speculative.check(options, model)
    elif options.decoder.family == "wedlm":
        wedlm.check(options, plain.target_of(model), sampler)


def decode(run: DecoderRun) -> Generator[Request, Any, None]:
    """Run the decoder that `run.options` name: yield requests and tokens until the state is full or it is closed."""
    return FAMILIES[run.options.decoder.family](run)
