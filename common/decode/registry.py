"""Table of the decoders' functions, by the `family` of a row of common.decoders.DECODERS."""

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from common.decode import plain, speculative, wedlm
from common.decode.requests import Request
from common.decode.run import DecoderRun
from common.decoders import Speculation
from common.models import Model
from common.sampling import Sampler

Decode = Callable[[DecoderRun], Generator[Request, Any, None]]
Check = Callable[[Speculation, Model, Sampler], None]  # raises UsageError


class Family(NamedTuple):
    """Functions of a module of common/decode: the generator, and the check of what it cannot run, if there is any."""

    decode: Decode
    check: Check | None = None


FAMILIES = {
    "plain": Family(plain.decode),
    "speculative": Family(speculative.decode, speculative.check),
    "wedlm": Family(wedlm.decode, wedlm.check),
}


def check(options: Speculation, model: Model, sampler: Sampler) -> None:
    """Refuse a decoder that `model` cannot run, or not with that sampling. Raises UsageError."""
    if refuse := FAMILIES[options.decoder.family].check:
        refuse(options, model, sampler)


def decode(run: DecoderRun) -> Generator[Request, Any, None]:
    """Run the decoder that `run.options` name: yield requests and tokens until the state is full or it is closed."""
    return FAMILIES[run.options.decoder.family].decode(run)
