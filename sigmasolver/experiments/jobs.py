"""Commands of this package as jobs of a Slurm cluster or of this machine, through submitit.

A job is one resumable command line, such as a row of a suite, so restarting it needs only the same arguments. It is
restarted when it reaches its time limit and when Slurm preempts it; before that its command gets SIGTERM, saves its
state and exits. Submitit pickles the class `Command` by name, with its arguments; nothing else is pickled, and its
results are never read. The process of a job only starts its command and forwards signals, so importing this file does
not load torch.

    FOLDER/NAME/job.json        where the newest job of this name was submitted, and its job id
    FOLDER/NAME/*_log.out       output of each job; the other files are submitit's
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

__all__ = ["Command", "Job", "JobSpec", "Jobs", "slurm_options", "supervise"]

MAX_TIMEOUTS = 100
"""How often one job may reach its time limit; a command that makes no progress must not restart forever."""
DEFAULT_MINUTES = 240
"""Default time limit of a Slurm job."""
MIN_MINUTES = 5
"""The warning signal comes 90 seconds before the time limit, and up to a minute earlier."""
TERMINAL_STATES = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
"""Terminal states of a Slurm job."""

RESERVED_OPTIONS = {
    "array", "dependency", "error", "job-name", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "signal",
}  # fmt: skip


class Command:
    """What runs inside a job: a command of this package, in one process or, through torchrun, in several."""

    def __init__(self, words: Sequence[str], processes: int = 1, nodes: int = 1) -> None:
        self.words, self.processes, self.nodes = list(words), processes, nodes
        self.gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.child = 0

    def __call__(self) -> None:
        """Run the command to completion; if it fails, exit with its code."""
        child = subprocess.Popen(self._command_line(), env=self._environment(), preexec_fn=_ignore_warning)
        self.child = child.pid
        received: list[int] = []

        def terminated(number: int, _: object) -> None:
            received.append(number)
            if not _on_slurm():  # Slurm signals every process of a job itself
                os.kill(child.pid, signal.SIGTERM)

        signal.signal(signal.SIGTERM, terminated)
        _wait_for(child.pid)
        code = child.wait()
        if received and _on_slurm():
            # Preempted or cancelled: wait for Slurm to kill the job and decide whether to requeue it. A job that exits
            # by itself now counts as failed and is not requeued.
            while True:
                time.sleep(60)
        if code:
            sys.exit(code if code > 0 else 128 - code)

    def checkpoint(self) -> Any:
        """Called by submitit before the time limit: stop the command, then restart it in a new job."""
        from submitit.helpers import DelayedSubmission

        if self.child:
            with suppress(ProcessLookupError, ChildProcessError):  # it has just exited
                os.kill(self.child, signal.SIGTERM)
                _wait_for(self.child)
            self.child = 0
        return DelayedSubmission(self)

    def _command_line(self) -> list[str]:
        interpreter, module = [sys.executable, "-m"], ["-m", "sigmasolver", *self.words]
        if self.processes == self.nodes == 1:
            return [*interpreter, *module[1:]]
        rendezvous = ["--standalone"]
        if self.nodes > 1:
            import submitit

            job = submitit.JobEnvironment()
            port = 20000 + int(job.raw_job_id) % 20000
            rendezvous = [
                f"--nnodes={self.nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={job.hostnames[0]}:{port}",
                f"--rdzv-id={job.raw_job_id}",
            ]  # fmt: skip
        return [*interpreter, "torch.distributed.run", *rendezvous, f"--nproc-per-node={self.processes}", *module]

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        if not _on_slurm():  # submitit hides all GPUs from a local job that requests none
            environment.pop("CUDA_VISIBLE_DEVICES", None)
            environment |= {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": self.gpus}
        return environment


def _on_slurm() -> bool:
    return os.environ.get("SUBMITIT_EXECUTOR") == "slurm"


def _ignore_warning() -> None:
    """Ignore the time limit warning, which Slurm sends to every process of a job: only submitit handles it."""
    import submitit

    signal.signal(getattr(signal, f"SIG{submitit.JobEnvironment.USR_SIG}"), signal.SIG_IGN)


def _wait_for(pid: int) -> None:
    """Poll until the child exits. Takes no lock, because a signal handler may call this while it runs."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.1)


@dataclass(frozen=True)
class Job:
    """The newest job of a name."""

    on: str
    number: str
    log: Path

    def describe(self) -> str:
        return f"{'Slurm' if self.on == 'slurm' else 'local'} job {self.number}, log {self.log}"


