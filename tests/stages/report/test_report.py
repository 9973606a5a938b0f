from __future__ import annotations

import hashlib
import html
import json
import os
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pipeline.local.engine import render as workflow
from pipeline.local.runs import LocalRun
from pipeline.runs.state import RunState
from pipeline.settings.config import RunConfig, load
from pipeline.workflow.parameters import arguments
from scoring.constraints import Constraints
from scoring.metrics import odds, shown, si
from scoring.profile import Profile
from stages.parts.base.store import ModelStore
from stages.parts.records.drills import Answers, Drill, keep
from stages.parts.records.evaluation import Capacity, ColdStart, Drift, Goodput, Speed, Trial
from stages.parts.records.production import Price
from stages.parts.records.watch import FILE, Looks
from stages.report.cells import Variants
from stages.report.page import HTML, collect, render, renew
from stages.report.provenance import settings_file
from stages.report.run_report import JSON, RunReport
from stages.report.scores import changed, sentences, verdict
from stages.select.selection import select
from tests.samples import MODEL, TWELVE, base, evaluation, measured_store, outcome, store_of_twelve, variant
from tests.stages.rollout.test_looks import alarm

RUN = "run-1"
VARIANTS = ["fp16", "awq", "gptq"]
EMPTY = {"meta", "br", "link", "img", "input", "hr", "circle", "polygon", "line", "rect", "path", "polyline"}
LARGEST_BYTES = 150_000


class Page(HTMLParser):
    """The page as a browser reads it: its tags with attributes, the cells of each table by id, what its lists say of
    each term, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.facts: dict[str, str] = {}
        self.open: list[str] = []
        self.text = ""
        self._rows: list[list[str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.append((tag, given))
        if tag == "table":
            self._rows = self.tables.setdefault(given["id"], [])
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
        elif tag == "br" and self._rows and self._rows[-1]:
            self._rows[-1][-1] += "\n"
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in EMPTY:
            assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        self.text += data
        if {"td", "th"} & set(self.open):
            self._rows[-1][-1] += data
        if self.open[-1:] == ["dt"]:
            self._term = data.strip()
        if "dd" in self.open:
            self.facts[self._term] = self.facts.get(self._term, "") + data

    def column(self, table: str, title: str) -> dict[str, list[str]]:
        """The lines of each cell below the heading that begins with the line *title*, by the first line of its row."""
        heads, *rows = [[cell.strip().splitlines() for cell in cells] for cells in self.tables[table]]
        place = [head[0] for head in heads].index(title)
        return {cells[0][0]: [line.strip() for line in cells[place]] for cells in rows}

    def row(self, table: str, name: str) -> list[list[str]]:
        """The row whose first cell begins with the line *name*: the lines of each cell."""
        (found,) = [cells for cells in self.tables[table] if cells[0].strip().splitlines()[:1] == [name]]
        return [[line.strip() for line in cell.strip().splitlines()] for cell in found]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    monkeypatch.setenv("SLIPWAY_RUN", RUN)
    return measured_store(tmp_path)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    """The report of a successful run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPWAY_RUN", RUN)
        return decided(measured_store(tmp_path_factory.mktemp("store")), price=Price(per_hour=1.8, currency="EUR"))


def decided(
    store: ModelStore, profile: Profile | None = None, names: list[str] = VARIANTS, price: Price | None = None
) -> RunReport:
    _, decision, _ = select(store, profile or Profile(name="balanced"), names, price=price)
    outcome(store, RUN, "select", "", "done", key=decision.key, why=decision.reason)
    return collect(store, RUN, "Succeeded")


