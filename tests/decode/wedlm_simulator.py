"""WeDLM's procedure without a cache, and Qwen3's network in float64: written from the paper, not from common/.

Rows stand in their natural order; visibility is explicit. A filled row sees filled rows up to itself; a mask sees all
filled rows and the masks up to itself.
"""

from collections.abc import Callable

import numpy as np

Forward = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]  # tokens, positions, visible (T, T) -> logits


def qwen3(tensors: dict[str, np.ndarray], config: dict) -> Forward:
    """The network of the checkpoint's float64 `tensors`, without a cache."""
    heads, kv_heads, D = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    eps = config["rms_norm_eps"]

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight

    def rotate(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        angle = positions[:, None, None] * theta ** (-np.arange(D // 2) / (D // 2))
        a, b = x[..., : D // 2], x[..., D // 2 :]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)

    def forward(tokens: np.ndarray, positions: np.ndarray, visible: np.ndarray) -> np.ndarray:
        x, T = tensors["model.embed_tokens.weight"][tokens], len(tokens)
        for i in range(config["num_hidden_layers"]):
            w = {name.split(f"layers.{i}.")[1]: t for name, t in tensors.items() if f"layers.{i}." in name}
            h = norm(x, w["input_layernorm.weight"])
            q, k, v = (
                (h @ w[f"self_attn.{n}_proj.weight"].T).reshape(T, count, D)
                for n, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
            )
            q = rotate(norm(q, w["self_attn.q_norm.weight"]), positions)
            k = np.repeat(rotate(norm(k, w["self_attn.k_norm.weight"]), positions), heads // kv_heads, 1)
            v = np.repeat(v, heads // kv_heads, 1)
            scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(D)
            scores = np.where(visible, scores, -np.inf)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            x = x + np.einsum("hij,jhd->ihd", p, v).reshape(T, -1) @ w["self_attn.o_proj.weight"].T
            h = norm(x, w["post_attention_layernorm.weight"])
            gate = h @ w["mlp.gate_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
        x = norm(x, tensors["model.norm.weight"])
        return x @ tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).T

    return forward


def visible(filled: np.ndarray) -> np.ndarray:
    """(T, T) bool for rows in natural order; filled (T,) bool."""
    before = np.tri(len(filled), dtype=bool)
    return np.where(filled[:, None], before & filled, filled | before)


def simulate(
    forward: Forward,
    prompt: list[int],
    count: int,
    window: int,
    tau: float | None,
    penalty: float,
    mask: int,
    order: list[int] | None = None,
) -> tuple[list[int], int]:
    """`count` tokens after the prompt, and the number of forwards that filled a position.

    order  takes the filled positions one after another, counted from the end of the prompt
    """
    tokens, filled, fills = list(prompt), [True] * len(prompt), 0
    while True:
        first = filled.index(False) if False in filled else len(filled)
        if first >= len(prompt) + count:
            return tokens[len(prompt) : len(prompt) + count], fills
        tokens += [mask] * (first + window - len(tokens))
        filled += [False] * (first + window - len(filled))
        flags = np.array(filled)
        logits = forward(np.array(tokens), np.arange(len(tokens)), visible(flags))
        masks = np.flatnonzero(~flags)
        rows = np.delete(logits[masks], mask, axis=1)
        ids = np.delete(np.arange(logits.shape[1]), mask)
        p = np.exp(rows - rows.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        adjusted = -(p * np.log(np.maximum(p, 1e-300))).sum(-1) + penalty * (masks - masks[0])
        chosen = np.flatnonzero(adjusted < tau) if tau is not None else np.array([], int)
        for j in chosen if len(chosen) else [adjusted.argmin()]:
            tokens[masks[j]], filled[masks[j]] = int(ids[rows[j].argmax()]), True
            if order is not None:
                order.append(int(masks[j]) - len(prompt))
        fills += 1


def simulate_checked(
    forward: Forward,
    prompt: list[int],
    count: int,
    window: int,
    tau: float,
    penalty: float,
    sure: float,
    mask: int,
) -> tuple[list[int], int]:
    """As `simulate`, where fills of at least `sure` nats are confirmed by the row before them in a later forward."""
    tokens, filled, fills = list(prompt), [True] * len(prompt), 0
    doubtful: set[int] = set()
    while True:
        first = filled.index(False) if False in filled else len(filled)
        if min([first, *(at for at in doubtful if at < first)]) >= len(prompt) + count:
            return tokens[len(prompt) : len(prompt) + count], fills
        tokens += [mask] * (first + window - len(tokens))
        filled += [False] * (first + window - len(filled))
        flags = np.array(filled)
        logits = forward(np.array(tokens), np.arange(len(tokens)), visible(flags))
        fills += 1
        wrong = [at for at in sorted(doubtful) if at < first and logits[at - 1].argmax() != tokens[at]]
        if wrong:
            tokens = [*tokens[: wrong[0]], int(logits[wrong[0] - 1].argmax())]
            filled, doubtful = [True] * len(tokens), set()
            continue
        doubtful = {at for at in doubtful if at > first}
        masks = np.flatnonzero(~flags)
        rows = logits[masks].copy()
        rows[:, mask] = -np.inf
        best = rows.argmax(-1)
        p = np.exp(rows - rows.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        entropies = -(p * np.log(np.maximum(p, 1e-300))).sum(-1)
        tokens[first] = int(best[0] if entropies[0] < sure else logits[first - 1].argmax())
        filled[first], other = True, tokens[first] != best[0]
        for at, token, entropy in zip(masks[1:], best[1:], entropies[1:], strict=True):
            if entropy + penalty * (at - first) < tau:
                tokens[at], filled[at] = int(token), True
                if other or entropy >= sure:
                    doubtful.add(int(at))
