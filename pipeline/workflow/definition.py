"""The pipeline as a Hera WorkflowTemplate. Argo runs it on a cluster; the local engine runs the same compiled manifest
on one machine.

    resolve -+- acquire -+- optimize-fp16 -+
             +- check ---+- optimize-awq  -+- evaluate - select - serve         on exit: ending
                         +- optimize-gptq -+
                         +- optimize-int8 -+
                         +- candidates ----+

The template is the same for every configuration of variants and workload: those are parameters of a run. ``check``
says which variants were asked for and can be served where ``evaluate`` runs; the others are skipped. It also decides
what ``auto`` means in the serving settings, and how large a pod ``evaluate`` needs. Only fp16 has to succeed, which is
the model as it was published, whatever its format; a quantized variant or a candidate that fails is left out of the
selection and named in the report.
On a cluster the steps of the rollout are separate tasks: deploy, canary-10, canary-50, canary-90, approve,
canary-100, serve. Those in between are skipped where there is nothing to compare a release with. None of them is done
if the winner is not shown to be better than what is in production.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from hera.shared.serialization import MISSING
from hera.workflows import DAG, Parameter, Task, WorkflowTemplate, models

from pipeline.settings.config import RunConfig
from pipeline.settings.platform import Platform
from pipeline.workflow import pods
from pipeline.workflow.parameters import NAME, RESOLVE_CACHE, settings_of
from pipeline.workflow.pods import titled
from pipeline.workflow.stage_templates import (
    CANDIDATES,
    COMMIT,
    COMPARED,
    OPTIMIZE_IN,
    OPTIMIZE_MEMORY,
    PROMOTION,
    RESOLVED,
    RESULTS,
    REWRITING,
    RUN_DIRECTORY,
    SERVED,
    SERVING,
    WITH_CANDIDATES,
    add_templates,
    exit_handler,
    workflow_parameter,
)
from scoring.names import REFERENCE
from stages.parts.base.formats import FORMATS, quantized_formats
from stages.parts.base.rollout_settings import Rollout
from stages.parts.cluster.kinds import Object
from stages.parts.records.rollout import LOCAL
from stages.rollout.resume import DEPLOY, PROMOTE

PARAMETERS: Final = {
    "model": "name on the Hugging Face Hub, such as org/name",
    "revision": "branch, tag or commit",
    "model-directory": "the model's directory in the store: org--name",
    "resolve-key": "sha256 of hub, model and revision: the commit is cached under it",
    "serve": "false: stop once the winner is published",
    "optimize": "optimize settings as JSON",
    "workload": "the workload as JSON",
    "serving": "serving settings as JSON",
    "profile": "the scoring profile as JSON",
    "rollout": "the rollout's settings as JSON",
    "approval": "true: wait for an approval before all traffic goes to the new release",
    "price": "price of an hour of the hardware, as JSON, or ''",
    "kserve": "how KServe serves, as JSON",
}
GIVEN: Final = ("model", "model-directory", "resolve-key")
"""The parameters without a default."""
RUN_DESCRIPTION: Final = (
    "`{{workflow.parameters.model}}` at `{{workflow.parameters.revision}}`, to an endpoint.\n\n"
    "The winner, the reason and the table of scores are this run's outputs. "
    f"The report: `{RUN_DIRECTORY}/report.html` on the volume of the store."
)


def workflow_template(config: RunConfig) -> Object:
    """Compile the WorkflowTemplate for the configuration's platform and rollout, as plain data."""
    platform = config.platform
    *names, last = map(str.upper, FORMATS)
    description = (
        f"Takes a model's name to a production endpoint: acquires it, makes {', '.join(names)} and {last} variants, "
        "measures each on vLLM, publishes the best one and serves it."
    )
    about, of_run = titled("Slipway", description), titled(workflow_parameter("model"), RUN_DESCRIPTION)
    # Two runs of one model would write the same paths; the lock is held until the run's end.
    lock = models.Mutex(name="model-{{workflow.parameters.model-directory}}")
    # The configuration's settings are the defaults of a run's parameters.
    values = dict.fromkeys(GIVEN, MISSING) | {"revision": "main", "serve": "true"} | settings_of(config)
    parameters = [(name, description) for name, description in PARAMETERS.items() if name in values]
    with WorkflowTemplate(
        arguments=[Parameter(name=name, value=values[name], description=text) for name, text in parameters],
        on_exit=exit_handler(platform),
        synchronization=models.Synchronization(mutexes=[lock]),
        **pods.of_workflow(platform, NAME, about, of_run),
    ) as template:
        add_templates(platform)
        memo = models.Memoize(
            key=workflow_parameter("resolve-key"),
            max_age="24h",
            cache=models.Cache(config_map=models.LocalObjectReference(name=RESOLVE_CACHE)),
        )
        with DAG(name=RESOLVED, fail_fast=False, memoize=memo, outputs=_outputs_of(COMMIT, [COMMIT])):
            Task(name=COMMIT, template="resolve")
        with DAG(name="pipeline", fail_fast=False, outputs=_outputs_of("select", RESULTS)):
            _tasks(platform)
            _serving_tasks(platform, config.rollout)
    compiled: Object = template.to_dict()
    return compiled


