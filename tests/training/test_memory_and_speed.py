"""Settings of memory and speed: places of weights and tapes, attention, compiling, optimizers."""

import math
import sys
from dataclasses import replace

import pytest
import torch
from families import FAMILIES, built
from families.family import SHORT
from safetensors.torch import load_file, save_file
from together import redness, settings
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from flowgrpo import ConfigError, GRPOTrainer
from flowgrpo.algorithms.sde import log_prob
from flowgrpo.core import devices
from flowgrpo.core.sections import ModelConfig
from flowgrpo.core.seeds import normal
from flowgrpo.core.train_config import TrainConfig
from flowgrpo.data.row import Row
from flowgrpo.pipelines import offload
from flowgrpo.pipelines.attention import set_attention_backend
from flowgrpo.pipelines.compile import compile_blocks, compiled
from flowgrpo.pipelines.loading import offload_parts, open_pipeline
from flowgrpo.pipelines.lora_files import WEIGHTS
from flowgrpo.pipelines.parts import find_denoisers
from flowgrpo.policy.policy import Policy
from flowgrpo.policy.tape import Tape
from flowgrpo.policy.weights import load_weights, reference
from flowgrpo.scoring.reward import Reward
from flowgrpo.training.metrics import MetricSums
from flowgrpo.training.optimizer import load_optimizer_moments, make_optimizer, optimizer_moments
from rewards import reward

CPU = torch.device("cpu")
ROW = Row(prompt="a cat", source="test")
TRAIN = TrainConfig(lora={"rank": 4, "alpha": 8})
OFFLOADED = ["sd3", "flux", "sd-1.5", "wan-2.1-i2v", "flux-kontext"]


def noise(step, stream, shape):
    return torch.stack([normal(shape[1:], "memory", i, step, stream) for i in range(shape[0])])


def policy_of(pipe):
    """With a LoRA that changes something."""
    policy = Policy(pipe, TRAIN)
    nudged = {n: p + 0.02 * normal(p.shape, n) for n, p in policy.parameters.items()}
    load_weights(policy, nudged)
    return policy


def sampled(policy, call, row=ROW, count=2):
    call = {**call, "num_inference_steps": 4}
    tape = Tape(sde="flow_sde", noise_level=0.7, window=range(1, 3))
    return policy.rollout(row, [*range(count)], call, tape, noise)


def replayed(policy, rollout):
    """Old and new log-probs (steps, 2, B), and the gradients of the new ones."""
    found = []

    def on_step(step, now):
        old = log_prob(step.next_latents, step.mean, step.std)
        new = log_prob(step.next_latents, now.mean, now.std)
        new.sum().backward()
        found.append(torch.stack([old, new.detach()]).cpu())

    policy.replay(rollout, on_step)
    gradients = {name: p.grad.cpu() for name, p in policy.parameters.items() if p.grad is not None}
    for parameter in policy.parameters.values():
        parameter.grad = None
    return torch.stack(found), gradients


def same(a, b):
    """Whether two rollouts made the same latents on the same way."""
    return all(torch.equal(a.tape.steps[key].latents, s.latents) for key, s in b.tape.steps.items())


@pytest.fixture
def moves(monkeypatch):
    """A CPU with a place for weights at rest, where they are NaN; gives the list of moves."""
    kept, found = {}, []

    def rest(module):
        found.append(("rest", module))
        for weight in [*module.parameters(), *module.buffers()]:
            if weight.is_floating_point():
                kept.setdefault(module, []).append((weight, weight.data))
                weight.data = torch.full_like(weight.data, torch.nan)

    def wake(module, device):
        found.append(("wake", module))
        for weight, value in kept.pop(module, []):
            weight.data = value

    for module in (devices, offload):
        monkeypatch.setattr(module, "to_cpu", rest)
        monkeypatch.setattr(module, "to_device", wake)
    return found


@pytest.mark.parametrize("name", OFFLOADED)
def test_stages_that_rest_while_others_work_change_no_bit(name, moves):
    call = {**FAMILIES[name].call, **(FAMILIES[name].guided or {})}
    stock, offloaded = policy_of(built(name)), policy_of(built(name))
    offload_parts(offloaded.pipe, CPU)
    expected, found = sampled(stock, call), sampled(offloaded, call)
    assert found.samples == expected.samples
    assert same(found, expected)
    (log_probs, gradients), (others, other_gradients) = (
        replayed(stock, expected),
        replayed(offloaded, found),
    )
    assert torch.equal(log_probs, others)
    assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)


