"""Training in several processes: the same losses as in one, checkpoints for any number of processes, and lost ranks."""

import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.data.batching import Buckets, Packing, Windows
from regard.data.loader import BatchLoader, Examples, Place, Prefetch
from regard.data.objectives import Translation
from regard.errors import DataError, SpecError
from regard.models.base import Model
from regard.models.build import build
from regard.presets import preset
from regard.runs.shared_steps import divided
from regard.training.background_saving import BackgroundSaver
from regard.training.checkpoint import RunFolder
from regard.training.executor import batch_seed
from regard.training.optim import Adafactor, AdamW, Muon
from regard.training.parallel import group as groups
from regard.training.parallel import launch
from regard.training.parallel.gradients import Replicated, check_batches, check_sharding
from regard.training.parallel.group import ALONE, Group, joined
from regard.training.parallel.joining import RankError
from regard.training.parallel.sharded_checkpoint import gathered
from regard.training.schedule import Constant
from regard.training.spec import TrainSpec
from regard.training.tensor_files import read_tensors
from regard.training.trainer import Trainer
from tests.ranks import Ranks
from tests.unit.training.test_trainer import SIZES, Recorder, Toy, held_out_loss, pairs

STEPS, HALF = 50, 30
SPEC = TrainSpec(
    steps=STEPS, optimizer=AdamW(3e-3), schedule=Constant(), accumulate=4, log_every=1, validate_every=25, ema=0.9
)
Losses = list[float]


def transformer(dtype: torch.dtype, **changes: Any) -> Model:
    small = SIZES | {"encoder.depth": 1, "decoder.depth": 1, "dropout": 0.2} | changes
    return build(preset("transformer_small", **small), seed=1).to(dtype)


def loader() -> BatchLoader:
    return BatchLoader(Examples([pairs(30)], [1.0], Translation()), Buckets(24), seed=5)


def train(
    path: Path, spec: TrainSpec, group: Group, dtype: torch.dtype = torch.float64, stop: int = 0, **changes: Any
) -> Losses:
    """Return the losses of every step and of the validations. Training continues from a checkpoint, if there is one."""
    path.mkdir(parents=True, exist_ok=True)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # for the weights of labels
    try:
        recorder = Recorder()
        model = transformer(dtype, **changes)
        trainer = Trainer(model, spec, loader(), RunFolder(path), held_out_loss, [recorder], group=group)
        trainer.resume()
        trainer.fit(lambda: "asked to" if trainer.progress.step == stop else None)
    finally:
        torch.set_default_dtype(before)
    return [event["loss"] for event in recorder.events if event["event"] in ("step", "valid")]


def difference(actual: Losses, expected: Losses) -> float:
    """Return the largest relative difference."""
    assert len(actual) == len(expected) > 0
    return max(abs(a - b) / abs(b) for a, b in zip(actual, expected, strict=True))


def tasks(folder: str, several: Sequence[tuple[str, dict[str, Any], str, int]]) -> list[Losses]:
    """Train several times with the ranks of one group: (name, settings, dtype, step to stop at)."""
    with joined("cpu") as group:
        return [
            train(Path(folder) / name, replace(SPEC, **settings), group, getattr(torch, dtype), stop)
            for name, settings, dtype, stop in several
        ]


REPLICATE, SHARD = {"parallel": "replicate"}, {"parallel": "shard"}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Losses]:
    """The losses of one process."""
    folder = tmp_path_factory.mktemp("one")
    return {name: train(folder / name, SPEC, ALONE, getattr(torch, name)) for name in ("float64", "float32")}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Losses]]:
    """The losses of two processes, and the folders of their checkpoints of step `HALF`."""
    folder = tmp_path_factory.mktemp("two")
    several = [
        ("replicated", REPLICATE, "float64", HALF),
        ("sharded", SHARD, "float64", HALF),
        ("replicated 32", REPLICATE, "float32", 0),
        ("sharded 32", SHARD, "float32", 0),
    ]
    first, second = Ranks(folder, 2, tasks, str(folder), several).results()
    assert first == second  # the log of every rank has the losses of all of them
    return folder, dict(zip([name for name, *_ in several], first, strict=True))