@dataclass(frozen=True)
class Jobs:
    """Jobs by name, in one folder shared by all machines of the cluster."""

    folder: Path
    _local: dict[str, Any] = field(default_factory=dict)
    """Local jobs started by this process, which must reap them."""

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
        """The state of each unfinished job: queued or running."""
        jobs = {name: job for name in names if (job := self.find(name)) is not None}
        states = _slurm_states() if any(job.on == "slurm" for job in jobs.values()) else {}
        active = {}
        for name, job in jobs.items():
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
        """Submit under this name; `options` are those of sbatch, `after` names a job that must succeed first."""
        from sigmasolver.runs.files import replacing

        submitit = _import_submitit()
        folder = (self.folder / name).absolute()
        if on == "local":
            executor = submitit.LocalExecutor(folder, max_num_timeout=MAX_TIMEOUTS)
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
        executor = submitit.SlurmExecutor(folder, max_num_timeout=MAX_TIMEOUTS)
    except RuntimeError:
        raise ValueError("Slurm not found on this machine (no srun); submit from a login node.") from None
    minutes = options.pop("time", DEFAULT_MINUTES)
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
        if name in RESERVED_OPTIONS:
            raise ValueError(f"--slurm {name} is set automatically; use --nodes and --processes instead.")
        options[name] = value if equals else True
    if "time" in options:
        if not str(options["time"]).isdecimal() or int(options["time"]) < MIN_MINUTES:
            raise ValueError(
                f"--slurm time must be the time limit of one job in whole minutes, at least {MIN_MINUTES}, such as "
                f"time=600, got {options['time']}."
            )
        options["time"] = int(options["time"])
    return options


def _slurm_states() -> dict[str, str]:
    """The states of this user's unfinished Slurm jobs, by job id."""
    command = ["squeue", "--me", "--noheader", "--states=all", "--format=%i %T"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    except FileNotFoundError:
        raise ValueError(
            "Some of these jobs run on Slurm, but squeue was not found; run this on a login node."
        ) from None
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        message = _last_line(error.stderr or "") if isinstance(error, subprocess.CalledProcessError) else "nothing"
        raise ValueError(f"Slurm did not list its jobs: squeue reports {message!r}; try again later.") from None
    rows = (line.split() for line in output.splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2 and row[1] not in TERMINAL_STATES}


def _is_local_job(number: str) -> bool:
    """Whether the process is a submitit job; its pid may have been reused since."""
    try:
        return b"submitit.local._local" in Path(f"/proc/{int(number)}/cmdline").read_bytes()
    except (OSError, ValueError):
        return False


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "nothing")


def _import_submitit() -> Any:
    try:
        import submitit
    except ImportError:
        raise ValueError(
            'Jobs require the package submitit; install it with pip install "sigmasolver[slurm]".'
        ) from None
    return submitit


@dataclass(frozen=True)
class JobSpec:
    """A job to run, and a check whether its work is finished."""

    name: str
    command: Command
    finished: Callable[[], bool]
    after: str | None = None
    """Name of the job that must succeed first."""


def supervise(
    specs: Sequence[JobSpec],
    jobs: Jobs,
    on: str,
    options: Mapping[str, Any],
    max_jobs: int | None,
    report: Callable[[str], None],
    detach: bool = False,
    seconds: float | None = None,
) -> list[str]:
    """Submit the jobs that are neither finished nor active, and wait; return the names of those that failed.

    At most `max_jobs` are queued or running at a time. On Slurm a job is submitted before its dependency has finished,
    and Slurm delays it. With `detach`, return once everything is submitted.
    """
    seconds = seconds or (1.0 if on == "local" else 15.0)
    names = [spec.name for spec in specs]
    ended: dict[str, bool] = {}
    submitted: set[str] = set()
    missing: set[str] = set()
    reported: dict[str, str] = {}
    active = jobs.active(names)
    for spec in specs:  # raise errors of folders and stores before anything is submitted
        if spec.name not in active:
            spec.finished()
    while True:
        active = jobs.active(names)
        for spec in specs:
            name = spec.name
            if name in ended:
                continue
            job = jobs.find(name)
            if job is not None and name in active:
                missing.discard(name)
                if reported.get(name) != active[name]:
                    reported[name] = active[name]
                    report(f"{name}: {active[name]}, {job.describe()}")
            elif spec.finished():
                ended[name] = True
                report(f"{name}: finished")
            elif name in submitted:
                # On a network file system, files may appear shortly after the job has ended.
                if name in missing or on == "local":
                    ended[name] = False
                    report(f"{name}: failed; {_failure_text(job)}")
                missing.add(name)
            elif ended.get(spec.after or "") is False:
                ended[name] = False
                report(f"{name}: not started, because {spec.after} failed")
            elif (on == "slurm" or spec.after is None or spec.after in ended) and (
                max_jobs is None or len(active) < max_jobs
            ):
                job = jobs.submit(name, on, spec.command, options, None if spec.after in ended else spec.after)
                submitted.add(name)
                reported[name] = active[name] = "queued" if on == "slurm" else "running"
                report(f"{name}: submitted, {job.describe()}")
        if len(ended) == len(specs) or detach:
            return [name for name, succeeded in ended.items() if not succeeded]
        time.sleep(seconds)


def _failure_text(job: Job | None) -> str:
    if job is None or not job.log.exists():
        return "no log was written"
    errors = [line for line in job.log.read_text(errors="replace").splitlines() if line.startswith("sigmasolver: ")]
    return f"see {job.log}" + (f": {errors[-1].removeprefix('sigmasolver: ')}" if errors else "")