def with_all(report: RunReport) -> RunReport:
    """*report* as for a workload with latency targets, on a machine that drifted."""
    speed = Speed(compute_gflop_per_s=30, memory_gib_per_s=10)
    evaluations = []
    for number, each in enumerate(report.evaluations):
        tried = [
            Trial(restart=0, rate_per_s=rate, requests=40, share=share, held=held)
            for rate, share, held in ((16.0, 0.25 + number / 100, False), (8.0, 0.99, True), (32.0, None, False))
        ]
        capacity = Capacity(
            ttft_ms=500,
            tpot_ms=50,
            requests_per_s=9.5 + number,
            output_tokens_per_s=608.0,
            low=590.0,
            high=620.0,
            starts=(600.0, 616.0),
            trials=tuple(tried),
        )
        good = Goodput(ttft_ms=500, tpot_ms=50, share=0.875, requests_per_s=3, output_tokens_per_s=77.5)
        drift = Drift(before=speed, after=speed, largest_change=0.21, measured_again=1)
        engine = each.engine.model_copy(update={"kernel": "MarlinKernel", "fallbacks": ("falling back to <slow>",)})
        update = {"capacity": capacity, "goodput": good, "drift": drift, "engine": engine}
        evaluations.append(each.model_copy(update=update))
    return report.model_copy(update={"evaluations": tuple(evaluations)})


def test_the_first_screen_says_what_to_ship_by_how_much_and_how_sure(report):
    assert report.decision is not None
    page = Page(render(report))
    lead, rest = sentences(report.decision.reason)
    assert f"{lead} {rest}" == report.decision.reason
    first = page.text[page.text.index("Ship awq") : page.text.index("Score, profile")]
    assert lead in first
    assert rest in first
    assert "Ship awq decided, better than every other" in first
    winner = report.decision.candidates[0]
    assert winner.change["latency"].value == pytest.approx(-0.2)
    assert "−20.0%" in first
    assert all(shown(metric, value) in first for metric, value in winner.raw.items())
    near, anywhere = winner.weights_share, winner.any_weights_share
    assert near is not None
    assert anywhere is not None
    assert (
        f"awq scores highest under {near:.0%} of the weightings near the profile’s, {anywhere:.0%} of all." in page.text
    )


def test_what_the_outcome_follows_from_is_a_table(report):
    assert report.decision is not None
    page = Page(render(report))
    assert [cell.strip() for cell in page.tables["comparisons"][0]] == [
        "awq and",
        "Result",
        "Lead in score",
        "Confidence",
    ]
    for each in report.decision.comparisons:
        name, result, lead, confidence = page.row("comparisons", each.other)
        assert (name, result, confidence) == ([each.other], ["awq is better"], [">99%"])
        assert lead == [f"+{each.lead:.3f}", f"(+{each.low:.3f} to +{each.high:.3f})"]


def test_after_a_single_start_the_page_says_that_the_noise_is_not_known(report):
    assert report.decision is not None
    compared = [
        each.model_copy(update={"relation": "open", "low": None, "high": None, "confidence": 0.5})
        for each in report.decision.comparisons
    ]
    bare = [
        each.model_copy(
            update={
                "chance": None,
                "score_low": None,
                "score_high": None,
                "change": {m: c.model_copy(update={"low": None, "high": None}) for m, c in each.change.items()},
            }
        )
        for each in report.decision.candidates
    ]
    unsure = {"outcome": "unresolved", "comparisons": tuple(compared), "candidates": tuple(bare)}
    page = Page(render(report.model_copy(update={"decision": report.decision.model_copy(update=unsure)})))
    assert "Ship awq unresolved, first of the ranking" in page.text
    assert page.row("comparisons", "gptq")[1:] == [
        ["open: too few data to tell"],
        [f"+{compared[0].lead:.3f}", "noise of starts not known"],
        ["not known"],
    ]
    assert page.row("scores", "awq")[1] == [f"{bare[0].score:.3f}"]
    assert "None" not in page.text


