"""The real TensorBoard, over a real sweep: what its pages ask for is there, by the same HTTP requests."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from browser import open_browser

from recals_exp import records
from recals_exp.runconfig import Budget, PartSpec, RunConfig
from recals_exp.runner import finish_sweep, run
from recals_exp.writers import FIGURE_TAG, METRIC_TAGS, tradeoff_tag

T = TypeVar("T")
BUDGETS = (0.5, 0.75)
FAILING = "100B"
DEADLINE_S = 90.0  # for the server to start, and for it to have read the files; it takes about five seconds


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`outputs/a_sweep` with two finished jobs and one that failed."""
    folder = tmp_path_factory.mktemp("outputs")
    for budget in (*BUDGETS, FAILING):
        config = RunConfig(
            model=PartSpec("mlp_chain", "recals_exp.models.mlp_chain", {"depth": 8, "width": 32}),
            dataset=PartSpec("digits", "recals_exp.datasets.digits", {"image_size": 8, "channels": 1}),
            optimizer=PartSpec("sgd", "torch.optim.SGD", {"lr": 0.1}),
            budget=Budget.parse(budget),
            policy="fifo",
            batch_size=64,
            device="cpu",
            train_steps=4,
            warmup_steps=1,
            timing_pairs=6,
        )
        run(config, folder / "a_sweep" / f"budget={budget}")
    finish_sweep(folder / "a_sweep")
    return folder


class Server:
    """A TensorBoard process on a free port of the loopback interface."""

    def __init__(self, logdir: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "tensorboard.main",
            "--logdir",
            str(logdir),
            "--host",
            "127.0.0.1",
            "--port",
            "0",
        ]
        command += ["--load_fast", "false", "--reload_interval", "1"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self._said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.address = wait_for(self._address)
        except BaseException:
            self.stop()
            raise

    def _read(self) -> None:
        assert self._process.stderr is not None
        self._said.extend(self._process.stderr)  # ends when the process does

    def _address(self) -> str | None:
        assert self._process.poll() is None, "tensorboard ended:\n" + "".join(self._said)
        found = re.search(r"at (http://127\.0\.0\.1:\d+)/", "".join(list(self._said)))
        return found and found.group(1)

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)
        self._reader.join(timeout=10)
        if self._process.stderr is not None:
            self._process.stderr.close()

    def get(self, path: str, body: Any = None, **query: str) -> Any:
        answer = self.read(path, body, **query)
        return json.loads(answer)

    def read(self, path: str, body: Any = None, **query: str) -> bytes:
        url = f"{self.address}/data/{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read()


def wait_for(ask: Callable[[], T | None]) -> T:
    """The first answer that is one. Asked again until the deadline."""
    until = time.monotonic() + DEADLINE_S
    while True:
        answer = ask()
        if answer:
            return answer
        if time.monotonic() > until:
            raise TimeoutError(f"no answer from TensorBoard within {DEADLINE_S:g} s")
        time.sleep(0.1)


@pytest.fixture(scope="module")
def server(outputs: Path) -> Iterator[Server]:
    server = Server(outputs)
    try:
        runs = {"a_sweep/tradeoff"} | {f"a_sweep/budget={budget}" for budget in (*BUDGETS, FAILING)}
        wait_for(lambda: runs == set(server.get("runs")))
        yield server
    finally:
        server.stop()


def results(outputs: Path) -> dict[str, records.RunResult]:
    return {path.parent.name: records.load(path) for path in outputs.rglob("result.json")}


def measured_tags(result: records.RunResult) -> set[str]:
    """The metrics of a job; some are of pipelines only."""
    found = {tag for column, tag in METRIC_TAGS.items() if getattr(result, column) is not None}
    assert len(found) >= len(METRIC_TAGS) - 2
    return found


def test_the_jobs_curves_are_there(server: Server, outputs: Path) -> None:
    job = f"budget={BUDGETS[0]}"
    tags = set(server.get("plugin/scalars/tags")[f"a_sweep/{job}"])
    assert measured_tags(results(outputs)[job]) <= tags
    losses = server.get("plugin/scalars/scalars", run=f"a_sweep/{job}", tag="training/loss")
    training = results(outputs)[job].training
    assert training is not None
    assert [step for _, step, _ in losses] == [0, 1, 2, 3]
    assert [value for _, _, value in losses] == pytest.approx(training.losses)


