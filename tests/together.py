"""Runs of several real processes: what a launcher does, but from a server that has imported torch.

Each process gets the environment that torchrun gives it, and `job(folder, **options)` to do.
"""

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
import torch

from flowgrpo import GRPOConfig, GRPOTrainer
from flowgrpo.algorithms.advantages import advantages
from flowgrpo.runs.environment import packages_of_modules

packages_of_modules()  # read once, not in each process
SERVER = multiprocessing.get_context("forkserver")
PROMPTS = ["a cat", "a dog", "a hen", "a cow", "a pig"]


def redness(images, prompts, **columns):
    return [image.resize((1, 1)).getpixel((0, 0))[0] / 255 for image in images]


def settings(folder, **changes):
    sampling = {
        "num_inference_steps": 5,
        "group_size": 4,
        "groups_per_epoch": 4,
        "window": 2,
        "call": {**families.family.SHORT, "guidance_scale": 1.5},
        **changes.pop("sampling", {}),
    }
    train = {"epochs": 2, "lr": 1e-4, "lora": {"rank": 4, "alpha": 8}, **changes.pop("train", {})}
    options = {"checkpoint_every": 1, **changes}
    return GRPOConfig(output_dir=str(folder), sampling=sampling, train=train, **options)


def trainer(folder, *, family="sd3", dtype="float32", resume=False, reward=redness, **changes):
    pipe = families.built(family, getattr(torch, dtype))
    args = settings(folder, **changes)
    return GRPOTrainer(
        pipe, reward, PROMPTS, ["a fox", "an owl", "a bee"], args=args, resume=resume
    )


class Launched:
    """Processes of one run."""

    def __init__(self, job, count, folder, options):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": count}
        SERVER.set_forkserver_preload(["together"])
        self.logs = [Path(folder) / f"process-{rank}.log" for rank in range(count)]
        self.processes = [
            SERVER.Process(
                target=_do,
                args=(job, {**environment, "RANK": rank, "LOCAL_RANK": rank}, log, folder, options),
            )
            for rank, log in enumerate(self.logs)
        ]
        for process in self.processes:
            process.start()

    def ended(self, seconds=120):
        """Exit codes, by rank; a signal's number is negative."""
        stop = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0, stop - time.monotonic()))
        late = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        for rank in late:
            self.processes[rank].kill()
        assert not late, f"processes {late} go on after {seconds} s:\n{self.said()}"
        return [process.exitcode for process in self.processes]

    def said(self):
        return "\n".join(log.read_text() for log in self.logs if log.exists())

    def send(self, rank, number):
        os.kill(self.processes[rank].pid, number)


def launch(job, count, folder, **options):
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Launched(job, count, str(folder), options)


def run(job, count, folder, **options):
    """Launches, waits, and says what went wrong, if anything."""
    launched = launch(job, count, folder, **options)
    codes = launched.ended()
    assert codes == [0] * count, f"{codes}\n{launched.said()}"


def _do(job, environment, log, folder, options):
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
    """A whole run; each process leaves its weights in FOLDER/weights-RANK.pt's safetensors."""
    from safetensors.torch import save_file

    run = trainer(folder / "run", **options)
    run.train()
    rank = run.processes.rank
    run.learner.processes.rank = 0  # each keeps what it has
    save_file(run.learner.state_dict(), folder / f"weights-{rank}.safetensors")


def first_epoch(folder, **options):
    """Samples, rewards and advantages of epoch 0 as this process sees them."""
    run = trainer(folder / "run", **options)
    own, rewards, _ = run._roll_out(run.plan.groups(0))
    pictures = {
        index: [image.tobytes().hex() for r in sampled.rollouts for image in r.samples]
        for index, sampled in own.items()
    }
    values = advantages(rewards, {"redness": 1.0}, run.config.train.advantage)
    seen = {
        "pictures": pictures,
        "rewards": [group.tolist() for group in rewards["redness"]],
        "advantages": [group.tolist() for group in values],
    }
    (folder / f"seen-{run.processes.rank}.json").write_text(json.dumps(seen))
    run.processes.shut_down()


def misbehaving(folder, *, rank, at, deed, **options):
    """A run in which one process dies, hangs or fails at its reward call number `at`, while the
    others are busy for longer than anyone wants to wait."""
    calls = []

    def reward(images, prompts, **columns):
        calls.append(1)
        if len(calls) >= at and os.environ.get("RANK") == str(rank):
            if deed == "fail":
                raise RuntimeError("out of paint")
            os.kill(os.getpid(), getattr(signal, deed))
        elif len(calls) >= at and deed in ("SIGKILL", "SIGSTOP", "fail"):
            time.sleep(300)
        return redness(images, prompts)

    reward.__name__ = "redness"
    train(folder, reward=reward, **options)


def constant_for_dogs(images, prompts, **columns):
    return [0.5 if "dog" in p else r for p, r in zip(prompts, redness(images, prompts))]  # noqa: B905


def constant(images, prompts, **columns):
    return [0.0] * len(images)


def nan_once(folder, *, rank, at, **options):
    """The reward call number `at` of one process is no number."""
    calls = []

    def reward(images, prompts, **columns):
        calls.append(1)
        if len(calls) == at and os.environ.get("RANK") == str(rank):
            return [float("nan")] * len(images)
        return redness(images, prompts)

    reward.__name__ = "redness"
    train(folder, reward=reward, **options)


def other_prompts(folder):
    prompts = [f"{prompt} {os.environ['RANK']}" for prompt in PROMPTS]
    pipe = families.built("sd3")
    GRPOTrainer(pipe, redness, prompts, args=settings(folder / "run"))