def _outputs_of(task: str, names: Iterable[str]) -> list[Parameter]:
    """Make the outputs of *task* those of its DAG. Argo's UI and ``argo get`` show those of the whole run first."""
    return [
        Parameter(name=name, value_from=models.ValueFrom(parameter=f"{{{{tasks.{task}.outputs.parameters.{name}}}}}"))
        for name in names
    ]


def _tasks(platform: Platform) -> None:
    Task(name="resolve", template=RESOLVED)
    commit = "{{tasks.resolve.outputs.parameters.commit}}"
    Task(name="acquire", template="acquire", arguments={"commit": commit}, depends="resolve")
    Task(name="check", template="check", arguments={"commit": commit}, depends="resolve")
    for variant, record in FORMATS.items():
        rewrites = platform.stages.rewrite and not record.quantizer.calibrated
        calibrates = OPTIMIZE_IN.format(record.environment) if record.environment and platform.cluster else "optimize"
        sized = bool(platform.stages.optimize.automatic) and not rewrites
        Task(
            name=f"optimize-{variant}",
            template=REWRITING if rewrites else calibrates,
            arguments={"method": variant} | ({"memory": _checked(OPTIMIZE_MEMORY)} if sized else {}),
            depends="acquire" if variant == REFERENCE and not sized else "acquire && check",
            when=None if variant == REFERENCE else f"{_checked(variant)} == true",
        )
    Task(
        name=CANDIDATES,
        template=CANDIDATES,
        arguments={CANDIDATES: _checked(CANDIDATES)},
        depends="acquire && check",
        when=f"{_checked(WITH_CANDIDATES)} == true",
    )
    others = (*(f"optimize-{variant}" for variant in quantized_formats()), CANDIDATES)
    others_ended = " && ".join(map(_over, others))
    Task(
        name="evaluate",
        template="evaluate",
        arguments={name: _checked(name) for name in (SERVED, SERVING, *platform.stages.evaluate.automatic)},
        depends=f"check && optimize-{REFERENCE} && {others_ended}",
    )
    Task(name="select", template="select", arguments={SERVING: _checked(SERVING)}, depends="check && evaluate")


def _serving_tasks(platform: Platform, rollout: Rollout) -> None:
    """Add the rollout: one task on one machine; on a cluster, one task for each step."""
    promoted = f"{{{{tasks.select.outputs.parameters.{PROMOTION}}}}} == promoted"
    serve = f"{workflow_parameter('serve')} == true && {promoted}"
    if platform.serves_on == LOCAL:
        Task(name="serve", template="serve", depends="select", when=serve)
        return
    _step("deploy", DEPLOY, "select", when=serve)
    steps = [f"canary-{step}" for step in rollout.steps]
    before = "deploy.Succeeded"
    when: str | None = f"{{{{tasks.deploy.outputs.parameters.{COMPARED}}}}} == true"
    for name, step in zip(steps, map(str, rollout.steps), strict=True):
        if step == "100":
            approval = f"{workflow_parameter('approval')} == true"
            observed = before.partition(".")[0]
            Task(
                name="approve",
                template="approve",
                arguments={"message": f"{{{{tasks.{observed}.outputs.parameters.said}}}}"},
                depends=before,
                when=f"{when} && {approval}" if when else approval,
            )
            before = "(approve.Succeeded || approve.Skipped)"
        _step(name, step, before, when=when)
        before, when = f"{name}.Succeeded", None
    # Nothing is compared in a first release, nor if the release is served already: then no step gets a pod.
    _step("serve", PROMOTE, f"{steps[-1]}.Succeeded || (deploy.Succeeded && {steps[0]}.Skipped)")


def _step(name: str, step: str, depends: str, when: str | None = None) -> None:
    arguments = {"step": step, "approved": str(step in ("100", PROMOTE)).lower()}
    Task(name=name, template="rollout", arguments=arguments, depends=depends, when=when)


def _checked(output: str) -> str:
    return f"{{{{tasks.check.outputs.parameters.{output}}}}}"


def _over(task: str) -> str:
    """Return the condition that *task* has ended, however it did."""
    results = ("Succeeded", "Skipped", "Failed", "Errored", "Omitted")
    return "(" + " || ".join(f"{task}.{result}" for result in results) + ")"
