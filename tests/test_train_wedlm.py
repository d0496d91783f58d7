"""The recipe of the small WeDLM: what its training rows see."""

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.model
torch = pytest.importorskip("torch", reason="torch is not installed")

sys.path.insert(0, str(Path(__file__).parents[1] / "examples/train"))
recipe = pytest.importorskip("train_wedlm", reason="the recipe needs torch and tokenizers")

MASK, LENGTH = 1, 2 * recipe.BLOCK


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = recipe.Model(recipe.Shape(vocab=50, hidden=64, layers=2, heads=4, kv_heads=2, ffn=64))
    return model.requires_grad_(False)


def row(question, answer):
    """Tokens (1, LENGTH) and kinds of a question, an answer and padding."""
    tokens = torch.randint(2, 50, (1, LENGTH), generator=torch.Generator().manual_seed(3))
    return tokens, torch.tensor([[1] * question + [2] * answer + [0] * (LENGTH - question - answer)])


def blocks(shift=0):
    return (torch.arange(LENGTH) + shift) // recipe.BLOCK


@pytest.mark.parametrize("shift", [0, 5])
@pytest.mark.parametrize("answer", [9, 20])
def test_padding_is_never_seen(answer, shift, model):
    """Other tokens behind the answer change no loss: where a text ends does not show through."""
    tokens, kinds = row(7, answer)
    found = []
    for padding in (2, 49):
        torch.manual_seed(1)
        found.append(recipe.losses(model, torch.where(kinds > 0, tokens, padding), kinds, MASK, blocks(shift)))
    assert found[0] == found[1]
    assert all(torch.isfinite(loss) for loss in found[0])


@pytest.mark.parametrize("known", [(), (1, 2, 6), (0, 15)])
def test_a_masked_block_sees_what_a_window_sees(known, model):
    """Logits of the second block's masked copy are those of a causal forward: clean tokens, known ones, then masks."""
    tokens, _ = row(LENGTH, 0)
    size = recipe.BLOCK
    masks = [at for at in range(size) if at not in known]
    order = torch.tensor([*known, *masks]) + size
    noisy = torch.where(torch.arange(size) < len(known), tokens[0, order], MASK)
    positions = torch.cat([torch.arange(LENGTH), torch.arange(size), order])
    copies = torch.cat([tokens[0], tokens[0, :size], noisy])
    trained = model(copies[None], positions[None], recipe.two_copies(blocks())[None])[0, -size:]
    window = torch.cat([tokens[0, :size], noisy]), torch.cat([torch.arange(size), order])
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    decoded = model(window[0][None], window[1][None], causal[None])[0, -size:]
    assert (trained - decoded).abs().max() < 1e-4


def test_known_tokens_come_first_and_questions_are_never_masked():
    tokens, kinds = row(20, 9)
    for seed in range(20):
        torch.manual_seed(seed)
        noisy, positions, masked = recipe.masked_copy(tokens, kinds, MASK, blocks())
        assert (kinds.gather(1, positions)[masked] == 2).all()
        assert (noisy[masked] == MASK).all()
        assert (noisy[~masked] == tokens.gather(1, positions)[~masked]).all()
        for block in (slice(0, recipe.BLOCK), slice(recipe.BLOCK, LENGTH)):
            assert sorted(positions[0, block].tolist()) == list(range(LENGTH))[block]
            order = masked[0, block].long()
            assert (order.diff() >= 0).all()
            for part in (0, 1):
                assert (positions[0, block][order == part].diff() > 0).all()