def test_what_was_seen_of_the_release_in_production_is_in_the_report_of_its_run(store):
    written = decided(store)
    assert "In production" not in render(written)
    assert written.decision
    release, path = written.decision.release, store.run(RUN) / JSON
    written.write(path)
    sound = alarm(release, agreement=1.0, alarms=(), learned=True)
    began = alarm(release, causes=("its server was restarted",), changed=True)
    bad = alarm(release)
    Looks(looks=(sound, alarm("0009-other", changed=True), began, bad, sound)).write(store.path / FILE)
    renew(store, release)
    page = Page(path.with_name(HTML).read_text())
    assert " alarm: answers. agreement 0.5000, 0 of 200 requests failed" in page.text
    assert page.text.count("its server was restarted") == page.text.count(" no alarm. agreement 1.0000") == 1
    state = RunState(name=RUN, workflow="slipway", phase="Succeeded", arguments={"model": MODEL}, nodes=[])
    shown = LocalRun(store.run(RUN), state).show()
    assert len(shown.document["report"]["watched"]) == 2


def test_drills_of_the_release_say_whether_it_is_ready_for_production(store):
    written = decided(store)
    assert "Production readiness" not in render(written)
    assert written.decision
    release, path = written.decision.release, store.run(RUN) / JSON
    written.write(path)
    answered = Answers(requests=312, failed=200, refused=200, errors=("503 too much",), releases={release: 112})
    told: dict[str, Any] = {"release": release, "answers": answered, "at": datetime(2026, 1, 2, 3, 4, tzinfo=UTC)}
    kept = Drill(drill="overload", failures=(), figures={"refused_p95_ms": 4.25, "previous": None}, **told)
    keep(store, kept.model_copy(update={"failures": ("was slow",)}))
    keep(store, kept.model_copy(update={"release": "0009-other"}))
    keep(store, kept)
    keep(store, Drill(drill="cold", failures=("took 90 s",), figures={"warm": True}, short=True, **told))
    renew(store, release)
    heads, *rows = Page(path.with_name(HTML).read_text()).tables["drills"]
    assert heads[:2] == ["Drill", "Verdict"]
    assert [row[:2] for row in rows] == [["overload", "held"], ["cold\nshort", "failed"]]
    assert rows[0][2:] == ["312 requests, 200 refused, 200 failed, refused_p95_ms 4.25", "2026-01-02 03:04"]
    assert rows[1][2].startswith("took 90 s; 312 requests")


def test_the_parts_of_each_servers_cold_start_are_in_the_report(store):
    written = decided(store)
    assert "starts" not in Page(render(written)).tables
    first, *others = written.evaluations
    start = ColdStart(imports_s=15, weights_s=1.5, compilation_s=0, engine_s=3, first_answer_s=0.5)
    timed = first.model_copy(update={"engine": first.engine.model_copy(update={"start": start})})
    heads, *rows = Page(render(written.model_copy(update={"evaluations": (timed, *others)}))).tables["starts"]
    assert heads == ["Cold start", "Imports", "Weights", "Compilation", "Engine", "First answer"]
    assert rows == [[first.variant, "15.0 s", "1.5 s", "0.0 s", "3.0 s", "0.5 s"]]


def test_an_incomplete_decision_names_what_is_missing(store):
    outcome(store, RUN, "evaluate", "gptq", "failed", why="vLLM did not start")
    page = Page(render(decided(store)))
    assert "Best of the others: awq incomplete, without gptq" in page.text
    assert page.facts["gptq"] == "evaluate failed: vLLM did not start"


def test_every_figure_of_the_score_table_is_the_decisions(report):
    assert report.decision is not None
    page = Page(render(report))
    for each in report.decision.candidates:
        name, score, *metrics, cost = page.row("scores", each.variant)
        assert name[0] == each.variant
        chance = f"best with {odds(each.chance)}"
        assert score == [f"{each.score:.3f}", f"{each.score_low:.2f}–{each.score_high:.2f}", chance]
        for metric, cell in zip(("quality", "latency", "throughput", "memory"), metrics, strict=True):
            assert cell[0] == shown(metric, each.raw[metric])
            if metric in each.intervals:
                low, high = (float(end.replace(",", "")) for end in cell[1].split("–"))
                assert low == pytest.approx(each.intervals[metric].low, rel=0.01)
                assert high == pytest.approx(each.intervals[metric].high, rel=0.01)
            if metric in each.change:
                assert changed(each.change[metric])[0] in cell
        assert each.cost is not None
        assert cost == [f"{each.cost.value:.3g} EUR", f"{each.cost.low:.3g}–{each.cost.high:.3g}"]


