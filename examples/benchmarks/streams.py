"""Measure speculative decoding of several replies at once, beside plain decoding of the same loaded models.

    python examples/benchmarks/streams.py --model demo --draft demo --streams 4 --sets humaneval

Sets, and modes, are those of speculative.py. Rounds of all modes alternate, because times of the host change; the
first round also captures graphs and measures budgets. A round lasts from the first token of the last reply to begin
until each reply has `--tokens` tokens. End tokens are ignored.
"""

import argparse
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from speculative import mode, read_set

from common.checkpoint import open_checkpoint
from common.decoders import Speculation
from common.engine import Engine
from common.errors import BimetalError
from common.hub import resolve_model
from common.models.drafts import load_pair
from common.options import GenerationOptions
from common.pieces import Piece
from common.sequence import Call
from common.tokenizer import load_tokenizer
from generate.backends import open_model
from generate.loading import resolve_draft

PROMPT_TOKENS = 200  # at most, the last ones of a prompt
AHEAD = 8  # times as many tokens as `--tokens` that a reply may have when the slowest one has them


@dataclass
class Reply:
    """A call, its tokens so far, and what it ended with."""

    call: Call = field(init=False)
    tokens: int = 0
    errors: deque[BaseException] = field(default_factory=deque)

    def submit(self, engine: Engine, prompt: list[int], options: GenerationOptions) -> None:
        self.call = Call(prompt, options, self.put, self.ended, threading.Event())
        engine.submit(self.call)

    def put(self, piece: Piece) -> None:
        self.tokens += len(piece.tokens)

    def ended(self, error: BaseException | None) -> None:
        if error is not None:
            self.errors.append(error)


def rate(engine: Engine, prompts: list[list[int]], how: Speculation, tokens: int) -> float:
    """Measure the tokens per second of all replies together."""
    options = GenerationOptions(temperature=0.0, spec=how.kind, tree_budget=how.budget, tree_topk=how.top_k)
    replies = [Reply() for _ in prompts]
    for reply, prompt in zip(replies, prompts, strict=True):
        reply.submit(engine, prompt, options)
    while not all(reply.tokens for reply in replies) and engine.turn():
        pass
    started, before = time.perf_counter(), sum(reply.tokens for reply in replies)
    while min(reply.tokens for reply in replies) < tokens and engine.turn():
        pass
    took, count = time.perf_counter() - started, sum(reply.tokens for reply in replies) - before
    for reply in replies:
        reply.call.cancel.set()
    engine.drain()
    for reply in replies:
        if reply.errors:
            raise reply.errors[0]
    return count / took


def main(flags: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft", default="demo")
    parser.add_argument("--backend", default=None)
    parser.add_argument("--sets", default="humaneval", help="one set of speculative.py")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--modes", default="off,chain,tree")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(flags)
    checkpoint = open_checkpoint(resolve_model(args.model))
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.config)
    tokenizer.end_ids = frozenset()
    model = load_pair(resolve_draft(args.draft, checkpoint, True), open_model(checkpoint, args.backend), True)
    texts = read_set(args.sets, args.streams, 42)[1]
    prompts = [tokenizer.encode(text)[-PROMPT_TOKENS:] for text in texts]
    engine = Engine(model, tokenizer, PROMPT_TOKENS + AHEAD * args.tokens, len(prompts))
    modes = {text: mode(text, 8) for text in args.modes.split(",")}
    print(f"{len(prompts)} replies, tokens per second: {', '.join(modes)}")
    for number in range(args.rounds):
        rates = [rate(engine, prompts, how, args.tokens) for how in modes.values()]
        print(f"round {number}: {', '.join(f'{each:,.0f} ({each / rates[0]:.2f})' for each in rates)}", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BimetalError as error:
        sys.exit(f"error: {error}")