def test_encoders_leave_before_the_loop_and_the_decoder_after_the_call(moves):
    pipe = built("sd3")
    policy = policy_of(pipe)
    offload_parts(pipe, CPU)
    moves.clear()
    sampled(policy, {**SHORT, "guidance_scale": 4.0})
    encoders = [pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3]
    trips = [*[("wake", e) for e in encoders], *[("rest", e) for e in reversed(encoders)]]
    decoding = [("wake", pipe.vae), ("rest", pipe.vae)]
    # The way to call it is tried first, up to the first step; then the prompt is encoded once.
    assert moves[-8:] == [*trips, *decoding]
    moves.clear()
    rollout = sampled(policy, {**SHORT, "guidance_scale": 4.0})
    assert moves == decoding
    moves.clear()
    replayed(policy, rollout)
    assert moves == []


def test_parts_of_a_stage_wake_the_whole_stage(moves):
    pipe = built("sd3")
    offload_parts(pipe, CPU)
    tokens = torch.ones(1, 4, dtype=torch.long)
    assert pipe.text_encoder_3.get_input_embeddings()(tokens).isfinite().all()


def test_offloading_to_where_the_pipeline_runs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="nothing to move off"):
        open_pipeline(ModelConfig(path=str(tmp_path), device="cpu", offload=True))


def test_a_remembered_prompt_comes_back_to_the_devices_that_it_came_from():
    value = (torch.ones(2), [torch.ones(3, device="meta"), None], "text")
    kept = (torch.ones(2), [torch.ones(3), None], "text")
    back = devices.to_devices(kept, devices.tensor_devices(value))
    assert [t.device.type for t in (back[0], back[1][0])] == ["cpu", "meta"]
    assert back[2] == "text"
    assert back[1][1] is None


def test_models_of_a_reward_work_while_it_scores_and_rest_otherwise(moves):
    model = torch.nn.Linear(3, 1)

    @reward(models=lambda *, scale=1.0: [model])
    def brightness(images, prompts, *, scale=1.0, **columns):
        return [scale * float(model(torch.ones(3))) for _ in images]

    images = sampled(policy_of(built("sd3")), SHORT).samples
    plain = Reward(name="brightness", function=brightness)
    expected = plain(images, [ROW] * 2)
    assert moves == []
    for _ in range(2):
        assert torch.equal(replace(plain, offload=True)(images, [ROW] * 2), expected)
        assert model.weight.isnan().all()
    assert [move for move, _ in moves] == ["wake", "rest"] * 2


def test_a_tape_that_moves_leaves_no_tensor_behind():
    rollout = sampled(policy_of(built("wan-2.1")), FAMILIES["wan-2.1"].call)
    away = rollout.to("meta")
    steps = [value for step in away.tape.steps.values() for value in vars(step).values()]
    tensors = [t for t in tree_leaves([steps, away.tape.outputs]) if isinstance(t, torch.Tensor)]
    assert len(tensors) > 10
    assert {t.device.type for t in tensors} == {"meta"}
    assert same(rollout, rollout.to("cpu"))


def test_what_meets_in_an_operation_is_on_the_device():
    """Fake tensors have devices and no values: a machine without a GPU will do."""
    pipe = built("sd3")
    replacing = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            offload_parts(pipe, "cuda")
            device = pipe._execution_device
            embeds, _, pooled, _ = pipe.encode_prompt(
                *["a cat"] * 3, device=device, do_classifier_free_guidance=False
            )
            assert {part.device.type for part in (embeds, pooled, pipe.text_encoder_3)} == {"cuda"}
            latents = torch.ones(1, 16, 8, 8, device=device)
            latents = latents[:, : pipe.transformer.config.in_channels]
            # Not by its hooks, since fake weights cannot leave again.
            pipe.transformer.forward(latents, embeds, pooled, torch.ones(1, device=device))
            assert pipe.vae.decode(latents).sample.device.type == "cuda"
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(replacing)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", OFFLOADED)
def test_on_a_gpu_stages_and_tapes_on_the_cpu_change_no_bit(name):
    call = {**FAMILIES[name].call, **(FAMILIES[name].guided or {})}
    stock, offloaded = policy_of(built(name).to("cuda")), policy_of(built(name))
    offload_parts(offloaded.pipe, "cuda")
    expected, found = sampled(stock, call), sampled(offloaded, call).to("cpu")
    assert same(expected.to("cpu"), found)
    assert torch.equal(replayed(stock, expected)[0], replayed(offloaded, found)[0])
    assert offloaded.pipe.vae.device == CPU
    again = sampled(offloaded, call)  # the prompt comes from the memo, which is on the CPU
    assert same(again.to("cpu"), found)


