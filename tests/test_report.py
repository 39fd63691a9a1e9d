"""The report is built from the record files alone, whatever they hold."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sample_results import failed, finished, save_sweep

from recals_exp import records, report
from recals_exp.cautions import cautions
from recals_exp.records import COLUMNS, ParityRecord


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    return save_sweep(tmp_path / "sweep", [finished(0.5), finished(0.125), failed(), finished(0.25)])


def test_rows_are_ordered_by_budget_and_failures_are_rows(sweep: Path) -> None:
    results = report.find_results([sweep])
    assert [result.budget for result in results] == ["0.125", "0.25", "0.5", "0.001"]
    assert results[-1].status == records.FAILED


def test_csv_has_exactly_the_columns_and_exact_values(sweep: Path) -> None:
    results = report.find_results([sweep])
    rows = list(csv.DictReader(io.StringIO(report.format_csv(results))))
    assert list(rows[0]) == list(COLUMNS)
    assert float(rows[0]["time_overhead_pct"]) == results[0].time_overhead_pct
    assert rows[0]["gradients_identical"] == "true"
    assert rows[0]["error"] == ""
    assert rows[3]["status"] == "failed"
    assert rows[3]["peak_memory_bytes"] == ""
    assert rows[3]["error"] == "CacheLimitError: limit 1 B, needed 2 B"


def test_json_has_exactly_the_columns_and_exact_values(sweep: Path) -> None:
    results = report.find_results([sweep])
    rows = json.loads(report.format_json(results))
    assert [list(row) for row in rows] == [list(COLUMNS)] * 4
    assert rows == [result.row() for result in results]


def test_table_shows_names_units_interval_and_the_reason(sweep: Path) -> None:
    table = report.format_table(report.find_results([sweep]))
    assert "model mlp_chain, dataset digits, pipeline none, policy fifo" in table
    assert "116.7" in table
    assert "117.2 [115.2, 119.7]" in table
    assert "64.0 MiB" in table
    assert "310.0 ms" in table
    assert "budget=0.001 failed: CacheLimitError: limit 1 B, needed 2 B" in table
    assert "\x1b" not in table


@pytest.mark.parametrize("width", [80, 100, 120, 160, 200])
def test_table_fits_the_terminal_and_says_what_it_left_out(width: int, sweep: Path) -> None:
    results = report.find_results([sweep])
    table = report.format_table(results, width=width)
    rows = [line for line in table.splitlines() if not line.startswith("no room here for")]
    assert max(map(len, rows)) <= width, table
    for needed in ("117.2 [115.2, 119.7]", "116.9", "44.0 MiB", "yes"):
        assert needed in table
    assert "no room here for bubble_ideal_pct" in table
    assert ("cache_total_bytes" in table) == (width < 200)


def test_every_column_has_a_place_in_the_table(sweep: Path) -> None:
    """Also with every column varying, where none is in the title."""
    other = finished(0.5, job="other", model="gpt", dataset="text", pipeline="two_stage", policy="dtr", batch_size=8)
    table = report.format_table([finished(0.5), other])
    head = table.split("─")[0]
    columns = _spelled_out(head)
    for column in COLUMNS:
        if column not in ("error", "time_overhead_low_pct", "time_overhead_high_pct"):
            assert column in columns, head


def _spelled_out(head: str) -> str:
    """The headings, each read from top to bottom."""
    lines = [line for line in head.splitlines() if line.strip()]
    width = max(map(len, lines))
    grid = [line.ljust(width) for line in lines]
    blank = [all(line[column] == " " for line in grid) for column in range(width)]
    headings, start = [], 0
    for column in range(width + 1):
        if column == width or blank[column]:
            headings.append("".join(line[start:column].strip() for line in grid))
            start = column
    return " ".join(headings)


def test_a_broken_record_is_a_row(sweep: Path) -> None:
    (sweep / "broken").mkdir()
    (sweep / "broken" / "result.json").write_text('{"job": "broken"')
    written = report.write_report([sweep])
    row = next(result for result in written.results if result.job == "broken")
    assert row.status == records.FAILED
    assert row.error is not None
    assert "unreadable record" in row.error
    assert "not a result record" in row.error
    assert written.failed == 2


def test_a_killed_job_is_a_row(sweep: Path) -> None:
    records.save(failed(job="killed", error="", status=records.RUNNING), sweep / "killed")
    written = report.write_report([sweep])
    assert "killed: still running, or killed" in report.format_table(written.results)
    assert written.failed == 2


def test_nothing_but_failures_still_makes_a_report(tmp_path: Path) -> None:
    written = report.write_report([save_sweep(tmp_path, [failed()])])
    assert written.figure_png[:4] == b"\x89PNG"
    assert (tmp_path / "tradeoff.png").read_bytes() == written.figure_png
    assert written.texts["answer"] == "No job has finished a measurement yet."


def test_several_sweeps_in_one_report(sweep: Path, tmp_path: Path) -> None:
    second = save_sweep(tmp_path / "second", [finished(0.5, model="gpt", dataset="text")])
    written = report.write_report([sweep, second, sweep / ".." / "sweep"], tmp_path / "both")
    assert len(written.results) == 5  # the sweep named twice counts once
    assert list(report.group_series(written.results)) == ["gpt text", "mlp_chain digits"]
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == [
        "report.html",
        "stages.csv",
        "tradeoff.csv",
        "tradeoff.json",
        "tradeoff.png",
        "tradeoff.svg",
    ]


def test_jobs_of_one_name_are_told_apart_by_their_sweep(tmp_path: Path) -> None:
    folders = [
        save_sweep(tmp_path / name, [finished(0.5), finished(value)]) for name, value in (("a", 0.25), ("b", 0.75))
    ]
    assert [result.job for result in report.find_results(folders)] == [
        "budget=0.25",
        "a/budget=0.5",
        "b/budget=0.5",
        "budget=0.75",
    ]


def test_warnings_tell_what_is_not_to_be_believed() -> None:
    differences = ("gradient of 0.weight differs: largest difference 1 (largest plain value 2)", "loss differs")
    parity = ParityRecord(True, True, False, True, True, differences, False)
    over = finished(0.5, gradients_identical=False, parity=parity, cache_peak_bytes=2**40)
    lines = cautions([over, finished(0.5)])
    assert len(lines) == 2
    assert "plain does not reproduce itself" in lines[0]
    assert "gradient of 0.weight" in lines[0]
    assert "1 more" in lines[0]
    assert "above its limit" in lines[1]
    assert "NO" in report.format_table([over])


def test_few_pairs_are_said_to_be_few() -> None:
    import dataclasses

    good = finished(0.5)
    assert good.timing is not None
    timing = dataclasses.replace(good.timing, ratios=(1.0, 1.1, 1.2), interval_coverage_pct=75.0)
    assert "3 pairs, so its interval covers 75 %" in cautions([dataclasses.replace(good, timing=timing)])[0]


def test_missing_folder_and_empty_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        report.write_report([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match=r"no result\.json below .*: has a job been started there"):
        report.write_report([tmp_path])


@pytest.mark.parametrize(
    ("jobs", "code"), [([finished(0.5)], 0), ([finished(0.5), failed()], 1), ([], 2)], ids=["ok", "failed", "none"]
)
def test_command_line_exit_codes(
    jobs: list[records.RunResult], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main([str(save_sweep(tmp_path, jobs))]) == code
    out = capsys.readouterr()
    assert ("tradeoff.csv" in out.out) == (code != 2)
    assert ("error: no result.json" in out.err) == (code == 2)


def test_command_line_as_a_program_needs_neither_torch_nor_hydra(sweep: Path) -> None:
    code = (
        "import sys; from recals_exp.report import main; code = main(sys.argv[1:]); "
        "assert not {'hydra', 'tensorboard'} & set(sys.modules), 'heavy imports'; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(sweep)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "116.7" in done.stdout


def test_stages_of_pipelines_stand_in_the_table_the_csv_and_the_page(tmp_path: Path) -> None:
    whole = finished(0.25, stages=None, bubble_pct=None, bubble_ideal_pct=None)
    save_sweep(tmp_path, [finished(0.5, job="spread", pipeline="two_stage"), whole])
    written = report.write_report([tmp_path])
    table = report.format_table(written.results)
    assert re.search(r"spread +1f1b +1 +1 +none +300\.0 ms +0\.0 +40\.0 +- +- +-", table)
    rows = (tmp_path / "stages.csv").read_text().splitlines()
    assert len(rows) == 3
    assert rows[0].startswith("job,schedule,n_micro_batches,stage,process,device,units,budget")
    assert rows[1].startswith("spread,1f1b,4,0,0,cpu,a b,0.25,2,")
    page = (tmp_path / "report.html").read_text()
    assert 'id="stages-table"' in page
    assert "stages" not in report.format_table([whole])
    assert "bubble" not in report.format_table([whole])


def test_small_sizes_keep_their_digits() -> None:
    assert "0.0488 MiB" in report.format_table([finished(0.5, cache_peak_bytes=51200)])
