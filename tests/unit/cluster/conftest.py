"""A module with jobs, and a Slurm in a folder: sbatch, srun, squeue, scancel, sacct and sinfo as small programs."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import regard

JOBS = """
import os, pathlib, signal, time
from regard.processes import StoppedError, stop_requested

def times(path):
    path = pathlib.Path(path)
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    return len(path.read_text())

def add(a, b): return a + b
def variable(name): return os.environ.get(name)
def fail(path): times(path); raise ValueError("no such luck\\nat all")
def count(n, emit): return [emit({"step": i}) for i in range(n)]

def die_until(path, enough):
    number = times(path)
    if number < enough:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return number

def wait(path, seconds):
    pathlib.Path(path).write_text(str(os.getpid()))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if stop_requested() and not pathlib.Path(path + ".stopped").exists():
            pathlib.Path(path + ".stopped").touch()
            raise StoppedError(stop_requested())
        if stop_requested() or pathlib.Path(path + ".stopped").exists(): return "continued"
        time.sleep(0.02)
    return "waited"
"""

# The state of a job is a file with its process id, in the folder `jobs`.
SLURM = {
    "sbatch": """
path = pathlib.Path(sys.argv[1]).read_text()
flags = dict(re.findall(r"^#SBATCH --([\\w-]+)=(.*)$", path, re.M))
if flags.get("partition", "cpu") not in ("cpu", "gpu"):
    sys.exit("sbatch: error: invalid partition specified: " + flags["partition"])
number = str(100 + len(list(jobs.iterdir())))
(jobs / number).write_text("")
(jobs.parent / "flags").write_text(json.dumps(flags))
env = {**os.environ, "SLURM_JOB_ID": number}
log = pathlib.Path(flags["output"].replace("%j", number))
if not log.parent.exists(): sys.exit(0)
process = subprocess.Popen(["bash", sys.argv[1]], env=env, start_new_session=True, stdin=subprocess.DEVNULL,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
(jobs / number).write_text(str(process.pid))
print("Submitted batch job", number)
""",
    "srun": """
words = sys.argv[1:]
files = {}
while words[0].startswith("--"):
    name = words.pop(0)
    if name in ("--output", "--error"):
        files[name] = open(words.pop(0).replace("%j", os.environ["SLURM_JOB_ID"]).replace("%t", "0"), "a")
sys.exit(subprocess.run(words, stdout=files["--output"], stderr=files["--error"]).returncode)
""",
    "squeue": """
for path in jobs.iterdir():
    if alive(path): print(path.name)
""",
    "scancel": """
for number in sys.argv[1:]:
    if alive(jobs / number): os.killpg(int((jobs / number).read_text()), signal.SIGKILL)
""",
    "sacct": "print('FAILED')",
    "sinfo": "print('cpu\\ngpu')",
}
HEAD = """#!{python}
import json, os, pathlib, re, signal, subprocess, sys
jobs = pathlib.Path({jobs!r})
def alive(path):
    try:
        return "State:\\tZ" not in pathlib.Path("/proc", path.read_text(), "status").read_text()
    except OSError:
        return False
"""


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "cluster_jobs_of_a_test.py").write_text(JOBS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(Path(regard.__path__[0]).parent))))
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("cluster_jobs_of_a_test", None)
    return importlib.import_module("cluster_jobs_of_a_test")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the programs; `flags` beside the jobs has the options of the last submission."""
    pytest.importorskip("submitit")
    (tmp_path / "slurm" / "jobs").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    for name, text in SLURM.items():
        program = tmp_path / "bin" / name
        program.write_text(HEAD.format(python=sys.executable, jobs=str(tmp_path / "slurm" / "jobs")) + text)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("USER", "somebody")
    return tmp_path / "slurm"