def test_native_attention_replays_exactly_and_every_denoiser_uses_it(tmp_path):
    built("flux").save_pretrained(tmp_path)
    pipe = open_pipeline(ModelConfig(path=str(tmp_path), device="cpu", attention_backend="native"))
    processors = pipe.transformer.attn_processors.values()
    assert {processor._attention_backend for processor in processors} == {"native"}
    policy = policy_of(pipe)
    old_and_new, _ = replayed(policy, sampled(policy, SHORT))
    assert torch.equal(old_and_new[:, 0], old_and_new[:, 1])


def test_the_attention_of_other_models_stays_as_it_was():
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    before = registry.get_active_backend()
    set_attention_backend(find_denoisers(built("flux")), "_native_math", CPU, torch.float32)
    assert registry.get_active_backend() == before


@pytest.mark.parametrize(
    ("backend", "sentence"),
    [
        ("nativ", r'is unknown; did you mean "native"\? Usable here: native, '),
        ("sage", r"cannot train on cpu .*pip install sageattention, or use one of native, "),
        ("xformers", r"cannot train on cpu .*pip install xformers, or use one of native, "),
        ("flex", r"cannot train on cpu .*backward on CPU.*; use one of native, "),
    ],
)
def test_an_attention_backend_that_cannot_train_here_is_refused(backend, sentence):
    with pytest.raises(ConfigError, match=sentence):
        set_attention_backend(find_denoisers(built("flux")), backend, CPU, torch.float32)


def test_a_denoiser_whose_attention_has_no_selectable_backend_is_refused():
    with pytest.raises(ConfigError, match=r"transformer .SD3Transformer2DModel. has no selectable"):
        set_attention_backend(find_denoisers(built("sd3")), "native", CPU, torch.float32)


@pytest.fixture
def compiling():
    """Leaves no compiled graphs and no changed limits to other tests."""
    limits = torch._dynamo.config
    before = limits.recompile_limit, limits.fail_on_recompile_limit_hit
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    limits.recompile_limit, limits.fail_on_recompile_limit_hit = before


def prove_compiled(name, dtype, backend, folder):
    """Compiled blocks replay exactly, with the graph of their replay already in the rollout; they
    know that the adapter is off, and follow new weights; what is saved has its usual names."""
    call = FAMILIES[name].call
    policy = policy_of(built(name, dtype))
    eager = sampled(policy, call)
    with reference(policy):
        eager_base = sampled(policy, call)
    with compiled(policy.denoisers, backend):
        rollout, base = prove_compiled_policy(policy, call)
        policy.save(folder)
    near, factor = {torch.float32: (1e-4, 100), torch.bfloat16: (0.1, 2)}[dtype]
    assert apart(rollout, eager) < near
    assert apart(base, eager_base) < near
    assert apart(base, rollout) > factor * apart(base, eager_base)
    assert same(sampled(policy, call), eager)
    if (folder / WEIGHTS).is_file():
        assert not [key for key in load_file(folder / WEIGHTS) if "_orig_mod" in key]


