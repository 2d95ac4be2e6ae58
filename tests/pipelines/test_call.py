"""Calls of pipelines for several samples, and checks of their arguments."""

import pytest
import torch
from families import FAMILIES, built

from flowgrpo import ConfigError
from flowgrpo.data.row import Row
from flowgrpo.pipelines.batching import Batchings
from flowgrpo.pipelines.call import Batching, generate
from flowgrpo.pipelines.call_checks import call_warnings, check_frames
from flowgrpo.policy.policy import Policy
from flowgrpo.policy.tape import Tape

ROW = Row(prompt="a red cube", source="test")


def latents(name, seeds, pipe=None, **call):
    call = {**FAMILIES[name].call, **call, "num_inference_steps": 2, "output_type": "latent"}
    return stacked(pipe or built(name), ROW, seeds, call)


def stacked(pipe, row, seeds, call):
    return torch.stack(generate(pipe, row, seeds, call, Batchings(pipe).of(row, call)))


@pytest.mark.parametrize(
    ("name", "by_count", "repeats_media", "one_per_call"),
    [
        ("sd3", True, False, False),
        ("cogvideox", False, False, False),
        ("sd3-img2img", True, True, False),
        ("cogvideox-i2v", False, True, False),
        ("wan-vace", False, False, True),
    ],
)
def test_each_sample_of_a_call_has_the_noise_of_its_own_seed(
    name, by_count, repeats_media, one_per_call
):
    """The second sample of seeds (1, 2) is the first of (2, 1), whichever batching is needed."""
    pipe = built(name)
    call = {**FAMILIES[name].call, "num_inference_steps": 2}
    assert Batchings(pipe).of(ROW, call) == Batching(
        by_count=by_count, repeats_media=repeats_media, one_per_call=one_per_call
    )
    there, back = latents(name, (1, 2), pipe), latents(name, (2, 1), pipe)
    assert torch.allclose(there, back.flip(0), atol=1e-4)
    assert not torch.allclose(there[0], there[1], atol=1e-2)


@pytest.mark.parametrize("name", ["flux-img2img", "sd3-inpaint", "svd", "sd3-controlnet"])
def test_a_sample_in_a_batch_equals_the_same_sample_alone(name):
    """Also if the pipeline encodes its input image with the first sample's generator only."""
    pipe = built(name)
    together, alone = latents(name, (1, 2), pipe), latents(name, (2,), pipe)
    assert torch.allclose(together[1:], alone, atol=1e-3)
    same = latents(name, (1, 1), pipe)
    assert torch.allclose(same[0], same[1], atol=1e-3)


def test_trying_batchings_records_nothing_on_the_tape():
    policy = Policy(built("sd3"))

    def noise(step, stream, shape):
        return torch.zeros(shape)

    tape = Tape(sde="cps", noise_level=0.5, window=range(1, 3))
    call = {**FAMILIES["sd3"].call, "num_inference_steps": 4}
    taken = policy.rollout(ROW, [1, 2, 3], call, tape, noise)
    assert [len(outputs) for outputs in taken.tape.outputs.values()] == [1, 1, 1, 1]
    policy.replay(taken, lambda step, transition: None)


def test_prompts_are_encoded_once_even_if_options_are_mappings():
    policy = Policy(built("hunyuan"))
    call = {**FAMILIES["hunyuan"].call, "num_inference_steps": 2, "output_type": "latent"}
    policy.generate(ROW, (1, 2), call)
    kept = len(policy.prompt_cache.entries)
    assert kept
    policy.generate(ROW, (3, 4), call)
    assert len(policy.prompt_cache.entries) == kept


def test_a_pipeline_of_one_sample_per_call_requires_micro_batches_of_one():
    policy = Policy(built("wan-vace"))
    call = {**FAMILIES["wan-vace"].call, "num_inference_steps": 3}
    tape = Tape(sde="cps", noise_level=0.5, window=range(1))
    with pytest.raises(ConfigError, match=r"set sampling\.micro_batch_size to 1"):
        policy.rollout(ROW, [1, 2], call, tape, None)