@pytest.fixture(scope="module")
def four(two: tuple[Path, dict[str, Losses]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Losses]:
    """The losses of four processes, from the beginning and from the checkpoints of two."""
    folder = tmp_path_factory.mktemp("four")
    several = [("new", REPLICATE, "float64", 0), ("new 32", SHARD, "float32", 0)]
    for name, settings in (("replicated", SHARD), ("sharded", REPLICATE)):
        shutil.copytree(two[0] / name, folder / name)
        several.append((name, settings, "float64", 0))
    losses, *others = Ranks(folder, 4, tasks, str(folder), several).results()
    assert others == [losses] * 3
    return dict(zip([name for name, *_ in several], losses, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replicated", "sharded"])
def test_two_ranks_have_the_losses_of_one(
    one: dict[str, Losses], two: tuple[Path, dict[str, Losses]], name: str
) -> None:
    """With dropout, a moving average and validations."""
    assert difference(two[1][name], one["float64"][: HALF + 1]) < 1e-12
    assert difference(two[1][f"{name} 32"], one["float32"]) < 1e-5


@pytest.mark.slow
def test_four_ranks_have_the_losses_of_one(one: dict[str, Losses], four: dict[str, Losses]) -> None:
    assert difference(four["new"], one["float64"]) < 1e-12
    assert difference(four["new 32"], one["float32"]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replicated", "sharded"])
def test_a_checkpoint_of_two_ranks_continues_on_one_and_on_four(
    one: dict[str, Losses], two: tuple[Path, dict[str, Losses]], four: dict[str, Losses], name: str, tmp_path: Path
) -> None:
    """On four ranks the weights of the replicated run are sharded, and the reverse."""
    expected = one["float64"][HALF + 1 :]
    shutil.copytree(two[0] / name, tmp_path / "run")
    assert difference(train(tmp_path / "run", SPEC, ALONE), expected) < 1e-12
    assert difference(four[name], expected) < 1e-12


@pytest.mark.slow
def test_a_sharded_checkpoint_is_an_ordinary_one(two: tuple[Path, dict[str, Losses]]) -> None:
    """Two ranks have written whole tensors; the step of Adam has survived; no files of single ranks are left."""
    whole, sharded = ({n: read_tensors(f) for n, f in files(two[0] / name)} for name in ("replicated", "sharded"))
    assert whole.keys() == sharded.keys()
    assert {f"weights-{HALF:08d}.safetensors", f"trainer-{HALF:08d}.safetensors"} <= whole.keys()
    for name, tensors in whole.items():
        assert tensors.keys() == sharded[name].keys()
        for key, tensor in tensors.items():
            torch.testing.assert_close(sharded[name][key], tensor, rtol=1e-9, atol=1e-8)  # key biases are noise
    trainer = sharded[f"trainer-{HALF:08d}.safetensors"]
    assert trainer["optimizer.adamw.0.step"] == HALF
    assert not [path for path in (two[0] / "sharded").iterdir() if path.is_dir()]


def files(folder: Path) -> Iterator[tuple[str, Path]]:
    yield from ((path.name, path) for path in sorted(folder.glob("*.safetensors")))


class Odd(Toy):
    """A model with a weight that no label depends on, and whose ranks measure different validation losses."""

    def __init__(self) -> None:
        super().__init__(0.2, 1)
        self.unused = torch.nn.Parameter(torch.ones(3))


def uneven(folder: str) -> dict[str, Any]:
    """Train with three batches per step and a time budget. Rank 1 would stop earlier, and measures other losses."""
    with joined("cpu") as group:
        recorder = Recorder()
        spec = replace(SPEC, steps=8, accumulate=3, validate_every=2, time=1000.0, patience=3, ema=0.0)
        rank = group.rank

        def measure(_: Model) -> dict[str, float]:
            assert group.leads
            return {"loss": 1.0}

        trainer = Trainer(Odd(), spec, loader(), RunFolder(folder), measure, [recorder], group=group)
        trainer.budget.steps = lambda step, planned: min(planned, 8 if rank == 0 else 5)
        trainer.budget.due = lambda: rank == 0 and trainer.progress.step % 4 == 0
        outcome = trainer.fit(lambda: "rank 1 was interrupted" if rank == 1 and trainer.progress.step == 6 else None)
        return {
            "losses": [event["loss"] for event in recorder.events if event["event"] == "step"],
            "padding": [event["padding"] for event in recorder.events if event["event"] == "step"],
            "scores": {str(step): metrics for step, metrics in trainer.progress.scores.items()},
            "outcome": [outcome.finished, outcome.why, outcome.step],
            "unused": isinstance(trainer.gradients, Replicated) and trainer.gradients.unused,
        }


def test_rank_0_decides_and_ranks_may_have_different_numbers_of_batches(tmp_path: Path) -> None:
    """Also if some weights receive no gradient. A reason to stop on any rank stops all of them."""
    first, second = Ranks(tmp_path / "two", 2, uneven, str(tmp_path / "two")).results()
    assert first == second
    assert first["outcome"] == [False, "rank 1 was interrupted", 6]
    assert first["scores"] == {"4": {"loss": 1.0}}
    assert first["unused"]
    torch.set_default_dtype(torch.float32)  # as in the other processes; a fixture restores it
    recorder = Recorder()
    spec = replace(SPEC, steps=6, accumulate=3, validate_every=6, ema=0.0)
    Trainer(Odd(), spec, loader(), RunFolder(tmp_path), None, [recorder]).fit()
    alone = [event for event in recorder.events if event["event"] == "step"]
    assert difference(first["losses"], [event["loss"] for event in alone]) < 1e-5
    assert first["padding"] == pytest.approx([event["padding"] for event in alone])


def exchange() -> dict[str, Any]:
    with joined("cpu") as group:
        called: list[int] = []
        return {
            "sums": group.sums([1, 0.5 * group.rank]),
            "first": group.first([group.rank + 7.0]),
            "alone": group.alone(lambda: called.append(1) or {"a": [1, None, math.pi]}),
            "called": called,
            "reasons": [group.reason(why) for why in (None, f"of rank {group.rank}", "of 1" if group.rank else None)],
        }


def test_ranks_exchange_values(tmp_path: Path) -> None:
    results = Ranks(tmp_path, 2, exchange).results()
    for rank, result in enumerate(results):
        assert result["sums"] == [2.0, 0.5]
        assert result["first"] == [7.0]
        assert result["alone"] == {"a": [1, None, math.pi]}
        assert result["called"] == ([1] if rank == 0 else [])
        assert result["reasons"] == [None, "of rank 0", "of 1"]


def test_a_process_that_trains_alone_exchanges_nothing() -> None:
    assert ALONE.leads
    assert ALONE.sums([1, 2]) == ALONE.first([1, 2]) == [1.0, 2.0]
    assert ALONE.alone(lambda: "value") == "value"
    assert ALONE.reason(None) is None
    with joined("mps") as group:
        assert group is ALONE


def fails(rank: int, alone: bool) -> None:
    """Raise a DataError on one rank, while the other waits for a value or for a sum."""
    with joined("cpu") as group:

        def raise_error() -> None:
            raise DataError(f"rank {rank} finds no text")

        try:
            if alone:
                group.alone(raise_error)
            elif group.rank == rank:
                raise_error()
            group.sums([1.0])
        except DataError as error:
            print_error(error)
            raise
        except Exception as error:
            print_error(groups_failure(group, error))
            raise


def print_error(error: BaseException) -> None:
    os.write(2, f"{type(error).__name__}: {error}\n".encode())


def groups_failure(group: Group, error: BaseException) -> BaseException:
    assert isinstance(group, groups.ProcessGroup)
    return group.failure(error)


@pytest.mark.parametrize(("rank", "alone"), [(0, True), (0, False), (1, False)])
def test_an_error_of_one_rank_stops_the_others(tmp_path: Path, rank: int, alone: bool) -> None:
    """They do not report the error again."""
    ranks = Ranks(tmp_path, 2, fails, rank, alone, timeout=50.0)
    began = time.monotonic()
    assert ranks.codes() == {0: 1, 1: 1}
    assert time.monotonic() - began < 40.0
    assert f"DataError: rank {rank} finds no text" in ranks.errors(rank)
    assert f"OtherRankError: rank {1 - rank} stops, because another rank has failed" in ranks.errors(1 - rank)


def waits(alone: bool) -> None:
    with joined("cpu") as group:
        group.sums([1.0])
        os.write(2, b"ready\n")
        try:
            if alone:
                group.alone(lambda: time.sleep(1000))
            while True:
                group.sums([1.0])
                time.sleep(0.01)
        except Exception as error:
            print_error(groups_failure(group, error))
            raise


@pytest.mark.parametrize(("killed", "alone"), [(0, True), (0, False), (1, False)])
def test_a_rank_that_dies_is_reported_within_the_timeout(tmp_path: Path, killed: int, alone: bool) -> None:
    """Also if the others wait for a value of rank 0."""
    ranks = Ranks(tmp_path, 2, waits, alone, timeout=5.0)
    while "ready" not in ranks.errors(0) or "ready" not in ranks.errors(1):
        assert ranks.running()
        time.sleep(0.01)
    ranks.kill(killed)
    codes = ranks.codes()
    assert codes == {killed: -signal.SIGKILL, 1 - killed: 1}
    assert f"RankError: rank {1 - killed} of 2" in ranks.errors(1 - killed)
    assert "regard resume" in ranks.errors(1 - killed)


def join_only(size: str | None = None) -> None:
    if size is not None and os.environ["RANK"] == "1":
        os.environ["WORLD_SIZE"] = size
    try:
        with joined("cpu"):
            pass
    except RankError as error:
        print_error(error)
        raise


@pytest.mark.parametrize("present", [0, 1])
def test_a_missing_rank_is_named(tmp_path: Path, present: int) -> None:
    ranks = Ranks(tmp_path, 2, join_only, present=[present], timeout=1.0)
    assert ranks.codes() == {present: 1}
    expected = "but rank 1 did not start; start exactly 2 processes" if present == 0 else "check that rank 0 runs"
    assert expected in ranks.errors(present)


def test_different_numbers_of_processes_are_named(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, join_only, "3", timeout=30.0)
    assert ranks.codes() == {0: 1, 1: 1}
    for rank, here, there in ((0, 2, 3), (1, 3, 2)):
        assert f"WORLD_SIZE is {here} on rank {rank} but {there} on rank {1 - rank}" in ranks.errors(rank)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"RANK": "2"}, "RANK is 2, but WORLD_SIZE is 2"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', not a number"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is ''"),
        ({"REGARD_RANK_TIMEOUT": "soon"}, "REGARD_RANK_TIMEOUT: 'soon' is not a number of seconds"),
    ],
)
def test_a_wrong_environment_is_refused(
    environment: dict[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (usual | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises((RankError, SpecError), match=sentence), joined("cpu"):
        pass


def test_devices_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RankError, match="rank 0 is process 2 of its machine, which has 1 GPU;"), joined("cuda"):
        pass
    with pytest.raises(SpecError, match="several processes train on cpu or cuda, not on mps"), joined("mps"):
        pass


class Pair(Group):
    """A group of two, without a connection."""

    size = 2
    device = torch.device("cpu")


@pytest.mark.parametrize(("accumulate", "sharded"), [(1, False), (1, True), (3, True)])
def test_a_step_with_too_few_batches_is_refused(accumulate: int, sharded: bool) -> None:
    with pytest.raises(SpecError, match=r"train.accumulate: .* which 2 processes cannot share; .*accumulate=2"):
        check_batches(accumulate, Pair(), sharded)
    check_batches(2, Pair(), sharded)
    check_batches(3, Pair(), False)


@pytest.mark.parametrize("optimizer", [Muon(1e-3), Adafactor(1e-3)])
def test_optimizers_of_whole_matrices_are_not_sharded(optimizer: Any) -> None:
    with pytest.raises(SpecError, match="shard trains with adamw"):
        check_sharding(replace(SPEC, optimizer=optimizer), torch.device("cpu"))
    check_sharding(SPEC, torch.device("cpu"))
    with pytest.raises(SpecError, match="shard trains in bfloat16 or float32"):
        check_sharding(replace(SPEC, precision="float16"), torch.device("cuda"))
    with pytest.raises(SpecError, match="compile"):
        TrainSpec(parallel="shard", compile=True)


def test_random_numbers_of_batches() -> None:
    """The first batch has the seed of the step, so runs with one batch per step have the numbers of older versions."""
    assert batch_seed(17, 0) == 17
    assert len({batch_seed(seed, number) for seed in (1, 2, 2**62) for number in range(50)}) == 150


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_divide_the_batches_of_a_step(size: int) -> None:
    """Every batch belongs to one rank, which does not load the others, also across the end of an epoch."""
    whole = [item for item, _ in taken(Prefetch(loader(), Place()), 40)]
    assert all(item is not None for item in whole)
    loaded = [
        taken(Prefetch(loader(), Place(), own=lambda n, rank=rank: n % 6 % size == rank), 40) for rank in range(size)
    ]
    for number, (expected, items) in enumerate(zip(whole, zip(*loaded, strict=True), strict=True)):
        assert len({place for _, place in items}) == 1
        (item,) = [item for item, _ in items if item is not None]
        assert items[number % 6 % size][0] is item
        assert expected is not None
        assert torch.equal(item.batch.target, expected.batch.target)


def taken(prefetch: Prefetch, count: int) -> list[Any]:
    try:
        return [prefetch.next() for _ in range(count)]
    finally:
        prefetch.close()


def test_batches_are_divided_into_equal_parts() -> None:
    assert divided(Buckets(400), 2, 50) == Buckets(200)
    assert divided(Buckets(401), 4, 50) == Buckets(101)
    assert divided(Buckets(400), 4, 150) == Buckets(150)  # the longest example must fit
    assert divided(Packing(8192, 512), 4, 300) == Packing(2048, 512)
    assert divided(Packing(1536, 512), 2, 300) == Packing(1024, 512)  # rounded up to whole rows
    assert divided(Windows(512, 256), 8, 1) == Windows(256, 256)


def test_exit_codes_of_processes() -> None:
    assert launch._exit_code({0: 2, 1: -signal.SIGTERM}) == 2
    assert launch._exit_code({1: 130, 0: 130}) == 130
    assert launch._exit_code({0: -signal.SIGTERM}) == 2
    with pytest.raises(RankError, match="rank 1 was killed by signal 9"):
        launch._exit_code({0: 2, 1: -signal.SIGKILL})


def test_a_launch_passes_on_the_signal_of_slurm_but_no_signal_that_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        "torch.distributed.launcher.api.elastic_launch", lambda config, _: given.append(config) or (lambda *_: None)
    )
    monkeypatch.setenv(launch.THREADS, "1")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    try:
        assert launch.launch(["train"], 2) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert given[0].signals_to_handle.split(",") == ["SIGTERM", "SIGINT", "SIGQUIT", "SIGUSR1"]


@pytest.mark.parametrize(
    ("gpus", "ranks", "device", "sentence"),
    [
        (2, 2, "auto", "--ranks: trains on the CPU, and --gpus on GPUs"),
        (None, 2, "cuda", "--ranks: trains on the CPU, not on cuda"),
        (2, None, "cpu", "--gpus: trains on GPUs, not on cpu"),
        (2, None, "auto", "--gpus: this machine has 1 GPU; use at most 1"),
    ],
)
def test_impossible_launches_are_refused(
    gpus: int | None, ranks: int | None, device: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SpecError, match=sentence):
        launch.check_launch(gpus, ranks, device)
    launch.check_launch(1, None, "auto")
    launch.check_launch(None, 8, "auto")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SpecError, match="torchrun has already started"):
        launch.check_launch(None, 8, "auto")


def test_whole_tensors_need_no_files(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3), "b": torch.tensor(1.0)}
    with gathered(tensors, tmp_path, ALONE) as whole:
        assert whole == tensors
    assert list(tmp_path.iterdir()) == []


