"""Hot experts in a GPU's memory and cold ones in the host's: the budget, and what it must hold."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import BimetalError
from common.expert_profile import Profile, least_bytes

ALIGN = 256  # bytes of which the parts of an expert in a slot are multiples


@dataclass(frozen=True)
class HotExperts:
    """Budget of a mixture's experts in a GPU's memory; the other experts stay in the host's memory.

    nbytes   slots, and the buffer through which prefill copies a layer
    used     experts per token
    profile  counts that say which experts are copied to slots at first; None: each layer's first ones
    """

    nbytes: int
    used: int
    profile: Profile | None = None


@dataclass(frozen=True)
class HotSizes:
    """Bytes that a model's experts take in a GPU's memory.

    experts  of each layer
    sizes    bytes of an expert's slot in each layer, 0 where there are no experts
    staging  bytes of the buffer through which prefill copies a layer: its two stacks
    """

    experts: int
    sizes: tuple[int, ...]
    staging: int

    @property
    def min_budget(self) -> int:
        """Return the bytes of the smallest budget that is accepted."""
        return least_bytes(self.sizes, self.experts) + self.staging

    @property
    def max_budget(self) -> int:
        """Return the bytes of the budget with which all experts have slots."""
        return self.experts * sum(self.sizes) + self.staging

    def budget_of(self, share: float) -> int:
        """Return the bytes of the budget with which this share of all experts' bytes has slots."""
        return int(share * (self.max_budget - self.staging)) + self.staging


def hot_sizes(stacks: Sequence[Sequence[int]], experts: int) -> HotSizes:
    """Compute the sizes for stacks of `experts` experts from the bytes of each layer's stacks; (): it has none."""
    sizes = tuple(sum(-(-nbytes // experts // ALIGN) * ALIGN for nbytes in layer) for layer in stacks)
    staging = sum(max(parts) for parts in zip(*filter(None, stacks), strict=True))
    return HotSizes(experts, sizes, staging)


def check_hot(nbytes: int, sizes: HotSizes) -> None:
    """Refuse a budget that is too small, or one that holds all experts. Raises BimetalError."""
    if nbytes < sizes.min_budget:
        raise BimetalError(
            f"expert_vram is {nbytes / 1e9:.3g} GB; the least for this model is {sizes.min_budget / 1e9:.3g} GB "
            f"({sizes.min_budget} bytes): one layer's {sizes.experts} experts of each size, and as much again for "
            "prefill"
        )
    if nbytes >= sizes.max_budget:
        raise BimetalError(
            f"expert_vram is {nbytes / 1e9:.3g} GB, and all experts take {sizes.max_budget / 1e9:.3g} GB, so spark "
            "has no effect; leave it out"
        )
