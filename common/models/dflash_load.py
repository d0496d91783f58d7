"""Load a draft of a block of tokens, DFlash's or one derived from DFlash, together with its target."""

from types import SimpleNamespace

from common.checkpoint import Checkpoint
from common.models import Model
from common.models.dflash import DflashPair
from common.models.dflash2 import Dflash2Pair
from common.models.dflash_config import Config, read_config
from common.models.dflash_weights import layout
from common.models.dspark import DsparkPair
from common.models.target import Target, target_of
from common.weights import account, load_weights


def check_dflash(checkpoint: Checkpoint, target: Target) -> None:
    """Refuse, by headers alone, a draft that does not fit `target`."""
    account(checkpoint, layout(read_config(checkpoint, target), checkpoint))


def load_dflash(checkpoint: Checkpoint, target: Model, progress: bool = False) -> DflashPair:
    """Return `target` with the draft of `checkpoint`, loaded on the same backend."""
    config = read_config(checkpoint, target_of(target.definition, target.config))
    weights = load_draft(checkpoint, config, target, progress)
    parts = (target.architecture, target.definition, target.config, target.layout, target.weights, target.ops)
    kind = Dflash2Pair if config.selector_rank else DsparkPair if config.markov_rank else DflashPair
    return kind(*parts, config, weights, cache=target.cache, expert_stream=target.expert_stream)


def load_draft(checkpoint: Checkpoint, c: Config, target: Model, progress: bool = False) -> SimpleNamespace:
    """Load the draft's weights: its layers are numbered after the target's, its last norm is placed with the head."""
    first = len(target.layout.layers)
    return load_weights(checkpoint, layout(c, checkpoint), target.ops, progress, first, target.layout.out)