def test_every_figure_of_the_load_table_is_the_evaluations(report):
    report = with_all(report)
    page = Page(render(report))
    times = page.column("times", "End to end")
    rates, goodputs = page.column("load", "Output tokens/s"), page.column("load", "Goodput")
    assert sorted(times) == sorted(rates) == sorted(VARIANTS)
    for each in report.evaluations:
        mean, rounds, requests = rates[each.variant]
        assert float(mean) == pytest.approx(each.load.output_tokens_per_s, abs=0.05)
        assert rounds == f"{mean.split('.')[0]}–{mean.split('.')[0]} in 3 rounds"
        assert requests == f"{each.load.requests} requests"
        assert goodputs[each.variant] == ["87.5%", "77.5 tokens/s"]
        assert each.load.e2el_ms.intervals is not None
        low, high = each.load.e2el_ms.intervals.p95
        assert times[each.variant][1] == f"p95 {low:.1f}–{high:.1f}"


def test_the_page_needs_nothing_from_outside(report):
    text = render(with_all(report))
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "embed", "image", "use"} & {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        for name, value in attributes.items():
            assert name not in ("src", "href", "xlink:href")
            assert not name.startswith("on")
            assert "//" not in value
    styles = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in styles
    assert "@import" not in styles
    assert len(text.encode()) < LARGEST_BYTES


def test_the_page_suits_light_and_dark_schemes_and_screen_readers(report):
    text = render(with_all(report))
    assert "@media (prefers-color-scheme: dark)" in text
    page = Page(text)
    plots = [attributes for tag, attributes in page.tags if tag == "svg" and attributes.get("role") == "img"]
    identifiers = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(plots) == 4
    assert len(identifiers) == len(set(identifiers))
    assert all(set(each["aria-labelledby"].split()) <= set(identifiers) for each in plots)
    for scheme in text[: text.index("</style>")].split("@media (prefers-color-scheme: dark)"):
        colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6})\b", scheme))
        card = colors["card"]
        assert min(contrast(color, card) for name, color in colors.items() if name.startswith("v")) > 3
        assert min(contrast(colors[name], card) for name in ("text", "soft", "good", "bad")) > 4.5
        assert min(contrast(colors["inside"], colors[name]) for name in ("quality", "latency", "memory")) > 4.5


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colors, as WCAG 2 defines it."""
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def luminance(color: str) -> float:
    color = color if len(color) == 7 else "#" + "".join(2 * each for each in color[1:])
    channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_table_of_constraints_shows_which_variants_keep_them(store):
    limits = Constraints.model_validate({"quality_recovery": {"min": 0.993}, "goodput_share": {"min": 0}})
    report = decided(store, Profile(name="own", constraints=limits.model_copy(update={"goodput_share": None})))
    assert report.decision is not None
    page = Page(render(report))
    cells = page.column("constraints", "quality_recovery ≥ 0.993")
    assert cells == {"fp16": ["1 ✓"], "awq": ["0.995 ✓"], "gptq": ["0.9925 ✗"]}
    assert "quality_recovery 0.9925 is below" in page.facts["gptq"]
    losses = page.column("constraints", "loss on arc < 3%")
    assert losses["fp16"] == ["–"]
    assert losses["awq"] == ["+0.5% ✓", "at most +0.7%"]


def test_the_quality_recovery_is_that_of_the_profiles_values_where_it_has_some(store):
    constraints = {"quality_recovery": {"min": 0.5}}
    values = {"quality": 1.0, "latency": 10, "throughput": 100, "memory": 1000}
    data = {"name": "own", "reference": values, "constraints": constraints}
    report = decided(store, Profile.model_validate(data))
    assert report.decision is not None
    qualities = [candidate.raw["quality"] for candidate in report.decision.candidates]
    cells = Page(render(report)).column("constraints", "quality_recovery ≥ 0.5")
    shown = [float(cell[0].split()[0]) for cell in cells.values()]
    assert sorted(shown) == pytest.approx(sorted(qualities), abs=1e-4)


def test_the_page_shows_notes_the_engines_fallbacks_and_the_machines_drift(report):
    assert report.decision is not None
    noted = report.decision.model_copy(update={"notes": ("The machine was serving x.",)})
    text = render(with_all(report.model_copy(update={"decision": noted})))
    page = Page(text)
    assert "The machine was serving x." in page.text
    assert page.column("load", "Kernel")["awq"][0] == "MarlinKernel"
    assert re.search(r"vLLM took a slower path for \w+, \w+, \w+:</span> falling back to &lt;slow&gt;", text)
    assert "awq 21%" in page.text


def test_a_cost_without_an_upper_bound_shows_the_lower_one(report):
    assert report.decision is not None
    first, *rest = report.decision.candidates
    assert first.cost is not None
    cost = first.cost.model_copy(update={"value": 33.3, "low": 16.7, "high": None, "basis": "goodput"})
    candidates = (first.model_copy(update={"cost": cost}), *rest)
    page = Page(
        render(report.model_copy(update={"decision": report.decision.model_copy(update={"candidates": candidates})}))
    )
    assert page.row("scores", "awq")[-1] == ["33.3 EUR", "≥ 16.7"]
    assert "≥ 16.7, at the goodput" in page.text[: page.text.index("Score, profile")]


def test_the_share_of_requests_within_the_targets_is_shown_for_each_rate_that_was_tried(report):
    assert 'id="rates"' not in render(report)
    page = Page(render(with_all(report)))
    _, capacity, output, tried = page.row("rates", report.evaluations[1].variant)
    assert (capacity, output) == (["10.5 requests/s"], ["608 tokens/s", "590–620"])
    assert tried == ["8: 99% · 16: 26% · 32: ended early"]


def own_settings(folder: Path) -> RunConfig:
    """A configuration whose every part differs from the default, with files of the user's own."""
    (folder / "tasks").mkdir()
    (folder / "trace.jsonl").write_text('{"prompt": "When?", "output_tokens": 8}\n')
    (folder / "lines.txt").write_text("one\n\ntwo\n")
    (folder / "mine.yaml").write_text(
        "protocol: thorough\nbudget_minutes: 2\ntrace: trace.jsonl\ntasks_path: tasks\ndivergence_text: ./lines.txt\n"
        "concurrency: 2\nslo: {ttft_ms: 200.5, tpot_ms: 1.0e-4}\nquality_tasks: ['no', '1e3']\n"
    )
    return load(
        chosen={"profile": "chatbot", "workload": str(folder / "mine.yaml")},
        assignments=[
            *("profile.weights.latency=0.7", "serving.max_model_len=4096", "serving.extra_arguments=[--seed, '1']"),
            *("optimize.variants=[fp16, gptq]", "optimize.group_size=64"),
            *(f"optimize.calibration.text={folder / 'lines.txt'}", "platform.price_per_hour=1.8"),
        ],
    )


