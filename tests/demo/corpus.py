"""The demo model's text: what ships with Python, cut into passages and split without leaks.

A *document* is one language-reference topic, one standard-library file (its docstrings and block
comments) or one compiled module (its docstrings). Documents, never passages, are dealt to the train
or the held-out side, and a training paragraph that shares any run of ``NGRAM_WORDS`` words with the
held-out side is dropped: the reference repeats whole sections under several topics.

The text depends on the Python that runs this; ``train.py`` names the version that was used.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import io
import re
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pydoc_data.topics import topics
from typing import Final

NGRAM_WORDS: Final = 8
PASSAGE_CHARS: Final = (600, 1500)
HELD_OUT_ONE_IN: Final = 10
SHORTEST_DOCSTRING_CHARS: Final = 60
SKIPPED_FOLDERS: Final = frozenset({"site-packages", "test", "tests", "turtledemo", "pydoc_data", "encodings"})
# These three repeat much of the other topics: held out, they would empty the training side.
ALWAYS_TRAINED: Final = frozenset({"topic:specialnames", "topic:compound", "topic:types"})


@dataclass(frozen=True)
class Document:
    """One source of text: ``name`` is unique, ``paragraphs`` are in reading order."""

    name: str
    paragraphs: tuple[str, ...]


@dataclass(frozen=True)
class Corpus:
    """The split: passages of about ``PASSAGE_CHARS`` characters, grouped by document name."""

    train: dict[str, list[str]]
    held_out: dict[str, list[str]]


def build_corpus() -> Corpus:
    """Read, split, remove leaks and repeats, and cut into passages."""
    train, held_out = split([*read_topics(), *read_library(), *read_compiled()])
    held_out = without_repeats(held_out, banned=set())
    held_out_passages = {document.name: list(passages(document)) for document in held_out}
    leaked = {gram for texts in held_out_passages.values() for text in texts for gram in ngrams(text)}
    train = without_repeats(train, banned=leaked)
    # Once more by passage: joining paragraphs makes n-grams that neither had.
    clean = {
        document.name: [text for text in passages(document) if leaked.isdisjoint(ngrams(text))] for document in train
    }
    return Corpus(train={name: texts for name, texts in clean.items() if texts}, held_out=held_out_passages)


def read_topics() -> Iterator[Document]:
    """The language reference, as ``help()`` shows it."""
    for name in sorted(topics):
        yield Document(f"topic:{name}", tuple(paragraphs_of(topics[name])))


def read_library() -> Iterator[Document]:
    """Docstrings and block comments of the standard library's Python files."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts) and not relative.parts[0].startswith("config-"):
            source = path.read_text(encoding="utf-8")
            texts = [*docstrings(source), *block_comments(source)]
            paragraphs = [part for text in texts for part in paragraphs_of(text)]
            if paragraphs:
                yield Document(f"file:{relative.as_posix()}", tuple(paragraphs))


def read_compiled() -> Iterator[Document]:
    """Docstrings of the modules compiled into the interpreter, ``builtins`` among them."""
    for name in sorted(sys.builtin_module_names):
        paragraphs = [part for text in live_docstrings(import_module(name)) for part in paragraphs_of(text)]
        if paragraphs:
            yield Document(f"compiled:{name}", tuple(paragraphs))


def live_docstrings(owner: object) -> Iterator[str]:
    """What ``docstrings`` finds in source, of a module or class that has none."""
    for name, member in vars(owner).items():
        if inspect.isclass(member) or inspect.isroutine(member) or inspect.isgetsetdescriptor(member):
            text = inspect.cleandoc(member.__doc__) if isinstance(member.__doc__, str) else ""
            if len(text) >= SHORTEST_DOCSTRING_CHARS:
                yield f"{name}: {text}"
        if inspect.isclass(member) and member is not owner and inspect.ismodule(owner):
            yield from live_docstrings(member)