def test_columns_of_a_row_reach_the_pipeline():
    call = {**FAMILIES["sd3"].call, "guidance_scale": 4.0, "num_inference_steps": 2}
    call["output_type"] = "latent"
    row = Row(prompt="a cat", columns={"negative_prompt": "a dog", "target": 3}, source="test")
    plain = Row(prompt="a cat", source="test")
    pipe = built("sd3")
    with_column = stacked(pipe, row, (1, 2), call)
    as_argument = stacked(pipe, plain, (1, 2), {**call, "negative_prompt": "a dog"})
    assert torch.equal(with_column, as_argument)
    assert not torch.equal(with_column, stacked(pipe, plain, (1, 2), call))


def test_draws_without_a_generator_are_reproducible_and_leave_the_global_state_alone():
    """The ControlNet pipeline's VAE samples the encoded image from the global random state."""
    pipe = built("sd3-controlnet")
    torch.manual_seed(1)
    first, state = latents("sd3-controlnet", (1, 2), pipe), torch.get_rng_state()
    torch.manual_seed(2)
    again = latents("sd3-controlnet", (1, 2), pipe)
    torch.manual_seed(1)
    assert torch.equal(first, again)
    assert torch.equal(state, torch.get_rng_state())


def sample(name, **call):
    pipe = built(name)
    call = {**FAMILIES[name].call, "num_inference_steps": 2, **call}
    return pipe, call, generate(pipe, ROW, (1,), call, Batchings(pipe).of(ROW, call))[0]


def test_a_distilled_model_with_many_steps_gives_a_warning():
    pipe, call, made = sample("sd3")
    call = {**call, "num_inference_steps": 20}
    (warning,) = call_warnings(pipe, "owner/sd3.5-large-turbo", call, made)
    assert 'looks distilled (its name says "turbo")' in warning
    assert "used with 1 to 8 steps" in warning
    assert not call_warnings(
        pipe, "owner/sd3.5-large-turbo", {**call, "num_inference_steps": 4}, made
    )
    assert not call_warnings(pipe, "owner/sd3.5-large", call, made)
    pipe.register_to_config(is_distilled=True)
    assert "is_distilled is true" in call_warnings(pipe, None, call, made)[0]


def test_a_size_that_the_pipeline_or_the_model_is_not_made_for_gives_a_warning():
    pipe, call, made = sample("flux", height=18)
    assert "sampling.call.height is 18, but the pipeline makes 16." in call_warnings(
        pipe, None, call, made
    )
    pipe, call, made = sample("sd3", height=32, width=32)
    assert "the model was made for 16 x 16" in call_warnings(pipe, None, call, made)[0]
    pipe, call, made = sample("sd3", height=8, width=8)
    assert "samples are 8 x 8" in call_warnings(pipe, None, call, made)[0]
    pipe, call, made = sample("sd3")
    assert not call_warnings(pipe, None, call, made)


def test_a_frame_count_that_the_vae_cannot_decode_is_refused():
    pipe = built("wan-2.1")
    assert pipe.vae_scale_factor_temporal == 4
    check_frames(pipe, "sampling.call", {"num_frames": 9})
    check_frames(pipe, "sampling.call", {})
    with pytest.raises(ConfigError, match=r"num_frames is 10, but .* of 4, .*; use 9 or 13\."):
        check_frames(pipe, "sampling.call", {"num_frames": 10})


def test_a_default_frame_rate_gives_a_warning():
    pipe, call, made = sample("ltx")
    assert any("25 frames per second" in text for text in call_warnings(pipe, None, call, made))
    pipe, call, made = sample("ltx", frame_rate=8)
    assert not any("frames per second" in text for text in call_warnings(pipe, None, call, made))
