"""The next-token distributions of a served variant on held-out text: what ``scoring.divergence`` compares.

They are kept as samples, so that any two variants can be compared later without a server. Served, not computed from
the weights: what a user gets goes through the engine's own kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final

from stages.parts.base.errors import ConfigError
from stages.parts.base.settings import Workload
from stages.parts.base.store import sha256_of
from stages.parts.engine.completions import complete, given, no_answer, tokenize
from stages.parts.model.corpora import read_documents, text_path, unreadable
from stages.parts.samples.lines import HeldOutDocument

KIND: Final = "held-out"
LISTED: Final = 20
"""Tokens of each distribution: as many as vLLM gives by default (``--max-logprobs``)."""
DECIMALS: Final = 6
"""Of a log-probability: what single precision knows near 0."""
AT_A_TIME: Final = 8
"""Documents in a request: its answer is about 2 MB."""


def held_out_digest(workload: Workload) -> str | None:
    """Of the text's bytes; None if nothing is compared on it.

    Raises:
        UnknownName, ConfigError: there is no such text.
    """
    if not workload.divergence_documents:
        return None
    path = text_path(workload.divergence_text, KIND)
    try:
        return sha256_of(path)
    except OSError as error:
        raise unreadable(path, KIND, error) from error


def measure_distributions(
    url: str, model: str, api_key: str, workload: Workload, max_model_len: int
) -> list[HeldOutDocument]:
    """The distributions at each position of each document; none if the workload asks for none.

    Raises:
        ConfigError: the text can't be read, or no document of it has two tokens.
        ServerFailed, TransientError: see ``completions``.
    """
    if not workload.divergence_documents:
        return []
    # The server is asked for a token after the text.
    length = min(workload.divergence_tokens, max_model_len - 1)
    documents = list(islice(_documents(url, model, api_key, workload, length), workload.divergence_documents))
    if not documents:
        raise ConfigError(f"the held-out text {workload.divergence_text} has no document of two tokens")
    measured = []
    for start in range(0, len(documents), AT_A_TIME):
        asked = documents[start : start + AT_A_TIME]
        answers = complete(url, model, api_key, asked, max_tokens=1, prompt_logprobs=LISTED)
        try:
            measured += [_measured(start + place, *each) for place, each in enumerate(zip(asked, answers, strict=True))]
        except (LookupError, TypeError, ValueError) as error:
            raise no_answer(url, error) from error
    return measured


def _documents(url: str, model: str, api_key: str, workload: Workload, length: int) -> Iterator[list[int]]:
    for text in read_documents(text_path(workload.divergence_text, KIND), KIND):
        tokens = tokenize(url, model, api_key, text)[:length]
        if len(tokens) > 1:
            yield tokens


def _measured(number: int, tokens: Sequence[int], answer: dict[str, Any]) -> HeldOutDocument:
    places = [
        # The token that is there is told as well, whatever its rank.
        sorted(((each["rank"], each["logprob"], int(token)) for token, each in place.items()))[:LISTED]
        for place in given(answer)
    ]
    if len(places) != len(tokens) - 1:
        raise ValueError(f"{len(places)} distributions for {len(tokens)} tokens")
    return HeldOutDocument(
        document=number,
        tokens=tuple(tokens),
        listed=tuple(tuple(token for _, _, token in place) for place in places),
        logprobs=tuple(tuple(round(float(logprob), DECIMALS) for _, logprob, _ in place) for place in places),
    )
