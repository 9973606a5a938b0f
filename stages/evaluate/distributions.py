"""The next-token distributions of a served variant on held-out text, and its greedy answers to the beginnings of the
texts, for ``scoring.divergence``.

They are stored as samples, so that any two variants can be compared later without a server. They come from the server,
not from the weights alone, because a user's answers go through the engine's kernels as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Final

from stages.evaluate.questions.question import KIND
from stages.parts.base.errors import ConfigError
from stages.parts.base.workload import Workload
from stages.parts.model.corpora import read_documents, text_digest
from stages.parts.samples.lines import HeldOutDocument
from stages.parts.vllm.client import Access, chat, complete, given, tokenize, usable

LISTED: Final = 20
"""Tokens of each distribution: vLLM's default limit (``--max-logprobs``)."""
DECIMALS: Final = 6
"""Decimals of a log-probability: the precision of single precision near 0."""
DOCUMENTS_PER_REQUEST: Final = 8
"""An answer is then about 2 MB."""
BEGINNING: Final = 300
"""The most characters of a text that are given to be continued, which is at most half of it."""
CONTINUED: Final = 64
"""Tokens of an answer."""
CONTINUE: Final = "Continue this text:\n\n"


def held_out_digest(workload: Workload) -> str | None:
    """Compute the sha256 of the text, which must exist; None if the workload compares no distributions."""
    return text_digest(workload.divergence_text, KIND) if workload.divergence_documents else None


def measure_distributions(
    access: Access, workload: Workload, max_model_len: int, *, chats: bool = False
) -> list[HeldOutDocument]:
    """Measure the distributions at each position of each document, and its continuation, which is asked for in a chat
    if the model *chats*; none if the workload asks for none. Raises ConfigError if the text cannot be read, or has no
    document of two tokens."""
    if not workload.divergence_documents:
        return []
    # The server generates one token after the text.
    length = min(workload.divergence_tokens, max_model_len - 1)
    held_out = read_documents(workload.divergence_text, KIND)
    tokenized = ((text, tokenize(access, text)[:length]) for text in held_out)
    documents = list(islice((pair for pair in tokenized if len(pair[1]) > 1), workload.divergence_documents))
    if not documents:
        raise ConfigError(f"the held-out text {workload.divergence_text} has no document of two tokens")
    measured = []
    for start in range(0, len(documents), DOCUMENTS_PER_REQUEST):
        texts, prompts = zip(*documents[start : start + DOCUMENTS_PER_REQUEST], strict=True)
        answers = complete(access, prompts, max_tokens=1, prompt_logprobs=LISTED)
        # A space at the end would be a token that no text has there.
        beginnings = [text[: min(BEGINNING, len(text) // 2 + 1, max_model_len // 3)].rstrip() for text in texts]
        continued = _continued(access, beginnings, chats=chats)
        with usable(access.url):
            measured += [
                _measured(start + index, *document)
                for index, document in enumerate(zip(prompts, answers, continued, strict=True))
            ]
    return measured


def _continued(access: Access, beginnings: Sequence[str], *, chats: bool) -> list[Sequence[int]]:
    """Ask for greedy answers; their tokens."""
    options = {"max_tokens": CONTINUED, "return_token_ids": True}
    if chats:
        with ThreadPoolExecutor(len(beginnings)) as pool:
            choices = list(pool.map(lambda beginning: chat(access, CONTINUE + beginning, **options), beginnings))
    else:
        choices = complete(access, beginnings, **options)
    with usable(access.url):
        return [choice["token_ids"] for choice in choices]


def _measured(number: int, tokens: Sequence[int], answer: dict[str, Any], continued: Sequence[int]) -> HeldOutDocument:
    positions = [
        # vLLM adds the actual token of the text, whatever its rank, which its AVX2 build counts modulo 256.
        sorted((-entry["logprob"], entry["rank"], int(token)) for token, entry in listed.items())[:LISTED]
        for listed in given(answer)
    ]
    if len(positions) != len(tokens) - 1:
        raise ValueError(f"{len(positions)} distributions for {len(tokens)} tokens")
    return HeldOutDocument(
        document=number,
        tokens=tuple(tokens),
        listed=tuple(tuple(token for _, _, token in position) for position in positions),
        logprobs=tuple(tuple(round(-float(minus), DECIMALS) for minus, _, _ in position) for position in positions),
        continued=tuple(continued),
    )
