"""Score documents by their relevance to a query, as Qwen3-Reranker does: the probability that it answers "yes"."""

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from common.checkpoint import Checkpoint
from common.embeddings import empty_state, hidden_states
from common.errors import BimetalError, NotFiniteError, UsageError, shown
from common.models import Model
from common.models.llama import CLASSIFIERS
from common.quants import dequantize
from common.tokenizer import Tokenizer

RANK = 4  # ARCHITECTURE.pooling_type of a GGUF file of a reranker
RULE = 'Note that the answer can only be "yes" or "no".'  # in the chat template of a folder of a reranker
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    f"provided. {RULE}<|im_end|>\n<|im_start|>user\n<Instruct>: {{instruction}}\n<Query>: {{query}}\n"
    "<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
MATRICES = {  # from whose rows the logits of a model's tokens come: the first that there is
    "gguf": ("output.weight", "token_embd.weight"),
    "safetensors": ("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight"),
}


@dataclass(frozen=True)
class Ranked:
    """A document of a list: its index, its relevance to the query from 0 to 1, and the tokens of its prompt."""

    index: int
    score: float
    tokens: int


@dataclass(frozen=True)
class Reranker:
    """The weights and the prompt that a model's files state.

    weights  (hidden,) float64; their product with the last hidden state is the logit of "yes" less that of "no"
    prompt   a text with the places {query}, {document} and perhaps {instruction}
    """

    weights: np.ndarray
    prompt: str


@dataclass(frozen=True)
class Prompts:
    """Token ids of a prompt for each document, most of which begin with `shared`."""

    shared: list[int]
    each: list[list[int]]


# -- what a model's files state ----------------------------------------------------------------------------------------


def find_reranker(checkpoint: Checkpoint, tokenizer: Tokenizer, is_asked: bool) -> Reranker:
    """Return what a model's files state; raises UsageError for one that is no reranker.

    is_asked  the caller says that it is a Qwen3-Reranker, which need not be stated then
    """
    architecture = checkpoint.config.get("general.architecture", checkpoint.config.get("model_type"))
    prompt = _stated_prompt(checkpoint, tokenizer) or (PROMPT if is_asked else None)
    if architecture != "qwen3" or prompt is None:
        why = (
            f"its architecture is {shown(architecture)}"
            if architecture != "qwen3"
            else "its files state no prompt of a reranker"
        )
        raise UsageError(
            f"{checkpoint.path.name} is not used as a reranker: {why}; supported is Qwen3-Reranker, in GGUF files of "
            "llama.cpp's converter, in folders whose chat template is a reranker's, and elsewhere with reranker=True "
            "(serve --rerank)"
        )
    if lacking := [token for token in set(re.findall(r"<\|\w+\|>", prompt)) - {*tokenizer.control_tokens}]:
        raise BimetalError(f"{checkpoint.path}: the tokenizer lacks {lacking[0]}, a token of a reranker's prompt")
    name = CLASSIFIERS[checkpoint.format]
    weights = _labels(checkpoint, name) if name in checkpoint.tensors else _tokens(checkpoint, tokenizer)
    if not np.isfinite(weights).all():
        raise BimetalError(f"{checkpoint.path}: the weights of the labels yes and no are not finite")
    return Reranker(weights, prompt)


def _stated_prompt(checkpoint: Checkpoint, tokenizer: Tokenizer) -> str | None:
    """Return the prompt of a file that states that its model is a reranker, else None."""
    if checkpoint.config.get("qwen3.pooling_type") == RANK:
        found = tokenizer.chat_templates.get("rerank", "").replace(INSTRUCTION, "{instruction}")
    elif RULE in (source := tokenizer.chat_template or ""):
        from common.chat import render  # Jinja is for chats alone

        places = {"system": "{instruction}", "query": "{query}", "document": "{document}"}
        found = render(source, [{"role": role, "content": place} for role, place in places.items()])
    else:
        return None
    is_whole = all(found.count(place) == 1 for place in ("{query}", "{document}")) and not found.endswith("{document}")
    return found if is_whole else None


