"""Share of first draft tokens that are the sampled ones, beside the overlap of both distributions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from common.coupled import Coupling
from common.models.pair import Pair
from common.options import Sampling
from common.sampling import Sampler, draw_weights
from common.step import Step

MOST = 64  # candidates of the draft that count as its distribution
STRIDE = 4  # tokens of a text from one place to the next


@dataclass
class Overlap:
    """Sums over `places` of sampled texts.

    overlap    1 minus the total variation distance of the target's distribution and the draft's; of the draft only its
               most probable tokens count, so that the sum is a lower bound
    coupled    places at which the draft token that is coupled to the draw is the text's
    likeliest  places at which the draft's most probable token is the text's
    """

    places: int = 0
    overlap: float = 0.0
    coupled: int = 0
    likeliest: int = 0

    def shares(self) -> Mapping[str, float]:
        """Divide the three sums by the number of places."""
        names = "overlap", "coupled", "likeliest"
        return {name: getattr(self, name) / max(self.places, 1) for name in names}


def add_text(total: Overlap, pair: Pair, prompt: Sequence[int], text: Sequence[int], sampling: Sampling) -> None:
    """Count places of `text`, which plain decoding drew after `prompt` with `sampling`, a temperature above 0."""
    state = pair.new_state(len(prompt) + len(text) + 1)
    rows = pair.ops.prefill_rows
    for start in range(0, len(prompt), rows):
        part = np.array(prompt[start : start + rows], np.int32)
        pair.forward(state, Step.chain(part, start), slice(len(part) - 1, len(part)))
        state.commit(range(len(part)))
    numbers = Sampler(sampling).numbers(len(text))
    for at in range(0, len(text) - STRIDE, STRIDE):
        coupling = Coupling(sampling, numbers[at + 1 : at + 2])
        ids, logp = (_first(part) for part in pair.drafted(state, text[at], min(MOST, pair.config.vocab), 1)[:2])
        coupled = _first(pair.drafted(state, text[at], 1, 1, coupling)[0])
        logits = pair.forward(state, Step.chain(np.array(text[at : at + STRIDE], np.int32), state.length))
        state.commit(range(STRIDE))
        target, draft = (
            np.float64(draw_weights(pair.ops.read(logits[:1])[0], sampling)),
            np.full(pair.config.vocab, -np.inf),
        )
        draft[ids] = logp
        weights = np.float64(draw_weights(draft.astype(np.float32), sampling))
        total.places += 1
        total.overlap += float(np.minimum(target / target.sum(), weights / weights.sum()).sum())
        total.coupled += int(coupled[0] == text[at + 1])
        total.likeliest += int(ids[0] == text[at + 1])


def _first(part: np.ndarray) -> np.ndarray:
    """Return the candidates of the first position, of drafts whose positions have several rows as well."""
    return part[0].reshape(-1, part.shape[-1])[0]
