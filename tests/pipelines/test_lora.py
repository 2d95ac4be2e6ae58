"""A saved LoRA loads in a stock pipeline, and gives the images of the policy."""

import json

import pytest
import torch
from families import built
from families.family import SHORT
from safetensors import safe_open

from flowgrpo.core.train_config import TrainConfig
from flowgrpo.data.row import Row
from flowgrpo.pipelines.loading import load_pipeline
from flowgrpo.policy.policy import Policy
from flowgrpo.policy.weights import inference_weights

ROW = Row(prompt="a cat", source="test")
STEPS = {**SHORT, "num_inference_steps": 3, "output_type": "latent"}


def trained(family, rank=8, alpha=32, dtype=torch.float32):
    policy = Policy(built(family, dtype), TrainConfig(lora={"rank": rank, "alpha": alpha}))
    with torch.no_grad():
        for i, parameter in enumerate(policy.parameters.values()):
            generator = torch.Generator().manual_seed(i)
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return policy


def plain(pipe):
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    return pipe(prompt="a cat", num_images_per_prompt=2, generator=generators, **STEPS).images


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_a_saved_lora_gives_bit_equal_images_in_a_fresh_pipeline(family, dtype, tmp_path):
    policy = trained(family, dtype=dtype)
    with inference_weights(policy):
        policy.save(tmp_path)
        images = torch.stack(policy.generate(ROW, [1, 2], STEPS))
    assert {p.dtype for p in policy.parameters.values()} == {torch.float32}
    fresh = built(family, dtype)
    base = plain(fresh)
    scheduler = dict(fresh.scheduler.config)
    fresh.load_lora_weights(str(tmp_path))
    assert torch.equal(plain(fresh), images)
    assert not torch.equal(plain(fresh), base)
    assert dict(fresh.scheduler.config) == scheduler


def test_rank_and_alpha_are_saved_as_metadata(tmp_path):
    trained("sd3", rank=8, alpha=32).save(tmp_path)
    with safe_open(tmp_path / "pytorch_lora_weights.safetensors", "pt") as file:
        metadata = json.loads(file.metadata()["lora_adapter_metadata"])
        assert all(file.get_tensor(k).dtype == torch.float32 for k in file.keys())  # noqa: SIM118
        assert not any("_orig_mod" in k or "module." in k for k in file.keys())  # noqa: SIM118
    assert metadata["transformer.r"] == 8
    assert metadata["transformer.lora_alpha"] == 32


def test_a_fresh_lora_changes_nothing():
    latents = torch.stack(Policy(built("sd3")).generate(ROW, [1, 2], STEPS))
    assert torch.equal(latents, plain(built("sd3")))


def test_the_adapter_is_float32_over_a_bfloat16_base():
    policy = Policy(built("sd3", torch.bfloat16))
    assert {p.dtype for p in policy.parameters.values()} == {torch.float32}
    assert policy.pipe.transformer.pos_embed.proj.weight.dtype == torch.bfloat16


def test_initial_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    a = Policy(built("sd3"), seed=5).parameters
    torch.manual_seed(2)
    state = torch.get_rng_state()
    pipe = built("sd3")
    torch.set_rng_state(state)
    b = Policy(pipe, seed=5).parameters
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_targets_that_match_nothing_list_candidates():
    with pytest.raises(ValueError, match=r"train.lora.targets has to_z.*candidates: .*to_q"):
        Policy(built("sd3"), TrainConfig(lora={"targets": ["to_q", "to_z"]}))


def test_exchanged_weights_are_restored():
    policy = trained("sd3")
    before = {name: p.detach().clone() for name, p in policy.parameters.items()}
    zeros = {name: torch.zeros_like(p) for name, p in policy.parameters.items()}
    with inference_weights(policy, zeros):
        assert torch.equal(torch.stack(policy.generate(ROW, [1, 2], STEPS)), plain(built("sd3")))
    assert all(torch.equal(p, before[name]) for name, p in policy.parameters.items())


def test_a_pipeline_saved_without_a_part_opens_again(tmp_path):
    pipe = built("sd3")
    pipe.text_encoder_3 = pipe.tokenizer_3 = None
    pipe.save_pretrained(tmp_path)
    opened = load_pipeline(str(tmp_path), torch.float32, "cpu")
    assert opened.text_encoder_3 is None
    assert torch.equal(plain(opened), plain(pipe))


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all"])
def test_a_missing_model_folder_is_an_error_of_one_sentence(path):
    with pytest.raises(ValueError, match=f'model.path is "{path}", but there is no such folder'):
        load_pipeline(path, torch.float32, "cpu")


def test_a_folder_that_is_no_pipeline_is_an_error_of_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="that folder is no pipeline"):
        load_pipeline(str(tmp_path), torch.float32, "cpu")
