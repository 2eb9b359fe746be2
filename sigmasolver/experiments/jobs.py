"""Commands of this package as jobs of a Slurm cluster or of this machine, through submitit.

A job is one command line that continues where it stopped, such as a row of a suite, so a job that is started again
needs nothing but the same words. It is started again when it reaches its time limit and when Slurm preempts it; before
that its command gets SIGTERM, saves its state and leaves. Submitit pickles the class `Command` by its name, with those
words; nothing else is pickled, and its results are never read. The process of a job only starts its command and
passes signals on, so importing this file does not load torch.

    FOLDER/NAME/job.json        where the newest job of this name was submitted, and its number there
    FOLDER/NAME/*_log.out       what each job printed; the other files are submitit's
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Command", "Job", "Jobs", "Work", "slurm_options", "supervise"]

STARTS = 100
"""How often one job may reach its time limit; a command that makes no progress must end at some time."""
MINUTES = 240
"""Time limit of a Slurm job where none is given."""
LEAST_MINUTES = 5
"""The warning that stops a command comes 90 seconds ahead of the time limit, and up to a minute earlier."""
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
"""States of a Slurm job that will not run again."""

RESERVED = {
    "array", "dependency", "error", "job-name", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "signal",
}  # fmt: skip


class Command:
    """What runs inside a job: a command of this package, in one process or, through torchrun, in several."""

    def __init__(self, words: Sequence[str], processes: int = 1, nodes: int = 1) -> None:
        self.words, self.processes, self.nodes = list(words), processes, nodes
        self.gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.child = 0

    def __call__(self) -> None:
        """Run to the end; a command that fails ends the job with its exit code."""
        child = subprocess.Popen(self._line(), env=self._environment(), preexec_fn=_ignore_warning)
        self.child = child.pid
        told: list[int] = []

        def terminated(number: int, _: object) -> None:
            told.append(number)
            if not _on_slurm():  # which sends it to every process of a job
                os.kill(child.pid, signal.SIGTERM)

        signal.signal(signal.SIGTERM, terminated)
        _wait(child.pid)
        code = child.wait()
        if told and _on_slurm():
            # Preempted or cancelled: Slurm ends the job and decides whether it is requeued. One that ends by itself
            # now counts as failed and is not.
            while True:
                time.sleep(60)
        if code:
            sys.exit(code if code > 0 else 128 - code)

    def checkpoint(self) -> Any:
        """Called by submitit ahead of the time limit: stop the command, then start it again in a new job."""
        from submitit.helpers import DelayedSubmission

        if self.child:
            with suppress(ProcessLookupError, ChildProcessError):  # it has ended in this moment
                os.kill(self.child, signal.SIGTERM)
                _wait(self.child)
            self.child = 0
        return DelayedSubmission(self)

    def _line(self) -> list[str]:
        python, module = [sys.executable, "-m"], ["-m", "sigmasolver", *self.words]
        if self.processes == self.nodes == 1:
            return [*python, *module[1:]]
        meeting = ["--standalone"]
        if self.nodes > 1:
            import submitit

            job = submitit.JobEnvironment()
            port = 20000 + int(job.raw_job_id) % 20000
            meeting = [
                f"--nnodes={self.nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={job.hostnames[0]}:{port}",
                f"--rdzv-id={job.raw_job_id}",
            ]  # fmt: skip
        return [*python, "torch.distributed.run", *meeting, f"--nproc-per-node={self.processes}", *module]

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        if not _on_slurm():  # submitit hides all GPUs from a local job that did not ask for some
            environment.pop("CUDA_VISIBLE_DEVICES", None)
            environment |= {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": self.gpus}
        return environment


def _on_slurm() -> bool:
    return os.environ.get("SUBMITIT_EXECUTOR") == "slurm"


def _ignore_warning() -> None:
    """Slurm sends the warning ahead of the time limit to every process of a job; here submitit alone acts on it."""
    import submitit

    signal.signal(getattr(signal, f"SIG{submitit.JobEnvironment.USR_SIG}"), signal.SIG_IGN)


def _wait(pid: int) -> None:
    """Until this child has ended. Without a lock, because a signal handler waits for it in the middle of this."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.1)