def docstrings(source: str) -> Iterator[str]:
    """Each docstring of some length, under the name of what it documents."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if len(text) >= SHORTEST_DOCSTRING_CHARS:
                yield text if isinstance(node, ast.Module) else f"{node.name}: {text}"


def block_comments(source: str) -> Iterator[str]:
    """Runs of three or more comment lines, without their ``#``; they are prose more often than not."""
    block: list[str] = []
    last_row = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            if token.start[0] != last_row + 1:
                yield from joined_comment(block)
                block = []
            block.append(token.string.lstrip("#").removeprefix(" ").rstrip())
            last_row = token.start[0]
    yield from joined_comment(block)


def joined_comment(lines: list[str]) -> Iterator[str]:
    """The block as text, unless it is short or mostly something else than words."""
    text = "\n".join(lines).strip()
    letters = sum(character.isalpha() or character.isspace() for character in text)
    if len(lines) >= 3 and letters > 0.85 * len(text):
        yield text


def paragraphs_of(text: str) -> list[str]:
    """Blocks between blank lines, in plain line ends."""
    blocks = re.split(r"\n\s*\n", text.expandtabs(4).strip("\n"))
    return [block.rstrip() for block in blocks if block.strip()]


def split(documents: Iterable[Document]) -> tuple[list[Document], list[Document]]:
    """Train and held-out documents; the name's hash decides, so no order or seed matters."""
    train: list[Document] = []
    held_out: list[Document] = []
    for document in documents:
        digest = int.from_bytes(hashlib.sha256(document.name.encode()).digest()[:4], "big")
        chosen = digest % HELD_OUT_ONE_IN == 0 and document.name not in ALWAYS_TRAINED
        (held_out if chosen else train).append(document)
    return train, held_out


def without_repeats(documents: Iterable[Document], banned: set[str]) -> list[Document]:
    """Documents without the paragraphs seen before or sharing an n-gram with ``banned``."""
    seen: set[str] = set()
    kept: list[Document] = []
    for document in documents:
        paragraphs = []
        for text in document.paragraphs:
            key = " ".join(words(text))
            if key not in seen and banned.isdisjoint(ngrams(text)):
                paragraphs.append(text)
            seen.add(key)
        if paragraphs:
            kept.append(Document(document.name, tuple(paragraphs)))
    return kept


def words(text: str) -> list[str]:
    """Lower-case words, without punctuation and layout."""
    return re.findall(r"\w+", text.lower())


def ngrams(text: str) -> set[str]:
    """Every run of ``NGRAM_WORDS`` words."""
    found = words(text)
    return {" ".join(found[i : i + NGRAM_WORDS]) for i in range(len(found) - NGRAM_WORDS + 1)}


def passages(document: Document) -> Iterator[str]:
    """Consecutive paragraphs joined to between the bounds of ``PASSAGE_CHARS``, where they allow it."""
    shortest, longest = PASSAGE_CHARS
    passage = ""
    for text in document.paragraphs:
        if passage and (len(passage) + len(text) + 2 > longest or len(passage) >= 2 * shortest):
            yield passage
            passage = ""
        passage = f"{passage}\n\n{text}" if passage else text
    if passage:
        yield passage


def chat_pairs(passages_by_document: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    """A question and its answer: "What is X?", and how the text about X begins."""
    for name, texts in passages_by_document.items():
        kind, _, subject = name.partition(":")
        title = subject.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        yield f"What is {title}?", opening(texts[0].split("\n\n"))
        if kind != "topic":
            for paragraph in (part for text in texts for part in text.split("\n\n")):
                found = re.match(r"([A-Za-z]\w{3,}): (\w.{60,})", paragraph, re.DOTALL)
                if found:
                    yield f"What is {found[1]}?", opening([found[2]])


def opening(paragraphs: list[str], most_chars: int = 500) -> str:
    """The first paragraphs, as many as fit; of one that is too long, its first lines."""
    text = paragraphs[0]
    for paragraph in paragraphs[1:]:
        if len(text) + len(paragraph) > most_chars:
            break
        text = f"{text}\n\n{paragraph}"
    if len(text) > most_chars:
        text = text[:most_chars].rpartition("\n")[0] or text[:most_chars].rpartition(" ")[0]
    return text.strip()
