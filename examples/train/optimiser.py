"""Muon for the matrices (Jordan et al. 2024: momentum, then the nearest orthogonal matrix), AdamW for the rest."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonal(g: Tensor) -> Tensor:
    """Five Newton-Schulz steps of the quintic with Jordan's coefficients, on a batch of matrices (n, r, c)."""
    x = g.bfloat16()
    if wide := x.shape[-2] > x.shape[-1]:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if wide else x


class Muon:
    """Matrices of one shape are stacked, so that a step is a few batched products. No weight decay."""

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, momentum: float = 0.95):
        self.lr, self.momentum = lr, momentum
        shapes = defaultdict(list)
        for p in matrices:
            shapes[p.shape].append(p)
        self.groups = [(ps, torch.zeros(len(ps), *shape, device=ps[0].device)) for shape, ps in shapes.items()]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        for parameters, velocity in self.groups:
            grad = torch.stack([p.grad for p in parameters])
            velocity.mul_(self.momentum).add_(grad)
            rows, columns = grad.shape[-2:]
            update = orthogonal(grad.add_(velocity, alpha=self.momentum)).float()
            update *= -self.lr * scale * max(1.0, rows / columns) ** 0.5
            torch._foreach_add_(parameters, list(update.unbind()))


class Optimiser:
    """`named` trainable parameters; everything that is not a plain weight matrix goes to AdamW."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], lr: float, adam_lr: float):
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, p in named:
            (matrices if p.ndim == 2 and min(p.shape) >= 64 and "embed" not in name else rest).append(p)
        self.muon = Muon(matrices, lr)
        self.adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.adam_lr, self.parameters = adam_lr, [*matrices, *rest]

    def step(self, scale: float) -> None:
        self.muon.step(scale)
        self.adam.param_groups[0]["lr"] = self.adam_lr * scale
        self.adam.step()
        for p in self.parameters:
            p.grad = None


def trapezoid(done: float, warm: float = 0.02, flat: float = 0.4) -> float:
    """Learning-rate factor at the fraction `done`: linear up, flat, linear to zero."""
    return min(1.0, done / warm, (1.0 - done) / (1.0 - flat))
