"""Whether a decision is the same if everything is measured again: repeat the measurements and compare the decisions.

    python -m benchmarks.repeatability --store .slipway --model org/name --config tests/demo/slipway.yaml --times 10
    python -m benchmarks.repeatability --from .repeatability

Each repeat evaluates the same variants on new servers, in its own store so that nothing is reused, and is then decided
under each profile. The measurements stay in a folder (``--folder``), one subfolder per repeat: a benchmark that was
killed after the sixth repeat continues with the seventh, if the conditions are still the same. ``--from`` decides from
the measurements of a folder and measures nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from pipeline.settings.config import RunConfig, load, names
from scoring.metrics import odds
from scoring.names import variant_of
from scoring.profile import Profile
from stages.evaluate.results import Conditions, conditions_of
from stages.parts.base.errors import ConfigError, MissingRun, NoWinner, RunFailed, SlipwayError
from stages.parts.base.files import canonical_json, place, place_tree
from stages.parts.base.program import OUTPUTS_VARIABLE, RUN_VARIABLE, answer_sigterm
from stages.parts.base.store import STORE_VARIABLE, ModelStore, directory_name
from stages.parts.machine.process import Contained
from stages.parts.model.name import ModelName
from stages.parts.records.acquired import ACQUIRED, Acquired
from stages.parts.records.evaluation import SAMPLES_SUFFIX, Evaluation
from stages.parts.records.production import Candidate, Production
from stages.parts.records.variant import VARIANT, Variant, read_variant
from stages.parts.samples.lines import read_samples
from stages.select.decision import decide
from stages.select.selection import gather

FOLDER: Final = Path(".repeatability")
UNFINISHED: Final = ".unfinished"
NOBODY: Final = "none"
Decisions = list[Production | None]
"""The decisions under one profile, by repeat; None if no variant could be chosen."""


def main() -> None:
    arguments = _arguments()
    answer_sigterm()
    try:
        repeats = finished(arguments.replayed) if arguments.replayed else measured(arguments)
        profile_names = names("profile") if arguments.profiles == "all" else arguments.profiles.split(",")
        profiles = [load(chosen={"profile": name}).profile for name in profile_names]
        sys.exit(tell({profile.name: decisions(repeats, profile) for profile in profiles}))
    except SlipwayError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def measured(arguments: argparse.Namespace) -> list[ModelStore]:
    """Return the repeats; missing ones are measured first."""
    if not arguments.store or not arguments.model:
        raise ConfigError("--store and --model say what is measured", hint="or --from a folder of what was")
    source = ModelStore(arguments.store.absolute(), ModelName.parse(arguments.model).id)
    config = load(arguments.config)
    targets = [arguments.folder.absolute() / f"{number:02d}" for number in range(1, arguments.times + 1)]
    check_conditions(
        [ModelStore(target, source.model) for target in targets if target.exists()], conditions(source, config)
    )
    for number, target in enumerate(targets, 1):
        if not target.exists():
            print(f"repeat {number} of {arguments.times}", file=sys.stderr, flush=True)
            repeat(source, config, target)
    return finished(arguments.folder)[: arguments.times]


def conditions(source: ModelStore, config: RunConfig) -> dict[str, Conditions]:
    """Find the current conditions of each candidate whose variant the source has."""
    made = [name for name in config.optimize.names if Variant.read(source.optimized(name) / VARIANT)]
    serving = config.serving.pinned()
    return {
        name: conditions_of(
            read_variant(source.optimized(variant_of(name))), config.workload, serving.of_candidate(name)
        )
        for name in serving.candidates_of(made)
    }


def check_conditions(repeats: Sequence[ModelStore], current: Mapping[str, Conditions]) -> None:
    """Check that earlier repeats were measured under the current conditions.

    Raises:
        ConfigError: otherwise; the other conditions are named.
    """
    changes = [
        f"{store.root.name}: {name}, {condition}" for store in repeats for name, condition in changed(store, current)
    ]
    if changes:
        raise ConfigError(
            f"earlier repeats were measured under other conditions than now ({'; '.join(changes)})",
            hint="give a new folder with --folder, or decide from this one with --from",
        )


def changed(repeat: ModelStore, current: Mapping[str, Conditions]) -> Iterator[tuple[str, str]]:
    """Yield the variants that were measured under other conditions, and which conditions differ."""
    measured = {path.stem for path in repeat.evaluation("any").parent.glob("*.json")}
    for name in sorted(measured | current.keys()):
        evaluation = Evaluation.read(repeat.evaluation(name))
        if evaluation is None or name not in current:
            yield name, "not measured then" if evaluation is None else "not made now"
        elif evaluation.key != current[name].key:
            pairs = {
                "weights": (evaluation.variant_digest, current[name].variant.digest),
                "workload": (evaluation.workload, current[name].workload),
                "versions": (evaluation.tool_versions, current[name].tool_versions),
                "hardware": (evaluation.hardware, current[name].hardware),
            }
            found = [condition for condition, (earlier, today) in pairs.items() if earlier != today]
            yield name, f"other {' and '.join(found or ['serving settings'])}"


def repeat(source: ModelStore, config: RunConfig, target: Path) -> None:
    """Evaluate every candidate in a separate store, which appears at *target* once it is complete.

    Raises:
        RunFailed: the evaluation failed.
        MissingRun: the source has no variants.
    """
    work = target.with_name(target.name + UNFINISHED)
    shutil.rmtree(work, ignore_errors=True)
    scratch = ModelStore(work, source.model)
    scratch.base.mkdir(parents=True)
    variants, serving = (
        [name for name in config.optimize.names if borrow(source, scratch, name)],
        config.serving.pinned(),
    )
    if not variants or not (source.base / ACQUIRED).exists():
        raise MissingRun(f"{source.path} has no variants to measure", hint="make them first: slipway run")
    place(source.base / ACQUIRED, scratch.base / ACQUIRED)
    command = [sys.executable, "-m", "stages.evaluate", "--model", source.model, "--variants"]
    command += [",".join(serving.candidates_of(variants)), "--workload", canonical_json(config.workload)]
    command += ["--serving", canonical_json(serving)]
    command += ["--profile", canonical_json(config.profile)]
    environment = {name: value for name, value in os.environ.items() if name not in (RUN_VARIABLE, OUTPUTS_VARIABLE)}
    environment[STORE_VARIABLE] = str(work)
    with Contained(command, output=sys.stderr.fileno(), environment=environment) as evaluating:
        status = evaluating.wait()
    if status:
        raise RunFailed(f"the evaluation for {target} failed", hint="see above", exit_code=status)
    os.replace(work, target)


def borrow(source: ModelStore, scratch: ModelStore, name: str) -> bool:
    """Link the files of a variant into *scratch*; return whether the source has this variant."""
    variant = Variant.read(source.optimized(name) / VARIANT)
    if variant is None:
        return False
    place_tree(source.optimized(name), scratch.optimized(name), [VARIANT, *(file.path for file in variant.files)])
    return True


def finished(folder: Path) -> list[ModelStore]:
    """Find the complete repeats of a folder, in order.

    Raises:
        MissingRun: there is none.
    """
    repeats = [
        ModelStore(path, Acquired.model_validate_json(acquired.read_bytes()).model)
        for path in sorted(folder.absolute().iterdir() if folder.is_dir() else [])
        if not path.name.endswith(UNFINISHED)
        for acquired in path.glob(f"*/base/{ACQUIRED}")
    ]
    if not repeats:
        raise MissingRun(f"{folder} holds no repeats")
    if len({directory_name(repeat_store.model) for repeat_store in repeats}) > 1:
        raise ConfigError(f"{folder} holds repeats of several models", hint="use a folder for each model: --folder")
    return repeats


def decisions(repeats: Sequence[ModelStore], profile: Profile) -> Decisions:
    return [decision(repeat_store, profile) for repeat_store in repeats]


def decision(store: ModelStore, profile: Profile) -> Production | None:
    """Make the decision that select would make; nothing is published."""
    made = {path.name for path in store.optimized("any").parent.iterdir()}
    measured_ones = {path.stem for path in store.evaluation("any").parent.glob("*.json")}
    try:
        basis, measured = gather(store, profile, sorted(made | measured_ones))
        samples = {
            name: read_samples(store.evaluation(name).with_suffix(SAMPLES_SUFFIX), evaluation)
            for name, evaluation in measured.items()
        }
        return decide(basis, measured, samples)
    except NoWinner:
        return None


def tell(by_profile: Mapping[str, Decisions]) -> int:
    """Print a line per profile and repeat, then the verdicts.

    Returns:
        0, or 1 if a profile's decisions differ, or it has none.
    """
    print(f"{'profile':10}{'repeat':>7}  {'winner':8}{'outcome':12}scores (probability to be the best)")
    for profile, decided in by_profile.items():
        for number, repeated in enumerate(decided, 1):
            print(f"{profile:10}{number:>7}  {_line(repeated)}")
    print()
    verdicts = {profile: verdict(decided) for profile, decided in by_profile.items()}
    for profile, (_, sentence) in verdicts.items():
        print(f"{profile:10}{sentence}")
    return int(not all(repeatable for repeatable, _ in verdicts.values()))


def verdict(decided: Decisions) -> tuple[bool, str]:
    """Judge whether repeated measurements give the same decision: the same winner and the same outcome each time."""
    outcomes = Counter(f"{repeated.winner}, {repeated.outcome}" if repeated else NOBODY for repeated in decided)
    if set(outcomes) <= {NOBODY}:
        return False, "no variant could be chosen, so nothing was repeated"
    if len(outcomes) == 1:
        return True, f"the same each time: {next(iter(outcomes))}"
    return False, "differs: " + "; ".join(f"{outcome}: {count}" for outcome, count in sorted(outcomes.items()))


def _line(decided: Production | None) -> str:
    if decided is None:
        return NOBODY
    return f"{decided.winner:8}{decided.outcome:12}" + ", ".join(map(_score, decided.candidates))


def _score(candidate: Candidate) -> str:
    if candidate.score is None:
        return f"{candidate.variant} excluded"
    chance = f" ({odds(candidate.chance)})" if candidate.chance is not None else ""
    return f"{candidate.variant} {candidate.score:.3f}{chance}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.repeatability", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--store", type=Path, help="the store with the variants of a finished run")
    parser.add_argument("--model", help="name on the Hub, or a local directory")
    parser.add_argument("--config", type=Path, help="the settings as for slipway run: workload and serving")
    parser.add_argument("--times", type=int, default=10, help="the number of repeats (default: %(default)s)")
    parser.add_argument("--profiles", default="all", help="names separated by commas (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="the folder of the measurements (default: %(default)s)"
    )
    parser.add_argument("--from", dest="replayed", type=Path, help="decide from this folder and measure nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