@dataclass(frozen=True)
class Job:
    """The newest job of a name."""

    on: str
    number: str
    log: Path

    def described(self) -> str:
        return f"{'Slurm' if self.on == 'slurm' else 'local'} job {self.number}, log {self.log}"


@dataclass(frozen=True)
class Jobs:
    """Jobs by name, in one folder that every machine of the cluster can reach."""

    folder: Path
    _local: dict[str, Any] = field(default_factory=dict)
    """Local jobs that this process started, which must also bury them."""

    def find(self, name: str) -> Job | None:
        from sigmasolver.runs.files import read_bytes

        file = self.folder / name / "job.json"
        if not file.exists():
            return None
        try:
            facts = json.loads(read_bytes(file))
            return self._job(name, str(facts["on"]), str(facts["number"]))
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
            raise ValueError(f"{file} is damaged; remove it when no job of that name is running.") from None

    def _job(self, name: str, on: str, number: str) -> Job:
        return Job(on, number, self.folder / name / f"{number}_0_log.out")

    def active(self, names: Iterable[str]) -> dict[str, str]:
        """The jobs that wait or run, with their state: queued or running."""
        found = {name: job for name in names if (job := self.find(name)) is not None}
        states = _slurm_states() if any(job.on == "slurm" for job in found.values()) else {}
        active = {}
        for name, job in found.items():
            if job.on == "slurm":
                if job.number in states:
                    active[name] = "queued" if states[job.number] == "PENDING" else "running"
            elif not self._local[name].done() if name in self._local else _is_local_job(job.number):
                active[name] = "running"
        return active

    def submit(
        self,
        name: str,
        on: str,
        command: Command,
        options: Mapping[str, Any] | None = None,
        after: str | None = None,
    ) -> Job:
        """Submit under this name; `options` are sbatch's, and `after` names a job that must succeed first."""
        from sigmasolver.runs.files import replacing

        submitit = _submitit()
        folder = (self.folder / name).absolute()
        if on == "local":
            executor = submitit.LocalExecutor(folder, max_num_timeout=STARTS)
            executor.update_parameters(timeout_min=60 * 24 * 365, stderr_to_stdout=True)
        else:
            executor = _slurm_executor(submitit, folder, name, command, dict(options or {}), self._number(after))
        try:
            submitted = executor.submit(command)
        except submitit.core.utils.FailedJobError as error:
            raise ValueError(f"Slurm refused the job {name}: {_last_line(str(error))}") from None
        if on == "local":
            self._local[name] = submitted
        with replacing(folder / "job.json") as file:
            file.write(json.dumps({"on": on, "number": submitted.job_id}).encode())
        return self._job(name, on, submitted.job_id)

    def _number(self, name: str | None) -> str | None:
        job = None if name is None else self.find(name)
        return None if job is None else job.number


def _slurm_executor(
    submitit: Any, folder: Path, name: str, command: Command, options: dict[str, Any], after: str | None
) -> Any:
    try:
        executor = submitit.SlurmExecutor(folder, max_num_timeout=STARTS)
    except RuntimeError:
        raise ValueError("Slurm not found on this machine (no srun); submit from a login node.") from None
    minutes = options.pop("time", MINUTES)
    if after is not None:
        options |= {"dependency": f"afterok:{after}", "kill-on-invalid-dep": "yes"}
    executor.update_parameters(
        job_name=name,
        time=minutes,
        nodes=command.nodes,
        ntasks_per_node=1,
        stderr_to_stdout=True,
        additional_parameters={"requeue": True} | options,
    )
    return executor


def slurm_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Options of sbatch by their long names: `partition=gpu`, `time=600` (minutes), `exclusive`."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip().lstrip("-").replace("_", "-")
        if not name or (equals and not value):
            raise ValueError(f'--slurm must be NAME=VALUE, such as partition=gpu, got "{pair}".')
        if name in RESERVED:
            raise ValueError(f"--slurm {name} is set automatically; use --nodes and --processes instead.")
        options[name] = value if equals else True
    if "time" in options:
        if not str(options["time"]).isdecimal() or int(options["time"]) < LEAST_MINUTES:
            raise ValueError(
                f"--slurm time must be the time limit of one job in whole minutes, at least {LEAST_MINUTES}, such as "
                f"time=600, got {options['time']}."
            )
        options["time"] = int(options["time"])
    return options