def prove_compiled_policy(policy, call):
    """A rollout with the adapter and one without."""
    rollout, modes = sampled(policy, call), []
    part = next(next(iter(policy.denoisers.values())).children())
    part.register_forward_pre_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    longer = sampled(policy, call, count=3)
    assert modes[:: len(modes) // 4] == [False, True, True, False]
    assert not any(step.next_latents.requires_grad for step in longer.tape.steps.values())
    for taken in (longer, rollout):
        old_and_new, gradients = replayed(policy, taken)
        assert torch.equal(old_and_new[:, 0], old_and_new[:, 1])
        assert all(gradient.any() for gradient in gradients.values())
    with reference(policy):
        base = sampled(policy, call)
    assert same(sampled(policy, call), rollout)
    weights = {name: p.detach().clone() for name, p in policy.parameters.items()}
    load_weights(policy, {name: torch.zeros_like(p) for name, p in weights.items()})
    assert apart(sampled(policy, call), base) < 1e-2
    load_weights(policy, weights)
    return rollout, base


def apart(a, b):
    """Root mean square of the difference of the last latents."""
    last = max(a.tape.steps)
    pair = (tape.steps[last].latents.float() for tape in (a.tape, b.tape))
    return float(torch.dist(*pair)) / a.tape.steps[last].latents.numel() ** 0.5


def test_compiled_blocks_replay_and_follow_the_adapter(tmp_path, compiling):
    prove_compiled("flux", torch.float32, "eager", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["sd3", "flux", "wan-2.1"])
def test_compiled_kernels_replay_and_follow_the_adapter(name, dtype, tmp_path, compiling):
    prove_compiled(name, dtype, "inductor", tmp_path)


def test_a_denoiser_without_repeated_blocks_is_refused():
    with pytest.raises(ConfigError, match=r"linear .Linear. names no repeated blocks"):
        compile_blocks({"linear": torch.nn.Linear(2, 2)})


def stepped(optimizer, parameters, steps):
    for step in steps:
        for name, parameter in parameters.items():
            parameter.grad = normal(parameter.shape, name, step)
        optimizer.step()


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_an_optimizer_goes_on_from_its_saved_moments(kind, tmp_path):
    if kind == "adamw_8bit":
        pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")
    train = TrainConfig(optimizer=kind, lr=0.01, weight_decay=0.1)
    shapes = {"large": (80, 90), "also_large": (90, 80), "small": (3, 5)}
    first = {n: torch.nn.Parameter(normal(s, n)) for n, s in shapes.items()}
    optimizer = make_optimizer(train, first.values())
    stepped(optimizer, first, range(3))
    save_file(optimizer_moments(optimizer, first), tmp_path / "moments.safetensors")
    second = {n: torch.nn.Parameter(p.detach().clone()) for n, p in first.items()}
    resumed = make_optimizer(train, second.values())
    load_optimizer_moments(resumed, second, load_file(tmp_path / "moments.safetensors"))
    stepped(optimizer, first, range(3, 6))
    stepped(resumed, second, range(3, 6))
    assert all(torch.equal(first[name], second[name]) for name in shapes)
    if kind == "adamw_8bit":
        assert optimizer.state[first["large"]]["state1"].dtype == torch.uint8


def test_eight_bit_moments_without_their_package_are_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ImportError, match="pip install bitsandbytes"):
        make_optimizer(TrainConfig(optimizer="adamw_8bit"), [torch.nn.Parameter(torch.ones(2))])


def test_eight_bit_moments_of_sharded_weights_are_refused():
    with pytest.raises(ConfigError, match=r"cannot work on shards; use adamw"):
        make_optimizer(TrainConfig(optimizer="adamw_8bit", shard=True), [])


def gradient(folder, dtype):
    """Of one update, all adapter tensors as one (N,) float32."""
    args = settings(folder, sampling={"groups_per_epoch": 1}, train={"updates_per_epoch": 1})
    run = GRPOTrainer(built("sd3", dtype), redness, ["a cat"], args=args)
    with torch.no_grad():
        for parameter in run.policy.parameters.values():
            parameter.add_(0.02)
    (sampled,) = run.sample(run.plan.groups(0))
    advantages = torch.linspace(-1, 1, 4, dtype=torch.float64)
    pairs = 2**20  # of an update as large as real ones
    run.learner.accumulate([(sampled.rollouts, advantages)], pairs, MetricSums())
    scale = run.learner._loss_scale
    gradients = [p.grad.flatten() / scale for p in run.policy.parameters.values()]
    return torch.cat(gradients) * pairs, scale


def test_the_gradients_of_float16_activations_do_not_vanish(tmp_path):
    whole, one = gradient(tmp_path / "float32", torch.float32)
    half, scale = gradient(tmp_path / "float16", torch.float16)
    assert one == 1
    assert scale > 1
    assert math.log2(scale) % 1 == 0
    assert torch.cosine_similarity(whole, half, dim=0) > 0.99
