"""Facts about the served model, found once, when the model is loaded."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from common.checkpoint import open_checkpoint
from common.errors import BimetalError
from common.grammar import Grammars
from common.guide import spilling
from common.harmony import END
from common.reply import END_THINK, THINK
from common.tokenizer import Tokenizer
from common.tools import is_harmony
from generate.llm import LLM

# Variables that OpenAI's and Anthropic's effort sets, if a template reads them.
EFFORT = "reasoning_effort"
LATE = "a late system message"


@dataclass(frozen=True)
class Facts:
    """A served model.

    name          its name for clients; all other names mean it too
    template      source of its chat template, "" without one
    late_system   whether the template takes a system message after others
    is_gguf       whether its files are GGUF, not safetensors
    size          bytes of its files
    parameters    numbers in its tensors
    quantization  the type of most bytes of its tensors: "Q4_K", "BF16", "affine 4-bit"
    grammars      makes the guides that constrain replies
    limit         most tokens of a reply whose request has no limit; None: to the end of the context
    """

    name: str
    tokenizer: Tokenizer
    context: int
    trained_context: int
    vocab: int
    architecture: str
    template: str
    late_system: bool
    is_gguf: bool
    size: int
    parameters: int
    quantization: str
    grammars: Grammars
    limit: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def control_texts(self) -> dict[str, str | None]:
        """Return the texts of the tokens that begin and end a sequence, under the names of transformers."""
        ids = {"bos_token": self.tokenizer.bos_id, "eos_token": self.tokenizer.eos_id}
        return {name: None if id is None else self.tokenizer.decode([id]) for name, id in ids.items()}

    @property
    def switches_thinking(self) -> bool:
        """Test whether the template turns thinking on and off."""
        return "enable_thinking" in self.template

    @property
    def thinks(self) -> bool:
        return THINK in self.template or is_harmony(self.template)

    @cached_property
    def spills(self) -> dict[bytes, list[int]]:
        """Return `spilling` of the tag that closes reasoning, found in the thread that first needs it."""
        return spilling(self.tokenizer, END if is_harmony(self.template) else END_THINK)

    @property
    def takes_tools(self) -> bool:
        """Test whether conversations may have tools: templates without a place for them get them as text."""
        return bool(self.template)


def facts_of(llm: LLM, name: str, limit: int | None = None) -> Facts:
    """Find the facts of a loaded model called `name`, whose replies have a limit of `limit` tokens."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    late = [{"role": "system", "content": "a"}, *turns, turns[0], {"role": "system", "content": LATE}]
    path = Path(name)
    tensors = open_checkpoint(llm.path).tensors.values()
    types: Counter[str] = Counter()
    for tensor in tensors:
        types[f"{tensor.type} {tensor.bits}-bit" if tensor.scales else tensor.type] += tensor.nbytes
    return Facts(
        name=path.stem if path.exists() else name,
        tokenizer=llm.tokenizer,
        context=llm.context,
        trained_context=llm.trained_context,
        vocab=llm.vocab_size,
        architecture=llm.architecture,
        template=llm.tokenizer.chat_template or "",
        late_system=_renders(llm, late),
        is_gguf=llm.path.is_file(),
        grammars=Grammars(llm.tokenizer, llm.vocab_size),
        limit=limit,
        size=sum(file.stat().st_size for file in _files(llm.path)),
        parameters=sum(prod(tensor.shape) for tensor in tensors),
        quantization=types.most_common(1)[0][0],
    )


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.glob("*.safetensors"))


def _renders(llm: LLM, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Test whether the template shows the last message: it may refuse it, or leave it out."""
    try:
        return messages[-1]["content"] in llm.render(messages)
    except BimetalError:
        return False