def program_of(config: RunConfig, store: ModelStore) -> str:
    """The page that the program writes when it is called as the pipeline's definition calls it for *config*."""
    given = arguments(config, MODEL, "main", serve=False)
    (template,) = [each for each in workflow(config)["spec"]["templates"] if each["name"] == "ending"]
    told = [
        re.sub(r"{{workflow.parameters.([\w-]+)}}", lambda found: given[found[1]], each).replace(
            "{{workflow.status}}", "Succeeded"
        )
        for each in template["container"]["args"]
    ]
    subprocess.run(
        [sys.executable, "-m", "stages.ending", *told],
        env=os.environ | {"SLIPWAY_STORE": str(store.root), "SLIPWAY_RUN": RUN},
        capture_output=True,
        check=True,
    )
    return (store.run(RUN) / "report.html").read_text()


def test_the_printed_command_and_settings_repeat_the_run(store, tmp_path):
    config = own_settings(tmp_path)
    decided(store, config.profile, price=Price(per_hour=1.8, currency="USD"))
    page = program_of(config, store)
    (printed,) = re.findall(r"<summary>settings.yaml</summary><pre>(.*?)</pre>", page, re.DOTALL)
    (tmp_path / "settings.yaml").write_text(html.unescape(printed))
    (line,) = re.findall(r'<p class="again"><code>(.*?)</code>', page)
    command = shlex.split(html.unescape(line))
    assert command[:7] == ["slipway", "run", MODEL, "--config", "settings.yaml", "--revision", "c" * 40]
    assert set(command[7::2]) == {"--set"}
    again = load(tmp_path / "settings.yaml", assignments=command[8::2])
    assert again == config
    digest = hashlib.sha256((tmp_path / "settings.yaml").read_bytes()).hexdigest()
    assert digest in page


