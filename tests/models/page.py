"""docs/models.md: what was found out with each family, as a table. ``python -m tests.models.page`` writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from scoring.capacity.architecture import NotSizeable
from scoring.capacity.families import read_architecture
from scoring.capacity.weights import count_parameters
from scoring.names import REFERENCE
from stages.parts.base import formats
from tests.models.prove import VARIANTS, Found, read
from tests.models.servable import KINDS, PARTS, TOOL_PARSERS, configuration

FILE: Final = Path(__file__).parents[2] / "docs" / "models.md"
FAILURES: Final = Path(formats.__file__).with_name("failures.json")
FUSED: Final = "stored as one tensor"
"""The reason that is found by the tensors' names, whatever the family."""
PROVEN: Final = "✓"
NOT_TRIED: Final = "not tried"
HEAD: Final = """# Which models work

Each row is a family of models, by the `model_type` in config.json. `make models` makes a small model of it with random
weights by Transformers' own classes, compares its parameters with the plan's, makes every variant with the real
quantizers, and serves each with the real vLLM on a processor without a GPU: a completion, a chat with a tool to call if
the family's form of calls is known, and a chat with a picture if it sees. This page is written from what it recorded.

- ✓: *proven here*, on a processor with AVX-512 and bf16 and without AMX.
- GPU: *needs a GPU*, or a processor that this machine is not. No GPU has tried it yet.
- A number: *left out because* of what the list below says, before it is made. What names an exception is a failure of
  GPTQModel or vLLM with the small model.
- Pictures were shown with PyPI's torchvision, whose operators for CUDA were taken out.

"""
COLUMNS: Final = ("planned", *VARIANTS, "served on a CPU", "tools", "pictures")
NAMES: Final = {REFERENCE: "16 bit"}


class Reasons:
    """The reasons below the table, by the numbers in it."""

    def __init__(self) -> None:
        self.listed: list[str] = []

    def number(self, reason: str) -> str:
        if reason not in self.listed:
            self.listed.append(reason)
        return str(self.listed.index(reason) + 1)


def planned(kind: str, found: Found) -> bool:
    """Whether the plan counts as many parameters in the language part as the model has."""
    try:
        model = read_architecture(configuration(kind).to_dict())
    except NotSizeable:
        return False
    return count_parameters(model).total == found["parameters"]


def cells(kind: str, found: Found, reasons: Reasons) -> list[str]:
    made, served = found.get("made", {}), found.get("served", {})
    row = [PROVEN if planned(kind, found) else reasons.number("the plan counts other parameters")]
    for name in VARIANTS:
        result = made.get(name, NOT_TRIED)
        row.append(PROVEN if result == "made" else result if result == NOT_TRIED else reasons.number(shorter(result)))
    row.append(served_cell(made, served, reasons))
    row += [asked_cell(served, "calls", TOOL_PARSERS.get(kind), reasons, "no parser is known for its calls")]
    row += [asked_cell(served, "picture", kind if kind in PARTS else None, reasons, "")]
    return row


def served_cell(made: Found, served: Found, reasons: Reasons) -> str:
    """All variants that were made and answered, then why others did not."""
    if not served:
        return NOT_TRIED
    answered = [NAMES.get(name, name) for name, each in served.items() if isinstance(each, dict) and "answers" in each]
    others: dict[str, list[str]] = {}
    for name, each in served.items():
        if NAMES.get(name, name) not in answered:
            why = f"GPU {reasons.number(each['left_out'])}" if isinstance(each, dict) else reasons.number(shorter(each))
            others.setdefault(why, []).append(NAMES.get(name, name))
    if not others:
        return PROVEN
    first = [f"{', '.join(answered)} {PROVEN}"] if answered else []
    return "; ".join(first + [f"{', '.join(names)}: {why}" for why, names in others.items()])


def asked_cell(served: Found, field: str, applies: str | None, reasons: Reasons, otherwise: str) -> str:
    if not applies:
        return reasons.number(otherwise) if otherwise else "–"
    answers = [each[field] for each in served.values() if isinstance(each, dict) and field in each]
    failed = [each for each in answers if each is not True]
    return reasons.number(failed[0]) if failed else PROVEN if answers else NOT_TRIED


def shorter(reason: str) -> str:
    """Without what differs from one layer, model or path to the next."""
    return reason.partition(" cannot quantize ")[2].partition(": ")[2] or reason


def text() -> str:
    record, reasons = read(), Reasons()
    rows: list[list[str]] = [[f"`{kind}`", *cells(kind, found, reasons)] for kind, found in record.items()]
    head: list[Any] = ["model_type", *(NAMES.get(name, name) for name in COLUMNS)]
    table = [" | ".join(map(str, row)) for row in (head, ["---"] * len(head), *rows)]
    lines = [f"| {row} |" for row in table]
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons.listed, 1)]
    return HEAD + "\n".join(lines) + "\n\n" + "\n".join(notes) + "\n"


def failures() -> dict[str, dict[str, str]]:
    """What is not tried again: the error, by what was tried and by the type of the model and of its language model.
    Where 16 bit is not served either, no format is tried."""
    found: dict[str, dict[str, str]] = {}
    for kind, record in read().items():
        served = record.get("served", {})
        reference = served.get(REFERENCE)
        results = record["made"] | (served if isinstance(reference, dict) else {REFERENCE: reference})
        results["picture"] = reference.get("picture") if isinstance(reference, dict) else None
        for name, result in results.items():
            if isinstance(result, str) and result != "made" and FUSED not in result:
                family = KINDS[kind]
                for model_type in {kind, *({family} if family not in KINDS else ())}:
                    found.setdefault(name, {})[model_type] = shorter(result)
    return {name: dict(sorted(found[name].items())) for name in sorted(found)}


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    FAILURES.write_text(json.dumps(failures(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
