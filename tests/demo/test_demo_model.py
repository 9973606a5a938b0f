"""The committed demo model is what its card promises, and its evaluation data was not trained on."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, Final

from tests.extras import need

HERE: Final = Path(__file__).parent
MODEL: Final = HERE / "model"
CALIBRATION: Final = HERE.parents[1] / "configs" / "calibration" / "python-docs.txt"
NGRAM_WORDS: Final = 8


def read_json(name: str) -> Any:
    return json.loads((MODEL / name).read_text(encoding="utf-8"))


def rows(name: str) -> list[dict[str, Any]]:
    lines = (HERE / "tasks" / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def ngrams(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + NGRAM_WORDS]) for i in range(len(words) - NGRAM_WORDS + 1)}


def tensor_sizes(shard: Path) -> dict[str, int]:
    """Elements of each tensor, from the safetensors header alone."""
    with shard.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return {name: math.prod(tensor["shape"]) for name, tensor in header.items()}


def test_the_configuration_suits_the_usual_quantizers() -> None:
    config = read_json("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert [config[width] % 128 for width in ("hidden_size", "intermediate_size")] == [0, 0]
    assert config["max_position_embeddings"] == 1024


def test_the_index_lists_every_shard_and_every_tensor() -> None:
    index = read_json("model.safetensors.index.json")
    shards = {path.name: tensor_sizes(path) for path in MODEL.glob("*.safetensors")}
    assert len(shards) >= 2
    assert index["weight_map"] == {tensor: shard for shard, sizes in shards.items() for tensor in sizes}
    assert 3e6 <= sum(size for sizes in shards.values() for size in sizes.values()) <= 6e6


def test_the_upload_is_small_and_licensed() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 16e6
    assert "\nlicense: apache-2.0\n" in (MODEL / "README.md").read_text(encoding="utf-8").partition("\n---\n")[0]


def test_held_out_text_does_not_occur_in_the_calibration_text() -> None:
    calibration = CALIBRATION.read_text(encoding="utf-8")
    assert len(calibration) > 150_000
    known = {gram for passage in calibration.split("\f") for gram in ngrams(passage)}
    documents = {row["document"]: ngrams(row["text"]) & known for row in rows("heldout.jsonl")}
    contexts = {row["context"]: ngrams(row["context"]) & known for row in rows("continuation.jsonl")}
    assert {name: shared for name, shared in (documents | contexts).items() if shared} == {}


def test_each_continuation_has_four_different_choices() -> None:
    items = rows("continuation.jsonl")
    assert len(items) == 780
    assert all(len(set(item["choices"])) == 4 for item in items)
    # No position gives the answer away.
    assert max(Counter(item["answer"] for item in items).values()) < 0.35 * len(items)


def test_a_conversation_is_rendered_and_ends_its_turns() -> None:
    need("transformers")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a tuple?"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|system|>Be brief.<|eos|><|user|>What is a tuple?<|eos|><|assistant|>"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == "Be brief.What is a tuple?"


def test_the_model_learned_what_word_frequencies_cannot_tell() -> None:
    need("transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    texts = [[tokenizer.bos_token_id, *tokenizer.encode(row["text"])] for row in rows("heldout.jsonl")[::4]]
    assert max(map(len, texts)) <= 1024
    tokens = [token for ids in texts for token in ids[1:]]
    with torch.no_grad():
        batches = [torch.tensor([ids]) for ids in texts]
        loss = sum(float(model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1) for ids in batches)
    # The best that any unigram model could do: one counted on these very tokens.
    counts = Counter(tokens)
    unigram = -sum(count * math.log(count / len(tokens)) for count in counts.values())
    assert math.exp(loss / len(tokens)) < math.exp(unigram / len(tokens)) / 4
