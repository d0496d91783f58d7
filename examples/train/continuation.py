"""Greedy continuations in bulk, the loops in them, and prompts for them."""

import torch
from target import Target
from torch import Tensor

LONGEST_PERIOD = 48
SPECIAL = 4  # the first tokens are barred, so that a continuation runs to its full length


class Generator:
    """Greedy decoding of `batch` sequences of `length` tokens, one recurrent step per token: a replayed graph on a GPU.

    A prompt is consumed by the same step as the answer, so prompts of mixed length need no prefill.

    hidden  with `keeps_hidden`, the normed outputs (batch, length, hidden) of the last run; at the last token zeros
    """

    def __init__(self, model: Target, batch: int, length: int, dtype: torch.dtype, keeps_hidden: bool = False):
        device = model.model.norm.weight.device
        self.model, self.dtype, self.length = model, dtype, length
        self.states = model.new_states(batch, length, dtype)
        self.tokens = torch.zeros(batch, length + 1, dtype=torch.int64, device=device)
        self.lengths = torch.ones(batch, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        kept = (batch, length, model.c.hidden) if keeps_hidden else (0, length, model.c.hidden)
        self.hidden = torch.zeros(kept, dtype=dtype, device=device)
        self.graph = None
        if device.type == "cuda":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.step()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(self.graph):
                self.step()

    @torch.no_grad()
    def step(self) -> None:
        newest = self.tokens.index_select(1, self.position)[:, 0]
        hidden = self.model.step(newest, self.position, self.states, self.dtype)
        if len(self.hidden):
            self.hidden.index_copy_(1, self.position, hidden[:, None])
        logits = self.model.head(hidden)
        logits[:, :SPECIAL] = float("-inf")
        given = self.tokens.index_select(1, self.position + 1)[:, 0]
        chosen = torch.where(self.position + 1 < self.lengths, given, logits.argmax(-1))
        self.tokens.index_copy_(1, self.position + 1, chosen[:, None])
        self.position += 1

    @torch.no_grad()
    def run(self, prompts: Tensor, lengths: Tensor) -> Tensor:
        """prompts (batch, ≤ length) int64, of which the first `lengths` (batch,) count; returns (batch, length)."""
        self.tokens.zero_()
        self.tokens[:, : prompts.shape[1]] = prompts
        self.lengths.copy_(lengths)
        self.position.zero_()
        for state in self.states:
            for part in state:
                part.zero_()
        for _ in range(self.length - 1):
            self.graph.replay() if self.graph else self.step()
        return self.tokens[:, : self.length].clone()


def repeats(tokens: Tensor, copies: int = 2, least: int = 24) -> Tensor:
    """Positions (B, T) at which the text ends in `copies` equal runs of at most 48 tokens, `least` or more in all."""
    found = torch.zeros_like(tokens, dtype=torch.bool)
    place = torch.arange(tokens.shape[1], device=tokens.device)
    for period in range(1, min(LONGEST_PERIOD, tokens.shape[1] - 1) + 1):
        differs = torch.ones_like(found)
        differs[:, period:] = tokens[:, period:] != tokens[:, :-period]
        last = torch.where(differs, place, -1).cummax(1).values  # newest place that breaks the period
        found |= place - last >= max(copies * period, least) - period
    return found


def loops(continuations: Tensor) -> Tensor:
    """Which continuations (B, T) end in a loop: their tail is two or more equal runs (see `repeats`)."""
    return repeats(continuations)[:, -1]