def test_the_printed_settings_name_the_users_files_with_their_digests(report, tmp_path):
    assert report.decision is not None
    digests = {"trace_digest": "7" * 64, "tasks_digest": None, "divergence_digest": "d" * 64}
    workload = report.decision.workload | digests
    given = arguments(own_settings(tmp_path), MODEL, "main", serve=False)
    told = report.model_copy(
        update={
            "decision": report.decision.model_copy(update={"workload": workload}),
            "settings": {name: json.loads(given[name]) for name in ("profile", "workload", "optimize", "serving")},
        }
    )
    lines = settings_file(told).splitlines()
    assert lines[:2] == [f"# workload.trace: sha256 {'7' * 64}", f"# workload.divergence_text: sha256 {'d' * 64}"]
    assert f"  trace: {tmp_path / 'trace.jsonl'}" in lines


def test_settings_that_are_not_json_are_left_out_of_the_report(store):
    ended = subprocess.run(
        [sys.executable, "-m", "stages.report", "--model", MODEL, "--status", "Failed", "--workload", "{chat"],
        env=os.environ | {"SLIPWAY_STORE": str(store.root), "SLIPWAY_RUN": RUN},
        check=False,
    )
    assert ended.returncode == 0
    assert "slipway run" not in (store.run(RUN) / "report.html").read_text()


def test_a_failed_run_is_reported_with_what_failed(store):
    outcome(store, RUN, "optimize", "fp16", "failed", why="model.safetensors is <damaged>")
    page = render(collect(store, RUN, "Failed"))
    assert "<h1>No variant was chosen</h1>" in page
    assert "model.safetensors is &lt;damaged&gt;" in page


def test_a_failed_variant_is_shown_with_the_reason(store):
    outcome(store, RUN, "evaluate", "gptq", "failed", why="vLLM ended: no <kernel>")
    page = Page(render(decided(store)))
    assert page.facts["gptq"] == "evaluate failed: vLLM ended: no <kernel>"
    assert "gptq" not in page.column("scores", "Score")
    assert "no <kernel>" not in page.text[: page.text.index("Left out")]


def test_one_variant_alone_has_a_report_without_comparisons(store):
    text = render(decided(store, names=["fp16"]))
    assert "Ship fp16 decided, the only choice" in Page(text).text
    assert 'id="loss"' not in text
    assert "Left out" not in text


def test_without_fp16_the_variants_are_compared_with_the_values_of_the_profile(store):
    outcome(store, RUN, "evaluate", "fp16", "failed", why="out of memory")
    values = {"quality": 0.8, "latency": 10, "throughput": 100, "memory": 1000}
    page = Page(render(decided(store, Profile.model_validate({"name": "own", "reference": values}))))
    assert "Changes are relative to the profile’s values" in page.text
    assert "−20.0%" in page.text