def _labels(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """Return the weights of a classifier: of its one label, or of the label "yes" less those of "no"."""
    config, values = checkpoint.config, np.atleast_2d(dequantize(checkpoint.tensors[name]).astype(np.float64))
    by_id, labels = config.get("id2label"), config.get("qwen3.classifier.output_labels")
    if isinstance(by_id, dict):
        labels = [by_id.get("0"), by_id.get("1")]
    hidden = config.get("qwen3.embedding_length", config.get("hidden_size"))
    if values.shape == (1, hidden):
        return values[0]
    if values.shape != (2, hidden) or not isinstance(labels, list) or labels not in (["yes", "no"], ["no", "yes"]):
        raise BimetalError(
            f"{checkpoint.path}: {name} has the shape {values.shape} and the labels {shown(labels)}; a reranker has "
            f"rows of {hidden} values, one or those of the labels yes and no"
        )
    yes = labels.index("yes")
    return values[yes] - values[1 - yes]


def _tokens(checkpoint: Checkpoint, tokenizer: Tokenizer) -> np.ndarray:
    """Return the weights of the token "yes" in the model's head less those of "no"."""
    first, *others = MATRICES[checkpoint.format]
    is_tied = checkpoint.format == "gguf" or checkpoint.config.get("tie_word_embeddings") is True
    name = next((name for name in (first, *(others if is_tied else ())) if name in checkpoint.tensors), None)
    if name is None or checkpoint.config.get("qwen3.pooling_type") == RANK:
        lacking = "a head" if name is None else CLASSIFIERS["gguf"]
        raise BimetalError(f"{checkpoint.path} lacks {lacking}, from which the scores of a reranker come")
    tensor, ids = checkpoint.tensors[name], [tokenizer.token_to_id(word) for word in ("yes", "no")]
    if any(id is None or id >= tensor.shape[0] for id in ids):
        raise BimetalError(f"{checkpoint.path}: the tokenizer lacks the tokens yes and no, whose logits are the score")
    yes, no = dequantize(tensor.take_rows(np.array(ids))).astype(np.float64)
    return yes - no


# -- prompts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """The surroundings of a document in its prompt, without control tokens in what the caller gives.

    head    token ids up to the last control token before the document
    begun   the text between this token and the document
    shared  token ids with which the prompts of most documents begin
    tail    token ids after the document
    """

    head: list[int]
    begun: str
    shared: list[int]
    tail: list[int]

    def prompt(self, tokenizer: Tokenizer, document: str, most: int | None) -> list[int]:
        """Encode the prompt of a document, whose end is cut off beyond `most` tokens; None: not cut."""
        whole = self.head + tokenizer.encode_plain(self.begun + document)
        return whole[: None if most is None else most - len(self.tail)] + self.tail


def frame_of(reranker: Reranker, tokenizer: Tokenizer, query: str, instruction: str | None) -> Frame:
    """Encode what surrounds the documents of a query; raises UsageError for an instruction that has no place."""
    if instruction is not None and "{instruction}" not in reranker.prompt:
        raise UsageError("the prompt in the model's file takes no instruction; leave instruction out")
    control = re.compile(f"({'|'.join(map(re.escape, sorted(tokenizer.control_tokens, key=len, reverse=True)))})")
    given = {"{query}": query, "{instruction}": INSTRUCTION if instruction is None else instruction}

    def filled(text: str) -> str:
        return re.sub("|".join(given), lambda place: given[place[0]], text)

    def ids(parts: Sequence[str]) -> list[int]:
        """Encode parts of the prompt, which are alternately texts and control tokens."""
        encoders = (
            lambda text: tokenizer.encode_plain(filled(text)),
            partial(tokenizer.encode, add_special_tokens=False),
        )
        return [id for at, part in enumerate(parts) for id in encoders[at % 2](part)]

    before, _, after = reranker.prompt.partition("{document}")
    *parts, last = control.split(before)
    head, begun = ids(parts), filled(last)
    return Frame(head, begun, head + tokenizer.encode_plain(begun.rstrip()), ids(control.split(after)))


# -- scores ------------------------------------------------------------------------------------------------------------


def rank(
    model: Model, reranker: Reranker, prompts: Prompts, top_n: int | None = None
) -> Generator[None, None, list[Ranked]]:
    """Score each document, and return the `top_n` most relevant ones in order, or all.

    Between two `yield`s one step of the model is computed. What the prompts share is read once. A score does not depend
    on the other documents.
    """
    found, shared = list[Ranked](), prompts.shared
    if not prompts.each:
        return found
    state = empty_state(model, max(map(len, [shared, *prompts.each])))
    for _ in hidden_states(model, state, shared):
        yield
    begun = state.snapshot()
    for index, ids in enumerate(prompts.each):
        if shared == ids[: len(shared)] != ids:
            state.restore(begun)
            steps = hidden_states(model, state, ids[len(shared) :])
        else:
            steps = hidden_states(model, empty_state(model, len(ids)), ids)
        logit = np.float64(np.nan)
        for hidden in steps:
            logit = hidden[-1] @ reranker.weights
            yield
        if not np.isfinite(logit):
            raise NotFiniteError(f"the logit of document {index} is not finite")
        score = np.exp(-np.logaddexp(0, -logit))  # the logistic function
        found.append(Ranked(index, float(score), len(ids)))
    return sorted(found, key=lambda each: -each.score)[:top_n]
