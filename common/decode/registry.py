"""Functions of decoders by the `family` of a row of common.decoders.DECODERS, which is the name of their module."""

from collections.abc import Callable, Generator
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from common.decode.requests import Request
from common.decode.run import DecoderRun
from common.decoders import Speculation
from common.models import Model
from common.sampling import Sampler

Decode = Callable[[DecoderRun], Generator[Request, Any, None]]
Check = Callable[[Speculation, Model, Sampler], None]  # raises UsageError


class Family(NamedTuple):
    """Functions of a module of common/decode: the generator, and optionally a check of models and options."""

    decode: Decode
    check: Check | None


@cache
def family(name: str) -> Family:
    """Import the module `name` of common/decode, which defines `decode` and may define `check`."""
    module = import_module(f"common.decode.{name}")
    return Family(module.decode, getattr(module, "check", None))


def check(options: Speculation, model: Model, sampler: Sampler) -> None:
    """Refuse a decoder that `model` cannot run with these options and this sampler. Raises UsageError."""
    if refuse := family(options.decoder.family).check:
        refuse(options, model, sampler)


def decode(run: DecoderRun) -> Generator[Request, Any, None]:
    """Run the decoder that `run.options` name: yield requests and tokens until the state is full or it is closed."""
    return family(run.options.decoder.family).decode(run)
