"""Runs in several real processes, as a launcher starts them, but forked from a server that has
imported torch.

Each process gets the environment that torchrun would give it, and runs `job(folder, **options)`.
"""

import functools
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import families
import tiny_run
import torch
from tiny_run import PROMPTS, redness

from flowgrpo import GRPOTrainer
from flowgrpo.algorithms.advantages import advantages
from flowgrpo.runs.environment import packages_of_modules

packages_of_modules()  # cached here, so that no process has to read them again
SERVER = multiprocessing.get_context("forkserver")
settings = functools.partial(tiny_run.settings, lr=1e-4)


def trainer(folder, *, family="sd3", dtype="float32", resume=False, reward=redness, **changes):
    pipe = families.built(family, getattr(torch, dtype))
    args = settings(folder, **changes)
    return GRPOTrainer(
        pipe, reward, PROMPTS, ["a fox", "an owl", "a bee"], args=args, resume=resume
    )


class Launched:
    """The processes of one run, with a log each."""

    def __init__(self, job, count, folder, options):
        port = free_port()
        environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": count}
        SERVER.set_forkserver_preload(["together"])
        self.logs = [Path(folder) / f"process-{rank}.log" for rank in range(count)]
        self.processes = [
            SERVER.Process(
                target=_run_job,
                args=(job, {**environment, "RANK": rank, "LOCAL_RANK": rank}, log, folder, options),
            )
            for rank, log in enumerate(self.logs)
        ]
        for process in self.processes:
            process.start()

    def wait(self, seconds=300):
        """Returns the exit codes by rank; after a signal it is minus its number."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0, deadline - time.monotonic()))
        alive = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        for rank in alive:
            self.processes[rank].kill()
        assert not alive, f"processes {alive} are alive after {seconds} s:\n{self.output()}"
        return [process.exitcode for process in self.processes]

    def output(self):
        """Output of all processes."""
        return "\n".join(log.read_text() for log in self.logs if log.exists())

    def send(self, rank, signal_number):
        """Sends a signal to one process."""
        os.kill(self.processes[rank].pid, signal_number)


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def launch(job, count, folder, **options):
    """Starts `count` processes that run the job."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Launched(job, count, str(folder), options)


def run(job, count, folder, **options):
    """Starts `count` processes that run the job, and waits until all have succeeded."""
    launched = launch(job, count, folder, **options)
    codes = launched.wait()
    assert codes == [0] * count, f"{codes}\n{launched.output()}"


def _run_job(job, environment, log, folder, options):
    os.environ.update({name: str(value) for name, value in environment.items()})
    if environment["WORLD_SIZE"] == 1:
        del os.environ["WORLD_SIZE"], os.environ["RANK"]
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        job(Path(folder), **options)
    except Exception as error:
        traceback.print_exc()
        print(f"flowgrpo: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def train(folder, **options):
    """A complete run; each process saves its weights as FOLDER/weights-RANK.safetensors."""
    from safetensors.torch import save_file

    run = trainer(folder / "run", **options)
    run.train()
    rank = run.processes.rank
    run.learner.processes.rank = 0  # else only the main process would have a state
    save_file(run.learner.state_dict(), folder / f"weights-{rank}.safetensors")


def first_epoch(folder, **options):
    """Writes the samples, rewards and advantages of epoch 0 as this process has them."""
    run = trainer(folder / "run", **options)
    own, rewards, _ = run._roll_out(run.plan.groups(0))
    images = {
        index: [image.tobytes().hex() for rollout in group.rollouts for image in rollout.samples]
        for index, group in own.items()
    }
    values = advantages(rewards, {"redness": 1.0}, run.config.train.advantage)
    seen = {
        "images": images,
        "rewards": [group.tolist() for group in rewards["redness"]],
        "advantages": [group.tolist() for group in values],
    }
    (folder / f"seen-{run.processes.rank}.json").write_text(json.dumps(seen))
    run.processes.shut_down()


def misbehaving(folder, *, rank, at, failure, **options):
    """A run in which one process gets a signal or fails at its reward call number `at`, while the
    others are busy for longer than a test may take.

    Args:
        failure: name of a signal, or `fail`.
    """
    calls = []

    def reward(images, prompts, **columns):
        calls.append(1)
        if len(calls) >= at and os.environ.get("RANK") == str(rank):
            if failure == "fail":
                raise RuntimeError("out of paint")
            os.kill(os.getpid(), getattr(signal, failure))
        elif len(calls) >= at and failure in ("SIGKILL", "SIGSTOP", "fail"):
            time.sleep(300)
        return redness(images, prompts)

    reward.__name__ = "redness"
    train(folder, reward=reward, **options)


def constant_for_dogs(images, prompts, **columns):
    scores = zip(prompts, redness(images, prompts), strict=True)
    return [0.5 if "dog" in prompt else score for prompt, score in scores]


def constant(images, prompts, **columns):
    return [0.0] * len(images)


def nan_once(folder, *, rank, at, **options):
    """A run in which reward call number `at` of one process returns NaN."""
    calls = []

    def reward(images, prompts, **columns):
        calls.append(1)
        if len(calls) == at and os.environ.get("RANK") == str(rank):
            return [float("nan")] * len(images)
        return redness(images, prompts)

    reward.__name__ = "redness"
    train(folder, reward=reward, **options)


def other_prompts(folder):
    """A run whose processes have different prompts."""
    prompts = [f"{prompt} {os.environ['RANK']}" for prompt in PROMPTS]
    pipe = families.built("sd3")
    GRPOTrainer(pipe, redness, prompts, args=settings(folder / "run"))