class Waiting(Group):
    """A group that records whether rank 0 is inside `alone`, where it gives signs of life."""

    inside = False

    def alone(self, function: Callable[[], Any]) -> Any:
        self.inside = True
        try:
            return function()
        finally:
            self.inside = False


@pytest.mark.parametrize("stop", [0, 7])
def test_the_other_ranks_see_signs_of_life_while_rank_0_waits_for_the_disk(
    tmp_path: Path, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, waits = Waiting(), list[bool]()
    trainer = Trainer(Toy(0.0, 1), replace(SPEC, steps=8, save_every=2), loader(), RunFolder(tmp_path), group=group)
    wait, save = BackgroundSaver.wait, RunFolder.save

    def slow(*given: Any) -> None:
        time.sleep(0.2)
        save(*given)

    monkeypatch.setattr(RunFolder, "save", slow)

    def recorded(saver: BackgroundSaver) -> None:
        busy = saver._thread is not None
        waits.extend([group.inside] if busy else [])
        wait(saver)

    monkeypatch.setattr(BackgroundSaver, "wait", recorded)
    trainer.fit(lambda: "asked to" if trainer.progress.step == stop else None)
    assert len(waits) >= 3
    assert all(waits)


def speed(folder: str) -> list[float]:
    """Return the median seconds per step of a plain trainer, and of a trainer in a group of one rank."""
    with joined("cpu") as group:
        trainers = []
        for number, each in enumerate((ALONE, group)):
            spec = replace(SPEC, accumulate=1, steps=1000, log_every=1000, ema=0.0)
            model = transformer(torch.float32, d_model=64, vocab=500)
            batches = BatchLoader(Examples([pairs(400)], [1.0], Translation()), Buckets(1000), seed=5)
            trainer = Trainer(model, spec, batches, RunFolder(f"{folder}/{number}"), group=each)
            trainer.prefetch = trainer.batches()
            trainers.append(trainer)
        seconds: list[list[float]] = [[], []]
        for step in range(40):
            for number in (0, 1) if step % 2 else (1, 0):
                began = time.thread_time()
                trainers[number].step()
                seconds[number].append(time.thread_time() - began)
        for trainer in trainers:
            assert trainer.prefetch is not None
            trainer.prefetch.close()
        return [sorted(each[10:])[15] for each in seconds]


def test_a_group_of_one_rank_costs_little(tmp_path: Path) -> None:
    """For a small model; docs/scale.md has the measured cost, which is below 2 %."""
    ((plain, grouped),) = Ranks(tmp_path, 1, speed, str(tmp_path)).results()
    assert grouped < 1.25 * plain