def test_a_decision_without_intervals_and_scores_has_a_report(report):
    assert report.decision is not None
    bare = [
        each.model_copy(update={"intervals": {}, "change": {}, "score_low": None, "score_high": None})
        for each in report.decision.candidates
    ]
    last = bare[-1].model_copy(
        update={"raw": {}, "score": None, "cost": None, "chance": None, "excluded": "no numbers"}
    )
    decision = report.decision.model_copy(update={"candidates": (*bare[:-1], last)})
    page = Page(render(report.model_copy(update={"decision": decision, "evaluations": ()})))
    assert last.variant not in page.column("scores", "Score")
    assert page.facts[last.variant] == "no numbers"


@pytest.fixture(scope="module")
def twelve(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    """The report of a run with a dozen candidates, some of which are left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPWAY_RUN", RUN)
        store, names = store_of_twelve(tmp_path_factory.mktemp("store"))
        return decided(store, names=names, price=Price(per_hour=4.2))


def test_twelve_candidates_have_one_picture_of_what_they_lose_at_which_cost(twelve):
    assert twelve.decision is not None
    text = render(with_all(twelve))
    assert len(text.encode()) < LARGEST_BYTES
    wide, narrow = (
        re.search(rf'<svg id="{each}" .*?<desc[^>]*>(.*?)</desc>(.*?)</svg>', text) for each in ("loss", "loss-narrow")
    )
    assert wide is not None
    assert narrow is not None
    plotted = [each for each in twelve.decision.candidates if each.raw]
    assert len(plotted) == 11
    for number, each in enumerate(plotted, 1):
        assert each.cost is not None
        assert each.cost.answers is not None
        change = each.change.get("quality")
        lost = -100 * change.value if change else 0.0
        place = f"{each.variant}: USD for 1,000 answers {each.cost.answers:,.6g}, quality lost, % {lost:.3g}"
        assert html.escape(place).replace("-", "−") in html.unescape(wide[1]).replace("-", "−")
        label = f"{each.variant}: 7.4% ↑" if each.excluded else each.variant
        assert f">{label}</text>" in wide[2]
        assert f">{label.replace(each.variant, str(number))}</text>" in narrow[2]
    assert wide[2].count(" hollow") == 1
    assert wide[2].count('class="ring') == 1


def test_what_was_left_out_of_twelve_is_said_in_one_list_and_in_no_table(twelve):
    assert twelve.decision is not None
    page = Page(render(with_all(twelve)))
    left_out = {name: page.facts[name] for name in [*TWELVE, "nvfp4a16"] if name in page.facts}
    first = twelve.decision.candidates[0].variant
    assert left_out == {
        "awq+small-batches": f"worse than {first} after 1 start, so it was not started again",
        "nvfp4a16": "vLLM has no kernel for nvfp4a16 on an H100",
        "gptq": next(each.excluded for each in twelve.decision.candidates if each.variant == "gptq"),
    }
    for table in ("scores", "times", "load", "quality", "constraints", "rates", "variants"):
        assert "nvfp4a16" not in {row[0].split("\n")[0] for row in page.tables[table]}
    assert sorted(page.column("times", "End to end")) == sorted(TWELVE)


def test_variants_of_one_format_share_color_and_shape_and_differ_by_the_recipe(twelve):
    styles = Variants.styled([*TWELVE, "nvfp4a16"], "fp16").styles
    assert len(set(styles.values())) == 12
    assert styles["fp16"] == (0, 0)
    assert styles["fp8-block"].format == styles["fp8-block+ngram"].format == styles["fp8-block+kv-fp8"].format
    assert styles["fp8-block+ngram"].recipe == styles["w4a16+ngram"].recipe == styles["fp16+ngram"].recipe


def test_without_a_price_the_picture_shows_the_hours_of_the_server(store):
    text = render(decided(store))
    (awq,) = re.findall(r"awq: hours of the server for 1 M output tokens ([\d.]+), quality lost, % ([\d.]+)", text)[:1]
    assert float(awq[0]) == pytest.approx(1e6 / 120 / 3600, rel=1e-4)
    assert float(awq[1]) == pytest.approx(0.5)


def test_a_failed_run_lists_what_was_left_out_too(tmp_path):
    store, _ = store_of_twelve(tmp_path)
    page = Page(render(collect(store, RUN, "Failed")))
    assert page.facts["nvfp4a16"] == "vLLM has no kernel for nvfp4a16 on an H100"
    assert sorted(page.column("load", "Output tokens/s")) == sorted(TWELVE)


def test_eight_variants_with_long_names_fit_in_a_small_page(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPWAY_RUN", RUN)
    store = ModelStore(tmp_path, f"{'o' * 90}/{'n' * 90}")
    acquired = base(store)
    names = ["fp16", *(f"variant-of-a-long-name-{number}" for number in range(7))]
    for number, name in enumerate(names):
        made = variant(store, name, acquired)
        measured = evaluation(
            store,
            made,
            quality=0.8 - number / 100,
            latency_ms=9000.0 - number,
            throughput=100.0,
            weights_bytes=10**10 + number,
        )
        outcome(store, RUN, "optimize", name, "done", key=made.key)
        outcome(store, RUN, "evaluate", name, "done", key=measured.key)
    text = render(with_all(decided(store, names=names)))
    page = Page(text)
    assert len(text.encode()) < LARGEST_BYTES
    assert len({row[0].split("\n")[0] for row in page.tables["scores"]} & set(names)) == 8


def test_a_decision_of_another_run_is_not_shown_as_this_runs(store):
    decided(store)
    outcome(store, RUN, "select", "", "done", key="the key of a decision that production has moved on from")
    assert collect(store, RUN, "Succeeded").decision is None


def test_damaged_documents_are_left_out_rather_than_fatal(store):
    decided(store)
    store.evaluation("gptq").write_text("{")
    report = collect(store, RUN, "Succeeded")
    assert [each.variant for each in report.evaluations] != VARIANTS
    assert len(report.evaluations) == 2
    assert "<h1>Ship awq" in render(report)


def test_a_run_that_did_nothing_yet_has_a_report(tmp_path):
    report = collect(ModelStore(tmp_path, MODEL), RUN, "Failed")
    assert report.decision is None
    assert "No variant was chosen" in Page(render(report)).text


def test_the_program_writes_both_documents(store):
    decided(store)
    ended = subprocess.run(
        [sys.executable, "-m", "stages.report", "--model", MODEL, "--status", "Succeeded"],
        env=os.environ | {"SLIPWAY_STORE": str(store.root), "SLIPWAY_RUN": RUN},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.strip() == str(store.run(RUN) / "report.html")
    written = RunReport.read(store.run(RUN) / "report.json")
    assert written is not None
    assert written.decision is not None
    assert written.decision.winner == "awq"
    assert html.escape(written.decision.reason[:20]) in (store.run(RUN) / "report.html").read_text()


@pytest.mark.parametrize(
    ("metric", "change", "said"),
    [("latency", -0.1, "better"), ("latency", 0.1, "worse"), ("quality", 0.1, "better"), ("quality", -0.1, "worse")],
)
def test_whether_a_change_is_better_depends_on_the_metrics_direction(report, metric, change, said):
    assert report.decision is not None
    one = report.decision.candidates[0].change["latency"]
    assert verdict(metric, one.model_copy(update={"value": change, "low": change, "high": change})) == said
    assert verdict(metric, one.model_copy(update={"value": change, "low": -1, "high": 1})) == "level"


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 "), (999, "999 "), (1234, "1.23 k"), (5.8e6, "5.80 M"), (1.5e10, "15.00 G")]
)
def test_numbers_carry_a_prefix(value, text):
    assert si(value) == text