def test_the_tradeoff_has_the_budget_as_its_x_axis(server: Server, outputs: Path) -> None:
    found = results(outputs)
    for column in ("documented_overhead_pct", "recompute_flops_pct", "time_overhead_pct", "peak_memory_bytes"):
        points = server.get("plugin/scalars/scalars", run="a_sweep/tradeoff", tag=tradeoff_tag(column))
        assert [step for _, step, _ in points] == [50, 75]
        scale = 1024**2 if column.endswith("_bytes") else 1
        expected = [getattr(found[f"budget={budget}"], column) / scale for budget in BUDGETS]
        assert [value for _, _, value in points] == pytest.approx(expected, rel=1e-5)


def test_the_figure_is_the_file(server: Server, outputs: Path) -> None:
    (image,) = server.get("plugin/images/images", run="a_sweep/tradeoff", tag=FIGURE_TAG, sample="0")
    assert image["step"] == 0
    key = urllib.parse.parse_qs(image["query"])["blob_key"][0]
    png = server.read("plugin/images/individualImage", blob_key=key)
    assert png == (outputs / "a_sweep" / "tradeoff.png").read_bytes()


def test_the_reports_other_figures_and_texts_are_there(server: Server) -> None:
    for name in ("memory_timeline", "layers"):
        assert server.get("plugin/images/images", run="a_sweep/tradeoff", tag=f"tradeoff/{name}", sample="0")
    (said,) = server.get("plugin/text/text", run="a_sweep/tradeoff", tag="report/answer/text_summary")
    assert "mlp_chain: budget " in said["text"]


def test_hparams_have_values_for_every_job(server: Server, outputs: Path) -> None:
    experiment = server.get("plugin/hparams/experiment", {"experimentName": "", "includeMetrics": True})
    names = [info["name"] for info in experiment["hparamInfos"]]
    assert names[:5] == ["budget", "dataset", "model", "policy", "strategy"]  # the five that the page shows unasked
    assert [info["name"]["tag"] for info in experiment["metricInfos"]] == list(METRIC_TAGS.values())
    request = {
        "experimentName": "",
        "allowedStatuses": ["STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING", "STATUS_UNKNOWN"],
        "colParams": [],
        "startIndex": 0,
        "sliceSize": 100,
    }
    groups = server.get("plugin/hparams/session_groups", request)["sessionGroups"]
    by_job = {group["name"].removeprefix("a_sweep/"): group for group in groups}
    assert set(by_job) == {f"budget={budget}" for budget in (*BUDGETS, FAILING)}
    for job, result in results(outputs).items():
        group = by_job[job]
        assert group["hparams"]["budget"] == result.budget
        assert group["hparams"]["policy"] == "fifo"
        assert group["hparams"]["model"] == "mlp_chain"
        values = {value["name"]["tag"]: value["value"] for value in group["metricValues"]}
        if result.status == records.OK:
            assert set(values) == measured_tags(result)
            assert values[METRIC_TAGS["recompute_flops_pct"]] == pytest.approx(result.recompute_flops_pct, rel=1e-5)
            assert values[METRIC_TAGS["gradients_identical"]] == 1.0
        else:
            assert values == {}
            assert group["hparams"]["status"] == "failed"


@pytest.mark.slow
def test_the_pages_in_a_real_browser(server: Server) -> None:
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": 1500, "height": 1000})
        page.set_default_timeout(1000 * DEADLINE_S)
        page.goto(f"{server.address}/#hparams")
        page.get_by_text("TABLE VIEW").wait_for()
        for job in (*BUDGETS, FAILING):
            page.get_by_text(f"a_sweep/budget={job}").first.wait_for()
        page.goto(f"{server.address}/#text")
        page.get_by_text("CacheLimitError").first.wait_for()
        page.get_by_text("needs the least memory").first.wait_for()
        page.goto(f"{server.address}/#images")
        for tag in ("tradeoff/figure", "tradeoff/memory_timeline", "tradeoff/layers"):
            page.get_by_text(tag).first.wait_for()
        page.goto(f"{server.address}/#timeseries")
        page.get_by_text("cache/limit (MiB)").first.wait_for()


def test_the_reason_of_a_failed_job_is_readable(server: Server) -> None:
    (entry,) = server.get("plugin/text/text", run=f"a_sweep/budget={FAILING}", tag="error/text_summary")
    assert "CacheLimitError" in entry["text"]
