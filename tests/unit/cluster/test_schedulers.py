"""Settings of a cluster: errors in one sentence, and the parameters of sbatch."""

from pathlib import Path

import pytest

from regard.cluster import schedulers
from regard.cluster.schedulers import Cluster, SlurmScheduler, cluster_from_options
from regard.errors import DataError, SpecError

pytest.importorskip("submitit")


def refused(cluster: str | None = "slurm", **options: object) -> str:
    with pytest.raises(SpecError) as error:
        cluster_from_options(cluster, **options)  # type: ignore[arg-type]
    return str(error.value)


def test_no_cluster() -> None:
    assert cluster_from_options() is None
    assert "--partition: applies to --cluster slurm" in refused(None, partition="gpu")
    assert "--cluster-option: applies to --cluster slurm" in refused(None, cluster_options=["time=1"])


def test_the_local_executor_takes_no_options() -> None:
    assert cluster_from_options("local") == Cluster("local")
    assert "leave it out" in refused("local", partition="gpu")
    assert "leave it out" in refused("local", cluster_options="time=1")


def test_unknown_clusters_and_options(slurm: Path) -> None:
    assert "did you mean 'slurm'" in refused("slrum")
    assert "did you mean 'time'" in refused(cluster_options="tim=1")
    assert "has no value; write KEY=VALUE" in refused(cluster_options="time")
    assert "use --partition" in refused(cluster_options="partition=gpu")
    assert "unknown key 'nodes'" in refused(cluster_options="nodes=2")
    assert "unknown partition 'gpus'; did you mean 'gpu'?" in refused(partition="gpus")


def test_missing_programs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "sbatch, srun, squeue, scancel are not on the PATH" in refused()
    monkeypatch.setattr(schedulers, "find_spec", lambda _: None)
    assert "pip install 'regard[cluster]'" in refused("local")


def test_options_become_parameters_of_sbatch() -> None:
    cluster = Cluster("slurm", "gpu", ("--cpus-per-task=4", "gres=gpu:1", "setup=module load a", "setup=true"))
    parameters = cluster.parameters()
    assert parameters["cpus_per_task"] == 4
    assert parameters["gres"] == "gpu:1"
    assert parameters["setup"] == ["module load a", "true"]
    assert parameters["time"] is None, "the limit of the partition"
    assert cluster.has_gpus
    assert not Cluster("slurm", None, ("cpus_per_gpu=1",)).has_gpus


def test_a_refusal_of_sbatch_is_one_sentence(slurm: Path, tmp_path: Path) -> None:
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: QOSMaxSubmitJob' >&2\nexit 1\n")
    scheduler = SlurmScheduler(tmp_path, Cluster("slurm"))
    (tmp_path / "bin" / "sinfo").unlink()
    cluster_from_options("slurm", "unlisted")  # sbatch will refuse it
    with pytest.raises(DataError, match=r"^sbatch refused the job: sbatch: error: QOSMaxSubmitJob; change"):
        scheduler.submit(["true"], "name")


def test_jobs_count_as_alive_if_squeue_fails(slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlurmScheduler, "spacing", 0.0)
    good = (tmp_path / "bin" / "squeue").read_text()
    scheduler = SlurmScheduler(tmp_path, Cluster("slurm"))
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\nexit 1\n")
    assert scheduler.alive(["1", "2"]) == {"1", "2"}
    (tmp_path / "bin" / "squeue").write_text(good)
    assert scheduler.alive(["1", "2"]) == set()


def test_squeue_is_not_called_at_every_look(slurm: Path, tmp_path: Path) -> None:
    scheduler = SlurmScheduler(tmp_path, Cluster("slurm"))
    assert scheduler.alive(["1"]) == set()
    number = scheduler.submit(["true"], "name")
    assert scheduler.alive(["1", number]) == {number}, "submitted since the last call"
