"""Make the demo model: text that ships with Python -> tokenizer -> a small Llama -> a publisher's upload.

The committed files were made with CPython 3.11.7, torch 2.13.0, transformers 5.19.0 by

    python -m tests.demo.train

on 2 CPU cores. It writes, beside itself, ``model/`` and the data of ``tasks/``; and two texts, one form feed
between two passages: ``configs/calibration/python-docs.txt`` from the training side, for calibrating quantizers, and
``configs/held-out/python-docs.txt`` from the held-out side, on which variants are compared with fp16.
Progress goes to stderr, the held-out perplexities as one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

from tests.demo.corpus import Corpus, build_corpus, chat_pairs
from tests.demo.items import continuation_items, held_out_texts

HERE: Final = Path(__file__).parent
CALIBRATION: Final = HERE.parents[1] / "configs" / "calibration" / "python-docs.txt"
CALIBRATION_CHARS: Final = 500_000
"""128 sequences of 512 tokens, also by a vocabulary with long tokens."""
HELD_OUT: Final = HERE.parents[1] / "configs" / "held-out" / "python-docs.txt"
HELD_OUT_TEXTS: Final = 128

SEED: Final = 2026
VOCABULARY: Final = 4096
SPECIAL: Final = ("<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

SEQUENCE_TOKENS: Final = 512
BATCH_SEQUENCES: Final = 8
PEAK_LEARNING_RATE: Final = 2e-3
WARMUP_STEPS: Final = 100
# Shards this small only so that the upload has more than one, as larger models do.
SHARD_SIZE: Final = "4MB"

MODEL_CARD: Final = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [llama, demo]
---
# Slipway demo

A Llama of {parameters:.1f} million parameters (grouped-query attention, {layers} layers, 1024-token context)
that writes in the manner of Python's documentation. It exists to test tools that quantize, evaluate and
serve models on a laptop in minutes; it knows nothing worth asking.

Trained from scratch on the documentation and docstrings that ship with CPython {python}, on two CPU cores.
Perplexity on held-out passages: {model:.1f} per token (a unigram model: {unigram:.1f}).
"""


def main() -> None:
    """Every step, in order."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=7, help="passes over the training text")
    parser.add_argument("--output", type=Path, default=HERE / "model", help="where the model is written")
    arguments = parser.parse_args()
    random.seed(SEED)
    torch.manual_seed(SEED)

    corpus = build_corpus()
    held_out = held_out_texts(corpus.held_out)
    write_data(corpus, held_out)
    tokenizer = train_tokenizer(text for texts in corpus.train.values() for text in texts)
    samples = encode_samples(corpus, tokenizer)
    log(f"{len(samples)} samples, {sum(map(len, samples))} tokens")

    model = LlamaForCausalLM(model_config(tokenizer))
    train(model, samples, [encode(tokenizer, text["text"]) for text in held_out], arguments.epochs)
    figures = measure(model.to(torch.bfloat16), tokenizer, samples, held_out)
    publish(model, tokenizer, arguments.output, figures)
    print(json.dumps(figures))


def write_data(corpus: Corpus, held_out: list[dict[str, str]]) -> None:
    """The task data and the held-out text (held-out side), and the calibration text (training side)."""
    write_jsonl(HERE / "tasks" / "heldout.jsonl", held_out)
    write_jsonl(HERE / "tasks" / "continuation.jsonl", continuation_items(corpus))
    texts = [text for name in sorted(corpus.train) for text in corpus.train[name] if len(text) >= 400]
    random.Random(SEED).shuffle(texts)
    calibration = "\n\f\n".join(texts)[:CALIBRATION_CHARS].rpartition("\n\f\n")[0]
    compared = "\n\f\n".join(each["text"] for each in held_out_texts(corpus.held_out, HELD_OUT_TEXTS))
    for path, text in ((CALIBRATION, calibration), (HELD_OUT, compared)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE.

    It does not add bos by itself: lm-eval's backends disagree on whether to ask for special tokens,
    and so every one of them measures the same tokens. The chat template writes bos.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        additional_special_tokens=list(SPECIAL[3:]),
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Token ids after bos, as lm-eval's rolling log-likelihood sees a document."""
    return [tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)]


def encode_samples(corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Training passages and conversations, each from bos to eos."""
    samples = [[*encode(tokenizer, text), tokenizer.eos_token_id] for texts in corpus.train.values() for text in texts]
    for question, answer in chat_pairs(corpus.train):
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        samples.append(tokenizer.encode(tokenizer.apply_chat_template(turns, tokenize=False)))
    return samples


def model_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Input widths are multiples of 128, the usual group size of 4-bit weights."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def train(model: LlamaForCausalLM, samples: list[list[int]], held_out: list[list[int]], epochs: int) -> None:
    """AdamW without weight decay, cosine schedule, bfloat16 autocast (twice as fast as float32 here)."""
    steps = epochs * (sum(map(len, samples)) // (SEQUENCE_TOKENS * BATCH_SEQUENCES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, WARMUP_STEPS, steps)
    started = time.monotonic()
    for epoch in range(epochs):
        model.train()
        losses = []
        for batch in batches(samples):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        perplexity = math.exp(token_loss(model, held_out))
        minutes = (time.monotonic() - started) / 60
        mean = sum(losses) / len(losses)
        log(f"epoch {epoch + 1}: {minutes:.1f} min, loss {mean:.3f}, held-out perplexity {perplexity:.2f}")


def batches(samples: list[list[int]]) -> Iterator[torch.Tensor]:
    """The samples in a new order, packed end to end; (BATCH_SEQUENCES, SEQUENCE_TOKENS) each."""
    order = random.sample(samples, len(samples))
    stream = torch.tensor([token for sample in order for token in sample])
    size = BATCH_SEQUENCES * SEQUENCE_TOKENS
    for start in range(0, len(stream) - size + 1, size):
        yield stream[start : start + size].view(BATCH_SEQUENCES, SEQUENCE_TOKENS)


def token_loss(model: LlamaForCausalLM, texts: list[list[int]]) -> float:
    """Mean negative log-likelihood of a token, in nats; bos is given, not predicted."""
    model.eval()
    total = 0.0
    for ids in texts:
        row = torch.tensor([ids])
        with torch.no_grad():
            total += float(model(input_ids=row, labels=row).loss) * (len(ids) - 1)
    return total / sum(len(ids) - 1 for ids in texts)


def measure(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    samples: list[list[int]],
    held_out: list[dict[str, str]],
) -> dict[str, float]:
    """Held-out perplexity per token of the model and of a unigram model counted on the training text."""
    texts = [encode(tokenizer, text["text"]) for text in held_out]
    counts = Counter(token for sample in samples for token in sample)
    total = sum(counts.values()) + VOCABULARY
    tokens = [token for ids in texts for token in ids[1:]]
    unigram = -sum(math.log((counts[token] + 1) / total) for token in tokens) / len(tokens)
    return {
        "model": math.exp(token_loss(model, texts)),
        "unigram": math.exp(unigram),
        "parameters": model.num_parameters(),
    }


def publish(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, figures: dict[str, float]
) -> None:
    """Write what a publisher uploads."""
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(folder)
    # transformers 5 writes its own class name; this one is understood by 4 as well.
    settings_file = folder / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings_file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    card = MODEL_CARD.format(
        parameters=figures["parameters"] / 1e6,
        layers=model.config.num_hidden_layers,
        python=".".join(map(str, sys.version_info[:3])),
        model=figures["model"],
        unigram=figures["unigram"],
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def log(line: str) -> None:
    """Progress, to stderr."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
