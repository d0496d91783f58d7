"""llama.cpp's `/infill`, with which editors have a model fill the gap at the cursor."""

from common.infill import RESERVED, Gap, without_tokens
from common.tokenizer import Tokenizer
from generate.server.errors import ApiError
from generate.server.facts import Facts
from generate.server.fields import TEXT, Fields
from generate.server.llama_cpp import parsed
from generate.server.wire import Parsed

MOST_FILES = 4096


def check_fim(tokenizer: Tokenizer, status: int, field: str | None = None) -> None:
    """Refuse a model that lacks the tokens: ApiError with `status`, about `field`."""
    if tokenizer.fim.missing:
        raise ApiError(status, without_tokens(tokenizer), param=field)


def parse(fields: Fields, facts: Facts) -> Parsed:
    """Read a request; raises ApiError."""
    check_fim(facts.tokenizer, 501)
    prefix, suffix = fields.need("input_prefix", TEXT), fields.need("input_suffix", TEXT)
    files = fields.objects("input_extra", MOST_FILES)
    extra = [(file.text("filename", "tmp"), file.need("text", TEXT)) for file in files]
    gap = Gap(prefix, suffix, fields.text("prompt", ""), extra, RESERVED if facts.limit is None else facts.limit)
    return parsed(fields, facts, [gap], "input_prefix")
