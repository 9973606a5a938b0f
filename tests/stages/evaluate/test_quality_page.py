"""What docs/quality.md says is what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import yaml

from scoring.items import Items
from scoring.losses import TaskLoss, task_losses, task_quality
from stages.evaluate.questions import DEFINED, OWN
from stages.parts.base.settings import CONFIGS
from tests.serving import REPOSITORY

PAGE = (REPOSITORY / "docs" / "quality.md").read_text(encoding="utf-8")
POWER = 0.8
LIMIT = 0.03
RUNS = 200
Row = tuple[str, ...]


def table(heading: str, level: str = "##") -> list[Row]:
    """The rows of the first table after a heading."""
    lines = PAGE.partition(f"{level} {heading}")[2].split("\n\n| ", 1)[1].split("\n\n")[0].splitlines()
    return [tuple(cell.strip() for cell in line.strip("| ").split(" | ")) for line in lines[2:]]


def loss(reference: np.ndarray, variant: np.ndarray) -> TaskLoss:
    given = [Items(answers.astype(float)) for answers in (reference, variant)]
    return task_losses({"task": task_quality(given)}, 1, 0, LIMIT)["task"]


def detectable(items: int, right: float, flips: float) -> float:
    """The loss that is beyond chance in 80 % of measurements: the bound's reach, and the measurement's own noise."""
    reference, variant = np.zeros((2, items), dtype=bool)
    reference[: round(right * items)] = True
    variant[:] = reference
    changed = round(flips * items / 2)
    variant[:changed] = False
    variant[-changed:] = True
    normal, found = NormalDist(), loss(reference, variant)
    assert abs(found.value) < 1e-9
    return (found.value - found.low) * (normal.inv_cdf(0.95) + normal.inv_cdf(POWER)) / normal.inv_cdf(0.95)


def measured(chance: np.random.Generator, items: int, right: float, flips: float, lost: float) -> TaskLoss:
    """One measurement of a variant that truly loses this share."""
    reference = chance.random(items) < right
    wrong, mended = (flips + lost * right) / 2 / right, (flips - lost * right) / 2 / (1 - right)
    variant = np.where(reference, chance.random(items) >= wrong, chance.random(items) < mended)
    return loss(reference, variant)


@pytest.mark.parametrize("row", table("What they can find"), ids=lambda row: str(row[0])[:20])
def test_the_smallest_loss_that_is_found_is_what_the_judging_functions_give(row: Row) -> None:
    _, items, right, *found = row
    for flips, said in zip((0.02, 0.06), found, strict=True):
        smallest = detectable(int(items), float(right.rstrip(" %")) / 100, flips)
        assert f"{100 * smallest:.1f} %" == said


def test_a_loss_of_that_size_is_found_in_four_of_five_measurements() -> None:
    items, right, flips = 2000, 0.9, 0.02
    chance, true = np.random.default_rng(0), detectable(items, right, flips)
    beyond = [measured(chance, items, right, flips, true).low > 0 for _ in range(RUNS)]
    assert np.mean(beyond) == pytest.approx(POWER, abs=0.08)


def test_a_variant_that_loses_nothing_passes_the_gate() -> None:
    chance = np.random.default_rng(0)
    assert all(measured(chance, 2000, 0.9, 0.02, 0.0).verdict == "pass" for _ in range(RUNS))


def test_the_default_workloads_ask_what_the_page_says() -> None:
    said = {
        name.strip("`"): re.findall(r"`(\w+)`", tasks) for name, tasks, _ in table("What the default workloads ask")
    }
    read = {path.stem: yaml.safe_load(path.read_text()) for path in Path(CONFIGS / "workloads").glob("*.yaml")}
    assert said == {name: each["quality_tasks"] for name, each in read.items()}


def test_every_task_of_our_own_is_on_the_page() -> None:
    told = {name for row in table("Quality: what is asked", "#") for name in re.findall(r"`(\w+)`", row[0])}
    assert told == OWN.keys() | DEFINED
