"""Jobs of a cluster: results, events, deaths, stops, and continuation by a later process."""

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from regard.cluster import pool as module
from regard.cluster.job import JobFolder, call
from regard.cluster.pool import ClusterPool
from regard.cluster.schedulers import Cluster, LocalScheduler, SlurmScheduler
from regard.errors import DataError
from regard.processes import JobError

pytest.importorskip("submitit")
LOCAL, SLURM = Cluster("local"), Cluster("slurm", "gpu", ("time=10", "mem=2GB", "setup=true", "setup=true"))


@pytest.fixture(params=["local", "slurm"])
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(LocalScheduler, "grace", 0.3)
    monkeypatch.setattr(SlurmScheduler, "grace", 0.3)
    monkeypatch.setattr(SlurmScheduler, "interval", 0.1)
    monkeypatch.setattr(SlurmScheduler, "spacing", 0.0)
    if request.param == "slurm":
        request.getfixturevalue("slurm")
        return SLURM
    return LOCAL


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_jobs_return_values_emit_events_and_leave_no_files(cluster: Cluster, jobs: Any, tmp_path: Path) -> None:
    events: list[Any] = []
    with ClusterPool(cluster, tmp_path / "work", {"SLOT": "a"}) as pool:
        assert isinstance(pool, Executor)
        futures = [
            pool.submit(jobs.add, 1, b=1),
            pool.submit(jobs.count, 3, on_event=events.append),
            pool.submit(jobs.variable, "SLOT"),
        ]
        assert [future.result(60) for future in futures] == [2, [None] * 3, "a"]
    assert events == [{"step": 0}, {"step": 1}, {"step": 2}]
    assert not (tmp_path / "work").exists()


def test_a_job_that_dies_is_submitted_again(cluster: Cluster, jobs: Any, tmp_path: Path) -> None:
    reports: list[str] = []
    with ClusterPool(cluster, tmp_path / "work", report=reports.append, label=lambda *_: "the job") as pool:
        future = pool.submit(jobs.die_until, str(tmp_path / "count"), 3)
        assert future.result(60) == 3
    assert len(reports) == 2
    assert reports[0].startswith("the job: job ")
    assert "last words" in reports[0]
    assert reports[1].endswith("attempt 3 of 4")


def test_a_job_that_dies_too_often_fails(cluster: Cluster, jobs: Any, tmp_path: Path) -> None:
    with ClusterPool(replace(cluster, retries=1), tmp_path / "work") as pool:
        with pytest.raises(JobError, match=r"^its job died 2 times: died \(.*last words\)$"):
            pool.submit(jobs.die_until, str(tmp_path / "count"), 9).result(60)
        with pytest.raises(JobError, match=r"^ValueError: no such luck$"):
            pool.submit(jobs.fail, str(tmp_path / "failures")).result(60)
    assert (tmp_path / "failures").read_text() == "x", "an exception would come again"
    assert list((tmp_path / "work" / "logs").iterdir()), "the log of the job that died"


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2", "SIGTERM"])
def test_a_warning_signal_stops_a_job_which_is_continued(
    cluster: Cluster, jobs: Any, tmp_path: Path, name: str
) -> None:
    reports: list[str] = []
    path = tmp_path / "pid"
    with ClusterPool(cluster, tmp_path / "work", report=reports.append) as pool:
        future = pool.submit(jobs.wait, str(path), 60)
        until(lambda: path.exists() and path.read_text())
        os.kill(int(path.read_text()), signal.Signals[name])
        assert future.result(60) == "continued"
    (report,) = reports
    assert f"saved its state and stopped ({name})" in report