def _slurm_states() -> dict[str, str]:
    """The jobs of this user that Slurm still has to do with, by number."""
    words = ["squeue", "--me", "--noheader", "--states=all", "--format=%i %T"]
    try:
        told = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout
    except FileNotFoundError:
        raise ValueError(
            "Some of these jobs run on Slurm, but squeue was not found; run this on a login node."
        ) from None
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = _last_line(error.stderr or "") if isinstance(error, subprocess.CalledProcessError) else "nothing"
        raise ValueError(f"Slurm did not list its jobs: squeue reports {said!r}; try again later.") from None
    rows = (line.split() for line in told.splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2 and row[1] not in ENDED}


def _is_local_job(number: str) -> bool:
    """Whether this process is one of submitit's; another one may have got the number since."""
    try:
        return b"submitit.local._local" in Path(f"/proc/{int(number)}/cmdline").read_bytes()
    except (OSError, ValueError):
        return False


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "nothing")


def _submitit() -> Any:
    try:
        import submitit
    except ImportError:
        raise ValueError(
            'Jobs require the package submitit; install it with pip install "sigmasolver[slurm]".'
        ) from None
    return submitit


@dataclass(frozen=True)
class Work:
    """A job to be done, and how to tell that it is."""

    name: str
    command: Command
    finished: Callable[[], bool]
    after: str | None = None
    """The work that must be finished first."""


def supervise(
    works: Sequence[Work],
    jobs: Jobs,
    on: str,
    options: Mapping[str, Any],
    most: int | None,
    say: Callable[[str], None],
    detach: bool = False,
    seconds: float | None = None,
) -> list[str]:
    """Submit what is neither finished nor on its way, and wait; the names of what failed.

    At most `most` jobs wait or run at a time. On Slurm a job is submitted before the work it comes after is finished,
    and Slurm holds it back. With `detach`, return once everything is submitted.
    """
    seconds = seconds or (1.0 if on == "local" else 15.0)
    names = [work.name for work in works]
    ended: dict[str, bool] = {}
    submitted: set[str] = set()
    missing: set[str] = set()
    shown: dict[str, str] = {}
    active = jobs.active(names)
    for work in works:  # what a folder or a store does not allow is said before anything is submitted
        if work.name not in active:
            work.finished()
    while True:
        active = jobs.active(names)
        for work in works:
            name = work.name
            if name in ended:
                continue
            job = jobs.find(name)
            if job is not None and name in active:
                missing.discard(name)
                if shown.get(name) != active[name]:
                    shown[name] = active[name]
                    say(f"{name}: {active[name]}, {job.described()}")
            elif work.finished():
                ended[name] = True
                say(f"{name}: finished")
            elif name in submitted:
                # Files of another machine may show up a little after the end of the job.
                if name in missing or on == "local":
                    ended[name] = False
                    say(f"{name}: failed; {_what_went_wrong(job)}")
                missing.add(name)
            elif ended.get(work.after or "") is False:
                ended[name] = False
                say(f"{name}: not started, because {work.after} failed")
            elif (on == "slurm" or work.after is None or work.after in ended) and (most is None or len(active) < most):
                job = jobs.submit(name, on, work.command, options, None if work.after in ended else work.after)
                submitted.add(name)
                shown[name] = active[name] = "queued" if on == "slurm" else "running"
                say(f"{name}: submitted, {job.described()}")
        if len(ended) == len(works) or detach:
            return [name for name, well in ended.items() if not well]
        time.sleep(seconds)


def _what_went_wrong(job: Job | None) -> str:
    if job is None or not job.log.exists():
        return "no log was written"
    said = [line for line in job.log.read_text(errors="replace").splitlines() if line.startswith("sigmasolver: ")]
    return f"see {job.log}" + (f": {said[-1].removeprefix('sigmasolver: ')}" if said else "")
