"""mlx-lm's published Metal kernels, unmodified, in the checker and the emulator, against mlx-lm's own MLX forms."""

import importlib.util
from types import ModuleType
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
nn = pytest.importorskip("mlx.nn", reason="mlx is not installed")
metal = pytest.importorskip("simt.metal", exc_type=ImportError)
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
pytestmark = pytest.mark.model
TOLERANCE = {mx.float32: 2e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE)


@pytest.fixture(autouse=True)
def seed() -> None:
    mx.random.seed(1)


def fresh(name: str) -> ModuleType:
    """A module of mlx-lm, loaded again, because it makes its kernels at import where Metal is present."""
    spec = importlib.util.find_spec(f"mlx_lm.{name}")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    with metal.on_metal():
        spec.loader.exec_module(module)
    return module


def normal(*shape: int, dtype: Any = mx.float32, scale: float = 1.0) -> Any:
    return (mx.random.normal(shape) * scale).astype(dtype)


def assert_close(ours: Any, expected: Any, dtype: Any) -> None:
    for a, b in zip(ours, expected, strict=True):
        assert a.shape == b.shape
        a, b = (np.asarray(x.astype(mx.float32)) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("vectorized", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_gated_delta(dtype, vectorized, masked):
    B, T, Hk, Hv, Dk, Dv = 2, 5, 2, 4, 64, 8
    module = fresh("models.gated_delta")
    q, k = (normal(B, T, Hk, Dk, dtype=dtype, scale=0.1) for _ in range(2))
    v, beta = normal(B, T, Hv, Dv, dtype=dtype), mx.sigmoid(normal(B, T, Hv, dtype=dtype))
    g = mx.sigmoid(normal(B, T, Hv, *([Dk] if vectorized else [])))
    state = normal(B, Hv, Dv, Dk)
    mask = mx.array([[True] * T, [True] * 3 + [False] * 2]) if masked else None
    with metal.on_metal():
        ours = module.gated_delta_kernel(q, k, v, g, beta, state, mask)
    wide = [x.astype(mx.float32) for x in (q, k, v, g, beta)]
    y, last = module.gated_delta_ops(*wide, state, mask)
    if masked:  # a masked row is zero in the kernel
        y = mx.where(mask[..., None, None], y, 0)
    assert_close(ours, (y, last), dtype)


@DTYPES
def test_packed_gated_delta_has_the_bits_of_the_plain_one(dtype):
    B, T, Hk, Hv, Dk, Dv = 1, 3, 1, 2, 128, 16
    module = fresh("models.gated_delta")
    q, k = (normal(B, T, Hk, Dk, dtype=dtype, scale=0.1) for _ in range(2))
    v, beta = normal(B, T, Hv, Dv, dtype=dtype), mx.sigmoid(normal(B, T, Hv, dtype=dtype))
    arguments = q, k, v, mx.sigmoid(normal(B, T, Hv)), beta, normal(B, Hv, Dv, Dk)
    with metal.on_metal():
        packed = module.gated_delta_kernel(*arguments)
        tree = module.gated_delta_kernel_xtree(*arguments)
        plain = module.gated_delta_kernel_unpacked(*arguments)
    for a, b, c in zip(packed, tree, plain, strict=True):
        assert mx.array_equal(a, b)
        assert mx.array_equal(a, c)


@DTYPES
def test_ssm(dtype):
    module = fresh("models.ssm")
    n, h, d, groups, ds = 2, 4, 8, 2, 64
    x, A_log, D = normal(n, 1, h, d, dtype=dtype), normal(h), normal(h)
    B, C = (normal(n, 1, groups, ds, dtype=dtype) for _ in range(2))
    dt, dt_bias, state = normal(n, 1, h, dtype=dtype), normal(h), normal(n, h, d, ds)
    with metal.on_metal():
        ours = module.ssm_update_kernel(x, A_log, B, C, D, dt, dt_bias, state, (0.001, 10.0))
    wide = [a.astype(mx.float32) for a in (x, A_log, B, C, D, dt, dt_bias)]
    assert_close(ours, module.ssm_attn(*wide, state, (0.001, 10.0)), dtype)


def test_expert_routing():
    routing = fresh("kernels.expert_routing").expert_routing
    logits, bias = normal(3, 40), normal(40, scale=0.1)
    with metal.on_metal():
        ids, weights = routing(logits, bias, top_k=6, multiplier=0.5, score_eps=1e-6, route_scale=2.0)
    scores = mx.sigmoid(logits * 0.5)
    expected = mx.argsort(-(scores + bias), axis=-1)[:, :6]
    chosen = mx.take_along_axis(scores, expected, axis=-1)
    assert mx.array_equal(ids, expected)
    assert_close([weights], [chosen / (chosen.sum(-1, keepdims=True) + 1e-6) * 2.0], mx.float32)


@DTYPES
@pytest.mark.parametrize("rotated", [False, True])
def test_qk_norm(dtype, rotated):
    T, HQ, HK, D = 3, 2, 1, 80
    qkvg = normal(1, T, 2 * (HQ + HK) * D, dtype=dtype)
    sizes = {"n_heads": HQ, "n_kv_heads": HK, "head_dim": D, "eps": 1e-6, "query_scale": 0.5}
    module = fresh(f"kernels.qk_norm{'_rope' * rotated}")
    with metal.on_metal():
        if rotated:
            ours = module.qk_norm_rope(qkvg, **sizes, rope_base=1e4, offset=7)
        else:
            ours = module.qk_norm(qkvg, **sizes)
    heads = qkvg.astype(mx.float32).reshape(1, T, 2 * (HQ + HK), D)
    q, k = (mx.fast.rms_norm(h, None, 1e-6) for h in (heads[:, :, :HQ], heads[:, :, HQ : HQ + HK]))
    q = q * 0.5
    if rotated:
        q, k = (
            mx.fast.rope(h.swapaxes(1, 2), D, traditional=True, base=1e4, scale=1.0, offset=7).swapaxes(1, 2)
            for h in (q, k)
        )
    assert_close(ours, (q, k), dtype)


@DTYPES
@pytest.mark.parametrize("D", [64, 640])
def test_norm_add_norm(dtype, D):
    module = fresh("kernels.norm_add_norm")
    branch, stream, alpha, beta, post = (normal(3, D, dtype=dtype), normal(3, D), normal(D), normal(D), normal(D))
    norm = nn.RMSNorm(D, eps=1e-5)
    norm.weight = normal(D)
    with metal.on_metal():
        ours = module.norm_add_norm(
            branch, stream, alpha=alpha, beta=beta, post_weight=post, post_eps=1e-6, next_norm=norm
        )
        alone = module.pre_norm(ours[0], norm, dtype=dtype)
    summed = alpha * stream + beta * mx.fast.rms_norm(post * branch.astype(mx.float32), None, 1e-6)
    assert_close(ours, (summed, norm(summed)), dtype)
    assert mx.array_equal(alone, ours[1])


@DTYPES
def test_post_expert_norm_combine(dtype):
    experts, weights, norm_weight = normal(2, 3, 640, dtype=dtype), mx.abs(normal(2, 3)), normal(640)
    with metal.on_metal():
        ours = fresh("kernels.post_expert_norm_combine").post_expert_norm_combine(
            experts, weights, norm_weight=norm_weight, eps=1e-6
        )
    normed = mx.fast.rms_norm(experts.astype(mx.float32) * norm_weight, None, 1e-6)
    assert_close([ours], [(normed * weights[..., None]).sum(1)], dtype)


@DTYPES
def test_rms_norm_sigmoid_gate_of_strided_rows(dtype):
    B, H, L, D = 2, 3, 5, 40
    x, gate = normal(B, L, H, D, dtype=dtype).swapaxes(1, 2), normal(B, L, 2 * H * D, dtype=dtype)[..., ::2]
    with metal.on_metal():
        ours = fresh("kernels.rms_norm_sigmoid_gate").rms_norm_sigmoid_gate(x, gate, eps=1e-6)
    normed = mx.fast.rms_norm(x.astype(mx.float32), None, 1e-6).swapaxes(1, 2).reshape(B, L, H * D)
    assert_close([ours], [normed * mx.sigmoid(gate.astype(mx.float32))], dtype)


@DTYPES
def test_bitlinear(dtype):
    layer = fresh("models.bitlinear_layers").BitLinear(128, 16, bias=False)
    layer.weight = mx.random.randint(0, 256, (4, 128)).astype(mx.uint8)
    layer.weight_scale = mx.array([0.7]).astype(dtype)
    x = normal(3, 128, dtype=dtype, scale=0.3)
    with metal.on_metal():
        ours = layer(x)
    signs = mx.concatenate([((layer.weight >> (2 * i)) & 3).astype(mx.float32) - 1 for i in range(4)])
    assert_close([ours], [x.astype(mx.float32) @ signs.T * layer.weight_scale.astype(mx.float32)], dtype)


def test_sinkhorn():
    module = fresh("models.deepseek_v41")
    comb, eps = mx.abs(normal(70, 4, 4)) + 0.1, mx.array([1e-3])
    with metal.on_metal():
        (ours,) = module._sinkhorn_kernel(
            inputs=[comb, eps],
            template=[("HC", 4), ("ITERS", 3)],
            grid=(70, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[comb.shape],
            output_dtypes=[mx.float32],
        )
    assert_close([ours], [module._sinkhorn(comb, iters=3, eps=eps)], mx.float32)


def test_wkv7():
    module = fresh("models.rwkv7")
    B, T, H, D = 1, 3, 2, 64
    rows = [normal(B, T, H, D, scale=0.2) for _ in range(6)]
    state = normal(B, H, D, D)
    with metal.on_metal():
        y, last = module.wkv7_kernel(*rows, state)
    expected = []
    for t in range(T):
        out, state = module._wkv7_step_ops(*(r[:, t] for r in rows), state)
        expected.append(out.reshape(B, 1, H, D))
    assert_close((y, last), (mx.concatenate(expected, axis=1), state), mx.float32)


def test_attention_over_residuals():
    module = fresh("models.kimi_k3")
    K, N, D = 3, 2, 96
    raw, partial, weight = normal(K, N, D), normal(N, D), normal(D)
    inv_rms, eps = mx.rsqrt((raw * raw).mean(-1) + 1e-5), mx.array([1e-5])
    with metal.on_metal():
        ours = module._attn_res_kernel(
            inputs=[raw, inv_rms, partial, weight, eps, N],
            template=[("InT", mx.float32), ("K", K), ("D", D), ("THREADS", 512)],
            grid=(512, N, 1),
            threadgroup=(512, 1, 1),
            output_shapes=[(N, D)],
            output_dtypes=[mx.float32],
        )
    assert_close(ours, [module._attn_res_combine(raw, inv_rms, partial, weight, eps)], mx.float32)


@pytest.mark.parametrize("loss", ["kl", "js"])
def test_the_race_in_published_kernels(loss):
    """mlx-lm's training losses overwrite shared maxima while other SIMD groups may still read them."""
    module = fresh("tuner.losses")
    module.can_run_metal = lambda: True
    with metal.on_metal():
        setattr(module, f"_{loss}_forward_kernel", getattr(module, f"_make_{loss}_forward_kernel")())
        with pytest.raises(metal.KernelError, match=r"race: .* writes byte 0 of threadgroup memory .* read at"):
            getattr(module, f"_{loss}_div_loss")(normal(1, 4100), normal(1, 4100))