def test_leaving_the_block_ends_the_jobs(cluster: Cluster, jobs: Any, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    with ClusterPool(cluster, tmp_path / "work") as pool:
        future = pool.submit(jobs.wait, str(path), 600)
        until(lambda: path.exists() and path.read_text())
    with pytest.raises(JobError, match="closed"):
        future.result()
    until(lambda: not Path("/proc", path.read_text()).exists())
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(jobs.add, 1, 1)


def test_a_finished_job_is_never_run_again(cluster: Cluster, jobs: Any, tmp_path: Path) -> None:
    for _ in range(2):
        with ClusterPool(cluster, tmp_path / "work", keep=True) as pool:
            assert pool.submit(jobs.times, str(tmp_path / "count")).result(60) == 1
    with ClusterPool(cluster, tmp_path / "work") as pool:
        pool.clear()
    assert not (tmp_path / "work").exists()


def test_the_same_call_is_one_job(jobs: Any, tmp_path: Path) -> None:
    with ClusterPool(LOCAL, tmp_path / "work") as pool:
        first, second = (pool.submit(jobs.times, str(tmp_path / "count")) for _ in range(2))
        assert (first.result(60), second.result(60)) == (1, 1)


def test_a_job_of_an_earlier_process_is_awaited_and_not_repeated(
    slurm: Path, jobs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlurmScheduler, "interval", 0.1)
    path, reports = tmp_path / "pid", []
    earlier = ClusterPool(SLURM, tmp_path / "work")
    earlier.submit(jobs.wait, str(path), 1.5)
    until(lambda: path.exists() and path.read_text())
    earlier._closed.set()  # as if its process had been killed
    pid = path.read_text()
    with ClusterPool(SLURM, tmp_path / "work", report=reports.append) as pool:
        assert pool.submit(jobs.wait, str(path), 1.5).result(60) == "waited"
    assert path.read_text() == pid
    assert "of an earlier command" in reports[0]


def test_a_job_submitted_twice_runs_once(jobs: Any, tmp_path: Path) -> None:
    """As after a kill of the submitting process, whose local jobs run on."""
    path = tmp_path / "pid"
    earlier = ClusterPool(LOCAL, tmp_path / "work")
    earlier.submit(jobs.wait, str(path), 2)
    until(lambda: path.exists() and path.read_text())
    earlier._closed.set()  # as if its process had been killed
    pid = path.read_text()
    with ClusterPool(LOCAL, tmp_path / "work") as pool:
        assert pool.submit(jobs.wait, str(path), 2).result(60) == "waited"
    assert path.read_text() == pid
    earlier.scheduler.close()


def test_a_killed_controller_takes_its_job_along(jobs: Any, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    with ClusterPool(LOCAL, tmp_path / "work") as pool:
        pool.submit(jobs.wait, str(path), 600)
        until(lambda: path.exists() and path.read_text())
        (job,) = pool._jobs.values()
        os.kill(int(job.submissions[0]), signal.SIGKILL)
        pid = path.read_text()
        until(lambda: not Path("/proc", pid).exists())


def test_a_node_with_other_code_refuses_the_job(jobs: Any, tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "job")
    _, record = call("cluster_jobs_of_a_test:add", (1, 2), {})
    folder.write(record | {"code": "other", "emits": False, "environment": {}})
    from regard.cluster.job import run

    assert run(folder) == 0
    assert "has other code of regard" in (folder.read_result() or {})["error"]


def test_a_folder_that_nodes_do_not_share_is_named(
    slurm: Path, jobs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"interval": 0.05, "grace": 0.0, "spacing": 0.0}.items():
        monkeypatch.setattr(SlurmScheduler, name, value)
    # The node has another folder in this place, and so no job.
    monkeypatch.setattr(ClusterPool, "command", (*module.python("regard.cluster.job"), "/nowhere"))
    with ClusterPool(SLURM, tmp_path / "work") as pool, pytest.raises(JobError) as error:
        pool.submit(jobs.add, 1, 2).result(60)
    assert "before it started on its node (FAILED: " in str(error.value)
    assert "all nodes share" in str(error.value)


def test_a_job_that_cannot_be_submitted_again_fails(
    slurm: Path, jobs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"interval": 0.05, "grace": 0.0, "spacing": 0.0}.items():
        monkeypatch.setattr(SlurmScheduler, name, value)
    refusal = "#!/bin/sh\necho 'sbatch: error: too many jobs' >&2\nexit 1\n"
    with ClusterPool(SLURM, tmp_path / "work", label=lambda *_: "the job") as pool:
        path = tmp_path / "pid"
        future = pool.submit(jobs.wait, str(path), 600)
        until(lambda: path.exists() and path.read_text())
        (tmp_path / "bin" / "sbatch").write_text(refusal)
        os.kill(int(path.read_text()), signal.SIGKILL)
        with pytest.raises(JobError, match=r"^the job: sbatch refused the job: sbatch: error: too many jobs; change"):
            future.result(60)
        with pytest.raises(DataError, match="too many jobs"):
            pool.submit(jobs.add, 1, 2)
        assert len([path for path in (tmp_path / "work").iterdir() if path.name != "logs"]) == 1, "the first job"


def test_the_options_reach_sbatch(slurm: Path, jobs: Any, tmp_path: Path) -> None:
    with ClusterPool(SLURM, tmp_path / "work") as pool:
        pool.submit(jobs.add, 1, 2)
        text = next((tmp_path / "work" / "logs").glob("*.sh")).read_text()
    flags = json.loads((slurm / "flags").read_text())
    assert {"partition": "gpu", "time": "10", "mem": "2GB", "job-name": "regard"}.items() <= flags.items()
    assert flags["signal"] == "USR2@90"
    assert "\ntrue\ntrue\n" in text


def test_a_job_that_was_requeued_has_its_grace_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalScheduler, "grace", 30.0)
    with ClusterPool(LOCAL, tmp_path / "work") as pool:
        monkeypatch.setattr(pool, "_again", lambda _: pytest.fail("submitted again"))
        job = module._Submitted(JobFolder(tmp_path / "job"), "a job", Future(), [])
        job.gone = time.monotonic() - 60  # it was missing for a moment, a minute ago
        assert not pool._look(job, alive=True)
        assert not pool._look(job, alive=False)


def test_events_are_read_once_and_half_a_line_is_left(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    assert folder.events_after(0) == ([], 0)
    folder.append({"event": 1})
    folder.events.write_text(folder.events.read_text() + '{"event": 2}\nnonsense\n{"ev')
    events, offset = folder.events_after(0)
    assert events == [{"event": 1}, {"event": 2}]
    with open(folder.events, "a") as file:
        file.write('ent": 3}\n')
    assert folder.events_after(offset)[0] == [{"event": 3}]


def test_the_identifier_depends_on_the_arguments_and_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.cluster import job

    first = call("a:b", (1,), {})[0]
    assert first == call("a:b", (1,), {})[0]
    assert first != call("a:b", (2,), {})[0]
    monkeypatch.setattr(job, "code", lambda: "other")
    assert first != call("a:b", (1,), {})[0]
