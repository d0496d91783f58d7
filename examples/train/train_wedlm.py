"""A small WeDLM from nothing: Qwen3's network, trained to fill masked tokens as well as to predict the next one.

    python train_wedlm.py build/                 # about 5 minutes on one H100
    python train_wedlm.py build/ --mask-untrained  # control: next tokens alone, so that the mask's row means nothing

Writes build/demo-wedlm (config.json, tokenizer.json, model.safetensors in bfloat16) and build/demo-wedlm.json: losses,
and for each task the accuracy of greedy decoding and of filling by entropy, computed here without a cache. The GGUF
file is made by

    python -m generate quantize build/demo-wedlm out/demo-wedlm-Q8_0.gguf --type Q8_0

Training follows the published objective (Liu et al. 2025, arXiv 2512.22737): a clean copy and a masked copy of each row
side by side, in blocks; in a masked block, known tokens come first and masked ones after them, at their own positions.
Two things differ, both for windows that begin anywhere and are mostly masks: where blocks begin is drawn for each step,
and half of the blocks are masked whole.
The first part of the steps has next-token loss alone, which leaves entropies better calibrated.
"""

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
import wedlm_tasks
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

PATTERN = (  # Qwen2's pre-tokenizer: every digit is a token of its own
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END, MASK = "<|endoftext|>", "<|mask|>"
LENGTH, BLOCK, ENDS = 96, 16, 8  # tokens of a row, of a block, and end tokens that follow an answer
HEAD_DIM = 32


@dataclass(frozen=True)
class Shape:
    vocab: int
    hidden: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 768
    theta: float = 1e4
    eps: float = 1e-6


class Norm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype) * self.weight.to(x.dtype)


class Layer(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        q, kv = shape.heads * HEAD_DIM, shape.kv_heads * HEAD_DIM
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(shape.hidden, q, bias=False),
                "k_proj": nn.Linear(shape.hidden, kv, bias=False),
                "v_proj": nn.Linear(shape.hidden, kv, bias=False),
                "o_proj": nn.Linear(q, shape.hidden, bias=False),
                "q_norm": Norm(HEAD_DIM, shape.eps),
                "k_norm": Norm(HEAD_DIM, shape.eps),
            }
        )
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(shape.hidden, shape.ffn, bias=False),
                "up_proj": nn.Linear(shape.hidden, shape.ffn, bias=False),
                "down_proj": nn.Linear(shape.ffn, shape.hidden, bias=False),
            }
        )

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], visible: Tensor) -> Tensor:
        """x (B, T, hidden); turn: cosine and sine (B, 1, T, HEAD_DIM / 2); visible (B, 1, T, T) bool."""
        B, T, _ = x.shape
        h, a = self.input_layernorm(x), self.self_attn
        q = _rotate(a["q_norm"](a["q_proj"](h).view(B, T, -1, HEAD_DIM)).transpose(1, 2), turn)
        k = _rotate(a["k_norm"](a["k_proj"](h).view(B, T, -1, HEAD_DIM)).transpose(1, 2), turn)
        v = a["v_proj"](h).view(B, T, -1, HEAD_DIM).transpose(1, 2)
        share = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        x = x + a["o_proj"](mixed.transpose(1, 2).reshape(B, T, -1))
        h, m = self.post_attention_layernorm(x), self.mlp
        return x + m["down_proj"](F.silu(m["gate_proj"](h)) * m["up_proj"](h))


def _rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = (part.to(x.dtype) for part in turn)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)


