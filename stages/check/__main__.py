"""check: say how the variants will be served where evaluate will measure them: for which ones the installed vLLM has
kernels, on how many GPUs, and with which longest context.

A model that the installed vLLM has no class or no kernels for is refused, and so are LoRA adapters that it can't serve,
or that were made for another base. A variant that can't be served is left out before it is made, and a candidate whose
recipe vLLM refuses before it is measured. With ``make_unservable`` in the settings variants are made for another
machine, but not measured. Settings that contradict each other, the model or the hardware are refused.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Container, Mapping
from dataclasses import replace
from typing import Final

import psutil

from scoring.names import PRODUCTION, recipe_of
from scoring.profile import Profile
from scoring.units import GIB
from stages.parts.base import program
from stages.parts.base.errors import ConfigError, UnusableModel
from stages.parts.base.files import canonical_json
from stages.parts.base.formats import FORMATS, quantized_formats, why_not_made
from stages.parts.base.log import say
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.settings import parse_json
from stages.parts.base.store import ModelStore
from stages.parts.base.workload import Workload
from stages.parts.cluster.nodes import quantity
from stages.parts.machine.hardware import check_gpus, hardware
from stages.parts.model.adapter import check_adapters
from stages.parts.model.candidates import CandidateCheckpoint, Candidates, with_candidates
from stages.parts.model.corpora import own_files
from stages.parts.model.description import Description, describe_commit, small_files_of
from stages.parts.model.name import ModelName
from stages.parts.records.answers import are_kept
from stages.parts.releases.pinned import in_production, moved_stack
from stages.parts.vllm.arguments import check_replicas
from stages.parts.vllm.automatic import NO_KERNEL, Decided, Requirements, decide, place_here
from stages.parts.vllm.parsers import chat_model, check_parsers, chosen_parsers, why_calls_stay
from stages.parts.vllm.sizing import quantizer_bytes, shared_bytes
from stages.parts.vllm.support import (
    missing_kernel,
    refuse_unserved,
    refuse_unserved_family,
    refuse_without_torchvision,
    refused_recipes,
)

UNMADE: Final = "leave it out of optimize.variants, or name another model, such as the one in 16 bit"
OTHER_RECIPE: Final = "leave it out of serving.recipes, or say in the recipe's variants with which ones it is tried"
HINT: Final = (
    "run where vLLM can serve it, or leave the variant out of optimize.variants; with "
    "--set optimize.make_unservable=true it is made all the same, for another machine"
)


def main() -> None:
    arguments = _arguments()
    store = ModelName.parse(arguments.model).store()
    optimize = parse_json(Optimize, arguments.settings, "--settings")
    serving = parse_json(AskedServing, arguments.serving, "--serving")
    workload = parse_json(Workload, arguments.workload, "--workload") if arguments.workload else None
    profile = parse_json(Profile, arguments.profile, "--profile")
    with program.outcome(store, "check") as report:
        check_gpus()
        files = own_files(workload, optimize, serving).items() if workload else ()
        if absent := [f"{field}: there is no {path}" for field, path in files if not path.exists()]:
            raise ConfigError.of_many(absent, "the settings")
        described = describe_commit(store, arguments.model, arguments.commit)
        refuse_without_torchvision(described)
        refuse_unserved_family(described, text_only=serving.text_only)
        if adapters := check_adapters(described, serving.adapters, store):
            refuse_unserved(adapters, [str(name) for name in described.config["architectures"]])
        place = place_here(arguments.gpus, _bytes(arguments.memory))
        described = with_candidates(described, optimize.candidates, store.model)
        reference = profile.for_format(described.form.name).reference_variant
        kept = are_kept(store, reference, arguments.commit, workload.quality_tasks if workload else ())
        required = Requirements(serving, workload, optimize, reference, answers_kept=kept)
        decided = decide(described, required, place)
        check_replicas(decided.serving)
        with small_files_of(described) as directory:
            chats = replace(chat_model(directory), tokenizer=None)
            recipes = refused_recipes(decided.serving, directory)
        if profile.requalifies and recipes:
            raise ConfigError(f"vLLM refuses it: {', '.join(recipes.values())}", hint="see engine.arguments")
        check_parsers(*chosen_parsers(serving, chats))
        for note in (*decided.notes, *filter(None, [why_calls_stay(serving, chats), moved_stack(store)])):
            say(f"note: {note}")
        missing = _without_kernels(described, decided, optimize, serving.dtype, lora=bool(adapters))
        missing |= _too_large_to_load(decided, _bytes(arguments.optimize_memory)) | {**decided.left_out}
        if reference in missing and not decided.serving.reference:
            raise UnusableModel(missing[reference], hint=NO_KERNEL)
        if not (served := [name for name in decided.variants if name not in missing]):
            raise UnusableModel("; ".join(f"{name}: {why}" for name, why in missing.items()), hint=HINT)
        gpus, context = f"{decided.gpus} × " if decided.gpus else "", decided.serving.max_model_len
        length = f", with {context:,} tokens of context" if context else ""
        report.done(f"vLLM serves {', '.join(served)} on {gpus}{place.name}{length}")
    unmade = {name for name in missing if why_not_made(name, described.form.name, described.config)}
    untried = required.untried(described, place)
    candidates = decided.serving.candidates_of([PRODUCTION] if profile.requalifies else served)
    missing |= {name: why for name in candidates if (why := recipes.get(recipe_of(name)))}
    missing |= decided.recipes_left_out
    _leave_out(store, missing, unmade, untried)
    to_make = {*optimize.names} - unmade - untried.keys() if optimize.make_unservable else {*served}
    made = not described.form.method and not profile.requalifies
    for quantized in quantized_formats():
        program.write_output(quantized, str(made and quantized in to_make).lower())
    _write_fetched(described, served)
    production = in_production(store)
    decided = replace(decided, serving=decided.serving.model_copy(update={"production": production}))
    candidates += [PRODUCTION] if production and PRODUCTION not in candidates else []
    measured = ",".join(name for name in candidates if name not in missing)
    program.write_output("variants", measured)
    program.write_output("left-out", "\n".join(f"{name}: {why}" for name, why in missing.items()))
    _write_needs(decided)
    print(measured)


def _leave_out(store: ModelStore, missing: Mapping[str, str], unmade: Container[str], untried: Container[str]) -> None:
    """Record why variants and candidates are not measured."""
    for name, why in missing.items():
        with program.outcome(store, "check", name) as report:
            hint = UNMADE if name in unmade else OTHER_RECIPE if recipe_of(name) else HINT
            report.left_out(why, hint="" if name in untried else hint, tried=name not in untried)


def _write_fetched(described: Description, served: Collection[str]) -> None:
    found = described.candidates.items()
    fetched = tuple(CandidateCheckpoint.of(name, model) for name, model in found if name in served)
    program.write_output("candidates", canonical_json(Candidates(fetched)))
    program.write_output("fetch", str(bool(fetched)).lower())


def _write_needs(decided: Decided) -> None:
    """Write what evaluate takes, and what the pods need."""
    program.write_output("serving", canonical_json(decided.serving))
    program.write_output("gpus", str(decided.gpus))
    for name, size in (("memory", decided.memory_bytes), ("shm", shared_bytes(decided.gpus))):
        program.write_output(name, f"{math.ceil(size / GIB)}Gi")
    program.write_output("optimize-memory", f"{math.ceil(quantizer_bytes(decided.weights_bytes) / GIB)}Gi")


def _without_kernels(
    described: Description, decided: Decided, optimize: Optimize, dtype: str, *, lora: bool
) -> dict[str, str]:
    """Say of the variants for which vLLM has no kernels here why; *lora*: whether adapters are served with them."""
    unserved, allow = {}, optimize.allow_fallback
    for name in decided.variants:
        model = described.all.get(name, described)
        config, published = model.config, bool(model.form.method)
        if not published and name in FORMATS and (stated := FORMATS[name].configuration):
            config = {**config, "quantization_config": stated(optimize.group_size)}
        unserved[name] = missing_kernel(config, dtype, lora=lora, allow_fallback=allow, published=published)
    return {name: why for name, why in unserved.items() if why}


def _bytes(amount: str) -> int:
    """Read the memory that a stage gets: a quantity; *auto* is what the node has, and nothing what this machine has."""
    if amount == "auto":
        return psutil.virtual_memory().total
    return int(quantity(amount)) if amount else hardware().memory_bytes


def _too_large_to_load(decided: Decided, memory_bytes: int) -> dict[str, str]:
    """Say of the variants whose quantizer loads the whole model that it does not fit. Others stream it."""
    if decided.weights_bytes <= memory_bytes:
        return {}
    why = (
        f"its quantizer loads the whole model, {decided.weights_bytes / GIB:.1f} GiB, and has "
        f"{memory_bytes / GIB:.1f} GiB of memory"
    )
    made = (name for name in decided.variants if name in FORMATS)
    return {name: why for name in made if FORMATS[name].quantizer.calibrated}


def _arguments() -> argparse.Namespace:
    parser = program.parser(
        "check",
        __doc__,
        """example:
  python -m stages.check --model org/name --commit 0123abc… --settings '{"variants": ["fp16", "int8"]}' \\
    --serving '{"tensor_parallel_size": "auto"}'""",
    )
    parser.add_argument("--commit", default="main", help="as resolve found it (default: main)")
    parser.add_argument("--settings", default="{}", help="JSON: Optimize in stages/parts/base/optimize_settings.py")
    parser.add_argument("--serving", default="{}", help="JSON: AskedServing in stages/parts/base/serving_settings.py")
    parser.add_argument("--workload", default="", help="JSON: Workload in stages/parts/base/workload.py")
    parser.add_argument("--profile", default='{"name": "default"}', help="the scoring profile as JSON")
    parser.add_argument(
        "--memory", default="", help="of evaluate, such as 8Gi; auto: the node's; default: this machine's"
    )
    parser.add_argument("--optimize-memory", default="", help="of optimize, in the same way")
    parser.add_argument(
        "--gpus", type=int, default=None, help="at most that many GPUs serve one replica (default: this machine's)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    program.main(main)
