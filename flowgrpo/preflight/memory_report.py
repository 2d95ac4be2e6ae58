"""The memory estimate of a run as labelled lines, for people."""

from flowgrpo.preflight.memory import MemoryEstimate, Size


def describe_memory(estimate: MemoryEstimate) -> dict[str, str]:
    """The numbers of an estimate per process, by label; what is missing, with its reason."""
    config = estimate.plan.config
    lines = {**_weights(estimate), **_copies(estimate), **_activations(estimate)}
    lines |= {**_tapes(estimate), **_denoiser_calls(estimate)}
    if (total := estimate.total()) is not None:
        without = "without decoding, prompts and rewards"
        without += ", text encoders and VAE" if config.model.offload else ""
        lines["sum per process"] = f"{in_units(total)} ({without})"
    return lines | {what: f"not predicted ({why})" for what, why in estimate.missing.items()}


def in_units(count: int) -> str:
    """Bytes in the largest binary unit that fits."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"


def _weights(estimate: MemoryEstimate) -> dict[str, str]:
    lines = {}
    for name, size in estimate.parts.items():
        is_sharded = name in estimate.denoisers
        lines[name] = _size(size, estimate.per_process(size.bytes) if is_sharded else size.bytes)
    if estimate.trained is not None and estimate.is_lora:
        lines["adapter"] = _size(estimate.trained, estimate.per_process(estimate.trained.bytes))
    return lines


def _copies(estimate: MemoryEstimate) -> dict[str, str]:
    """Everything that is as large as the trained tensors, or a multiple of them."""
    copies = {
        "gradients": estimate.gradients,
        "optimizer state": estimate.optimizer,
        "average": estimate.average,
        "reference copy": estimate.reference,
    }
    lines = {label: in_units(estimate.per_process(n)) for label, n in copies.items() if n}
    if estimate.plan.config.train.optimizer == "adamw_8bit" and "optimizer state" in lines:
        lines["optimizer state"] += " (estimate: 2 bytes per parameter)"
    return lines


def _activations(estimate: MemoryEstimate) -> dict[str, str]:
    if estimate.activations is None:
        return {}
    checkpointed = estimate.activations_checkpointed
    also = f", {in_units(checkpointed)} with gradient checkpointing" if checkpointed else ""
    size = estimate.plan.micro_batch_size
    return {"activations per step": f"{in_units(estimate.activations)}{also} ({size} images)"}


def _tapes(estimate: MemoryEstimate) -> dict[str, str]:
    tapes = estimate.max_tape_bytes()
    if tapes is None:
        return {}
    on_cpu = ", on the CPU" if estimate.plan.config.sampling.tape_on_cpu else ""
    groups = f"{estimate.groups_per_process} groups per process"
    return {"tapes per epoch": f"{in_units(tapes)} ({groups}{on_cpu})"}


def _denoiser_calls(estimate: MemoryEstimate) -> dict[str, str]:
    if estimate.micro_batch_costs is None:
        return {}
    calls = max(cost.rollout_forwards for cost in estimate.micro_batch_costs.values())
    steps = estimate.plan.config.sampling.num_inference_steps
    return {
        "denoiser calls per rollout": f"{calls} in {steps} steps",
        "denoiser forwards, epoch 1": f"{estimate.forwards()} (if no group is tied)",
        "denoiser backwards, epoch 1": f"{estimate.backwards()}",
    }


def _size(size: Size, count: int) -> str:
    """`count` bytes of a part with `size.parameters` parameters."""
    return f"{in_units(count)} ({size.parameters / 1e6:.1f} M parameters)"