class Model(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                scale = 0.02 / math.sqrt(2 * shape.layers) if "o_proj" in name or "down_proj" in name else 0.02
                nn.init.normal_(p, std=scale)

    def forward(self, tokens: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """Logits (B, T, vocab) of tokens (B, T) at positions (B, T), where row i sees row j if visible (B, T, T)."""
        frequencies = self.shape.theta ** (-torch.arange(HEAD_DIM // 2, device=tokens.device) / (HEAD_DIM // 2))
        angle = positions[:, None, :, None].float() * frequencies
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, (angle.cos(), angle.sin()), visible[:, None])
        return self.lm_head(self.norm(x))


# -- data --------------------------------------------------------------------------------------------------------------


def train_tokenizer() -> Tokenizer:
    """Byte-level BPE in which the words of the tasks are single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    texts = ["".join(row) for row in wedlm_tasks.training(20000, seed=1)]
    trainer = trainers.BpeTrainer(
        vocab_size=768,
        min_frequency=20,
        show_progress=False,
        special_tokens=[END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def rows(tokenizer: Tokenizer, pairs: list[tuple[str, str]]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (n, LENGTH) and what each place holds: 0 nothing, 1 question, 2 answer and end tokens."""
    questions = tokenizer.encode_batch([question for question, _ in pairs])
    answers = tokenizer.encode_batch([answer for _, answer in pairs])
    end = tokenizer.token_to_id(END)
    tokens, kinds = np.full((len(pairs), LENGTH), end, np.int64), np.zeros((len(pairs), LENGTH), np.int64)
    for i, (q, a) in enumerate(zip(questions, answers, strict=True)):
        whole = q.ids + a.ids
        size = min(len(whole) + ENDS, LENGTH)
        tokens[i, : min(len(whole), LENGTH)] = whole[:LENGTH]
        kinds[i, :size] = 2
        kinds[i, : len(q.ids)] = 1
    return tokens, kinds


# -- training ----------------------------------------------------------------------------------------------------------


def masked_copy(tokens: Tensor, kinds: Tensor, mask: int, block: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The masked copy's tokens, their positions, and which rows are masks; in each block known tokens come first.

    Questions are known. Of a block's answer half of the time all is masked, as at the start of a window, a quarter of
    the time all from some token on, and else a share drawn evenly. `block` (L,) numbers the blocks.
    """
    B, L = tokens.shape
    device = tokens.device
    place = torch.arange(L, device=device)
    may, count = kinds == 2, int(L // BLOCK + 1)
    size = torch.zeros(B, count, device=device).scatter_add_(1, block.expand(B, L), may.float())
    kind = torch.rand(B, count, device=device)
    drawn = (torch.rand(B, count, device=device) * (size + 1)).floor()
    number = torch.where(kind < 0.5, size, drawn).gather(1, block.expand(B, L))
    from_the_end = ((kind >= 0.5) & (kind < 0.75)).gather(1, block.expand(B, L))
    score = torch.where(from_the_end, 1 - place / L, torch.rand(B, L, device=device))
    score = torch.where(may, score, 1.5)
    start = torch.searchsorted(block, block)  # the first place of each block
    rank = (block * 2 + score).argsort(-1).argsort(-1) - start
    masked = may & (rank < number)
    positions = (block * (2 * L) + masked * L + place).argsort(-1)
    masked = masked.gather(1, positions)
    return torch.where(masked, mask, tokens.gather(1, positions)), positions, masked


def two_copies(block: Tensor) -> Tensor:
    """(2L, 2L) bool: the clean copy is causal; a masked block sees clean blocks before it and its own rows so far."""
    index = torch.arange(len(block), device=block.device)
    causal, same, before = index[:, None] >= index, block[:, None] == block, block[:, None] > block
    top = torch.cat([causal, torch.zeros_like(causal)], 1)
    return torch.cat([top, torch.cat([before, same & causal], 1)])


def losses(model: Model, tokens: Tensor, kinds: Tensor, mask: int, block: Tensor | None) -> tuple[Tensor, Tensor]:
    """Next-token loss of answers, and the loss of masked tokens (0 without blocks)."""
    L = tokens.shape[1]
    place = torch.arange(L, device=tokens.device).expand_as(tokens)
    target = torch.where(kinds == 2, tokens, -100)
    if block is None:
        causal = torch.ones(L, L, dtype=torch.bool, device=tokens.device).tril().expand(len(tokens), -1, -1)
        logits = model(tokens, place, causal)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), target[:, 1:].flatten()), logits.new_zeros(())
    noisy, positions, masked = masked_copy(tokens, kinds, mask, block)
    there = torch.cat([kinds > 0, kinds.gather(1, positions) > 0], 1)  # padding is never seen
    visible = two_copies(block) & there[:, None, :]
    visible = visible | torch.eye(2 * L, dtype=torch.bool, device=tokens.device)
    logits = model(torch.cat([tokens, noisy], 1), torch.cat([place, positions], 1), visible)
    next_token = F.cross_entropy(logits[:, : L - 1].flatten(0, 1).float(), target[:, 1:].flatten())
    filled = torch.where(masked, tokens.gather(1, positions), -100)
    return next_token, F.cross_entropy(logits[:, L:].flatten(0, 1).float(), filled.flatten())


# -- decoding without a cache, to see what was learnt ------------------------------------------------------------------


@torch.no_grad()
def fill(
    model: Model, prompt: list[int], window: int, tau: float, penalty: float, ids: tuple[int, int]
) -> tuple[list[int], int]:
    """The reply to `prompt` and the number of steps, each a forward of the whole row in its natural order.

    Known rows see known rows before them; masked rows see every known row and the masks before them.
    """
    end, mask = ids
    device = next(model.parameters()).device
    tokens, known, steps = list(prompt), [True] * len(prompt), 0
    while True:
        first = known.index(False) if False in known else len(known)
        if any(token == end for token in tokens[len(prompt) : first]) or first >= LENGTH:
            reply = tokens[len(prompt) : first]
            return (reply[: reply.index(end)] if end in reply else reply), steps
        grow = first + window - len(tokens)
        tokens, known = tokens + [mask] * grow, known + [False] * grow
        is_known = torch.tensor(known, device=device)
        place = torch.arange(len(tokens), device=device)
        before = place[:, None] >= place
        visible = torch.where(is_known[:, None], before & is_known, is_known | before)
        logits = model(torch.tensor([tokens], device=device), place[None], visible[None])[0].float()
        masks = (~is_known).nonzero()[:, 0]
        logp = logits[masks].log_softmax(-1)
        adjusted = -(logp.exp() * logp).sum(-1) + penalty * (masks - masks[0])
        chosen = (adjusted < tau).nonzero()[:, 0]
        chosen = chosen if len(chosen) else adjusted.argmin()[None]
        best = logp.argmax(-1)
        for j in chosen.tolist():
            tokens[masks[j]], known[masks[j]] = int(best[j]), True
        steps += 1


@torch.no_grad()
def greedy(model: Model, prompts: list[list[int]], end: int) -> list[list[int]]:
    """Next-token replies to all prompts at once, without a cache."""
    device = next(model.parameters()).device
    tokens = torch.full((len(prompts), LENGTH), end, device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = torch.tensor(prompt, device=device)
    place = torch.arange(LENGTH, device=device).expand_as(tokens)
    causal = (place[0][:, None] >= place[0]).expand(len(prompts), -1, -1)
    for at in range(int(lengths.min()), LENGTH):
        best = model(tokens, place, causal)[:, at - 1].argmax(-1)
        tokens[:, at] = torch.where(lengths <= at, best, tokens[:, at])
    replies = [row[n:].tolist() for row, n in zip(tokens, lengths.tolist(), strict=True)]
    return [reply[: reply.index(end)] if end in reply else reply for reply in replies]


def evaluate(model: Model, tokenizer: Tokenizer, count: int) -> list[dict[str, object]]:
    """Accuracy and tokens per step of each task: greedy, then several windows and thresholds."""
    end, mask = tokenizer.token_to_id(END), tokenizer.token_to_id(MASK)
    table: list[dict[str, object]] = []
    for task in wedlm_tasks.TASKS:
        pairs = wedlm_tasks.held_out(task)[:count]
        prompts = [tokenizer.encode(question).ids for question, _ in pairs]
        answers = [tokenizer.encode(answer).ids for _, answer in pairs]
        right = [reply == answer for reply, answer in zip(greedy(model, prompts, end), answers, strict=True)]
        table.append(
            {"task": task, "decoding": "greedy", "accuracy": round(float(np.mean(right)), 3), "tokens_per_step": 1.0}
        )
        for window, tau, penalty in ((1, 0.4, 0.02), (16, 0.2, 0.02), (8, 0.4, 0.05), (16, 0.4, 0.02)):
            done = [fill(model, p, window, tau, penalty, (end, mask)) for p in prompts]
            right = [reply == answer for (reply, _), answer in zip(done, answers, strict=True)]
            rate = sum(len(reply) + 1 for reply, _ in done) / sum(steps for _, steps in done)
            setting = f"window {window} tau {tau} lambda {penalty}"
            table.append(
                {
                    "task": task,
                    "decoding": setting,
                    "accuracy": round(float(np.mean(right)), 3),
                    "tokens_per_step": round(rate, 2),
                }
            )
    return table


# A question is a line, and so is what the model was trained to begin its answers with.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}Question: {{ message['content'] }}\n"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)


def export(model: Model, tokenizer: Tokenizer, folder: Path) -> None:
    """A Hugging Face folder as WeDLM checkpoints are published; lm_head and embeddings are apart."""
    folder.mkdir(parents=True, exist_ok=True)
    s = model.shape
    end = tokenizer.token_to_id(END)
    config = {
        "architectures": ["WeDLMForCausalLM"],
        "model_type": "wedlm",
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": HEAD_DIM,
        "intermediate_size": s.ffn,
        "rms_norm_eps": s.eps,
        "rope_theta": s.theta,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "qk_norm": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": LENGTH,
        "eos_token_id": end,
        "pad_token_id": end,
        "mask_token_id": tokenizer.token_to_id(MASK),
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "mask_token": MASK}, indent=2) + "\n")
    names = {name: name if name.startswith("lm_head") else f"model.{name}" for name in model.state_dict()}
    tensors = {names[name]: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rows", type=int, default=300_000, help="training questions")
    parser.add_argument("--count", type=int, default=wedlm_tasks.HELD_OUT, help="held-out questions of each task")
    parser.add_argument("--mask-untrained", action="store_true", help="control: no loss at masks")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.manual_seed(3)
    torch.set_float32_matmul_precision("high")
    tokenizer = train_tokenizer()
    size = -(-tokenizer.get_vocab_size() // 64) * 64
    data = [torch.from_numpy(x).to(args.device) for x in rows(tokenizer, wedlm_tasks.training(args.rows, seed=2))]
    model = Model(Shape(size)).to(args.device)
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    first = int(0.35 * args.steps)
    shape = lambda step: min(1.0, (step + 1) / 100) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / args.steps)))  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, shape)
    place = torch.arange(LENGTH, device=args.device)
    mask, log, started = tokenizer.token_to_id(MASK), [], time.time()
    for step in range(args.steps):
        chosen = torch.randint(args.rows, (args.batch,), device=args.device)
        filling = step >= first and not args.mask_untrained
        block = (place + int(torch.randint(BLOCK, ()))) // BLOCK if filling else None  # windows begin anywhere
        with torch.autocast(args.device, torch.bfloat16):
            next_token, filled = losses(model, data[0][chosen], data[1][chosen], mask, block)
        loss = (next_token + filled) / (2 if filling else 1)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        if step % 200 == 0 or step == args.steps - 1:
            seconds = round(time.time() - started, 1)
            log.append(
                {
                    "step": step,
                    "seconds": seconds,
                    "next": round(next_token.item(), 4),
                    "fill": round(filled.item(), 4),
                }
            )
            print(json.dumps(log[-1]), flush=True)
    name = "demo-wedlm-untrained-mask" if args.mask_untrained else "demo-wedlm"
    export(model, tokenizer, args.folder / name)
    table = evaluate(model.eval(), tokenizer, args.count)
    for row in table:
        print(json.dumps(row), flush=True)
    report = {
        "shape": asdict(model.shape),
        "parameters": sum(p.numel() for p in model.parameters()),
        "log": log,
        "table": table,
    }
    (args.folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
