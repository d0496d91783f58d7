"""The gated delta rule in chunks, with gradients (Gated DeltaNet: Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464).

Two steps are sequential by nature: the inverse of a unit lower triangular matrix per chunk, and the state handed from
chunk to chunk. Both are operators of their own here: a Triton kernel on a GPU, a loop of plain products elsewhere.
Everything else is batched matrix products.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a build of PyTorch for the CPU
    triton = None

CHUNK = 64

if triton is not None:

    @triton.jit
    def _inverse_kernel(a_ptr, t_ptr, C: tl.constexpr, LOG_C: tl.constexpr):
        row = tl.arange(0, C)[:, None]
        col = tl.arange(0, C)[None, :]
        at = tl.program_id(0).to(tl.int64) * C * C + row * C + col
        a = tl.load(a_ptr + at)
        t = tl.where(row == col, 1.0, 0.0)
        for s in tl.static_range(LOG_C):
            below = ((row >> s) % 2 == 1) & ((row >> s) == (col >> s) + 1)
            a_t = tl.dot(tl.where(below, a, 0.0), t, input_precision="tf32x3")
            t -= tl.dot(t, a_t, input_precision="tf32x3")
        tl.store(t_ptr + at, t)

    @triton.jit
    def _scan_kernel(m_ptr, p_ptr, s_ptr, chunks, D: tl.constexpr, COLUMNS: tl.constexpr, BACKWARD: tl.constexpr):
        row = tl.arange(0, D)[:, None]
        inner = tl.arange(0, D)[None, :]
        col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        s = tl.zeros([D, COLUMNS], dtype=tl.float32)
        for i in range(chunks):
            n = chunks - 1 - i if BACKWARD else i
            base = (tl.program_id(0).to(tl.int64) * chunks + n) * D * D
            tl.store(s_ptr + base + row * D + col, s)
            m = tl.load(m_ptr + base + (inner * D + row if BACKWARD else row * D + inner))
            s = tl.dot(m, s, input_precision="tf32x3") + tl.load(p_ptr + base + row * D + col)


@torch.library.custom_op("train::unit_lower_inverse", mutates_args=())
def unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + a)⁻¹, float32 (n, C, C), a strictly lower; by doubling, from inverses of s×s diagonal blocks to 2s×2s."""
    n, c = a.shape[0], a.shape[-1]
    if a.is_cuda:
        t = torch.empty_like(a)
        _inverse_kernel[(n,)](a.contiguous(), t, c, c.bit_length() - 1)
        return t
    row, col = torch.arange(c)[:, None], torch.arange(c)[None, :]
    t = torch.eye(c).expand(n, c, c)
    for s in range(c.bit_length() - 1):
        below = ((row >> s) % 2 == 1) & ((row >> s) == (col >> s) + 1)
        t = t - t @ (a * below) @ t
    return t.clone()


@unit_lower_inverse.register_fake
def _(a: Tensor) -> Tensor:
    return torch.empty_like(a)


def _inverse_backward(ctx, grad: Tensor) -> Tensor:
    (t,) = ctx.saved_tensors
    return -(t.mT @ grad @ t.mT)


unit_lower_inverse.register_autograd(
    _inverse_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output)
)


@torch.library.custom_op("train::scan", mutates_args=())
def scan(m: Tensor, p: Tensor, backward: bool = False) -> Tensor:
    """States before each chunk of S ← m S + p from S = 0; m, p and the result float32 (h, chunks, D, D).

    `backward` runs from the last chunk with mᵀ: with p = ∂S it yields the gradient after each chunk.
    """
    heads, chunks, d, _ = m.shape
    states = torch.empty_like(p)
    if m.is_cuda:
        columns = min(d, 32)
        _scan_kernel[(heads, d // columns)](m.contiguous(), p.contiguous(), states, chunks, d, columns, backward)
        return states
    s = torch.zeros_like(p[:, 0])
    for n in reversed(range(chunks)) if backward else range(chunks):
        states[:, n] = s
        s = (m[:, n].mT if backward else m[:, n]) @ s + p[:, n]
    return states


@scan.register_fake
def _(m: Tensor, p: Tensor, backward: bool = False) -> Tensor:
    return torch.empty_like(p)


def _scan_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0], output)


def _scan_backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    m, states = ctx.saved_tensors
    after = scan(m, grad, True)
    return after @ states.mT, after, None


scan.register_autograd(_scan_backward, setup_context=_scan_setup)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """S ← e^g S;  S ← S + k (β (v − Sᵀk))ᵀ;  o = Sᵀq for every position of a sequence, from S = 0.

    q, k, v (B, T, H, D), T a multiple of CHUNK; g ≤ 0 and β float32 (B, T, H). Returns (B, T, H, D).
    """
    batch, length, heads, dim = v.shape
    q, k, v = (x.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4) for x in (q, k, v))  # (B, H, chunks, C, D)
    g, beta = (x.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2) for x in (g, beta))
    g = g.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).tril()
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    grow, shrink, whole = g.exp()[..., None], (g[..., -1:] - g).exp()[..., None], g[..., -1].exp()[..., None, None]

    a = (beta[..., None] * decay * (k @ k.mT).float()).tril(-1)
    t = unit_lower_inverse(a.flatten(0, 2)).view_as(a).to(v.dtype)
    u = t @ (v * beta[..., None]).to(v.dtype)
    w = t @ (k * (beta[..., None] * grow)).to(v.dtype)
    k_end = (k * shrink).to(v.dtype)
    m = whole * torch.eye(dim, device=v.device) - (k_end.mT @ w).float()
    p = (k_end.mT @ u).float()
    s = scan(m.flatten(0, 1), p.flatten(0, 1)).view_as(p).to(v.dtype)
    o = (q * grow).to(v.dtype) @ s + ((q @ k.mT) * decay).to(v.dtype) @ (u - w @ s)
    return o.permute(0, 2, 3, 1, 4).reshape(batch, length, heads, dim)
