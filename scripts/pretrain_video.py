"""The stages of `pretrain_tiny.py --model wan`, which makes assets/tiny-wan.

vae          AutoencoderKLWan on clips of one moving shape.
latents      Each clip is encoded once; the transformer never sees pixels.
transformer  Wan transformer and UMT5 encoder together, from scratch, by flow matching.
prompts      The two prompt files.
export       The folder of the averaged weights, and the scheduler's shift.
scores       Measures the exported folder; adds to scores.json, draws tiny_wan_samples.png.

The transformer's captions are partly wrong on purpose, as those of the image model are: a share of
their directions and colours is random. So the model draws clean clips that often show another
colour, or go another way, than was asked for: a base that reinforcement learning can improve.

Where this differs from Wan: the text encoder is learned jointly, the VAE has no perceptual or
adversarial loss, and its latents are taken from the posterior's mode. L = max_sequence_length.
"""

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tiny_video as world
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from PIL import Image
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm
from training_loop import load_averaged, quiet, train, write
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

sys.path.append(str(Path(__file__).parents[1] / "configs"))
from motion import motion

STAGES = ("vae", "latents", "transformer", "prompts", "export", "scores")
VAE_STEPS = 4500
TRANSFORMER_STEPS = 3000
CLIPS_PER_SCENE = 250
WRONG_COLOUR = 0.25  # share of captions with a random colour
WRONG_DIRECTION = 0.4  # share of captions with a random direction
PROMPT_DROPOUT = 0.1
CONTEXT = 16  # tokens a prompt is padded to; the pipeline's default of 512 is learned a little too
LONG_CONTEXT = 512
LATENT_CHANNELS = 16
SHIFTS = (1.0, 2.0, 3.0)  # of the scheduler; the best one is exported
CALL = {
    "height": world.SIZE,
    "width": world.SIZE,
    "num_frames": world.NUM_FRAMES,
    "max_sequence_length": CONTEXT,
}


# Stage vae


def to_pixels(clips):
    """Clips of Pillow pictures as (B, 3, T, H, W) in [-1, 1]."""
    frames = np.stack([np.stack(clip) for clip in clips])
    return torch.from_numpy(frames).permute(0, 4, 1, 2, 3) / 127.5 - 1


def random_clips(rng, num_clips):
    """Clips of scenes that training may see."""
    scenes = world.split_scenes()[0]
    return [world.random_clip(rng, rng.choice(scenes)) for _ in range(num_clips)]


def build_vae(latents_mean=(0.0,) * LATENT_CHANNELS, latents_std=(1.0,) * LATENT_CHANNELS):
    """4x down in time and 8x in space, half of 8 by patches as in Wan 2.2: fast to decode.

    A clip of 9 frames of 32 x 32 is 16 channels of 3 x 4 x 4: 768 latent dimensions.
    """
    return AutoencoderKLWan(
        base_dim=16,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        z_dim=LATENT_CHANNELS,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_temporal=4,
        scale_factor_spatial=8,
        latents_mean=list(latents_mean),
        latents_std=list(latents_std),
    )


def train_vae(workdir, seed, batch_size=8):
    """L1 and squared error, and a little KL that keeps the latents smooth.

    The shape's pixels and those beside them count 7-fold: nine of ten pixels are mere paper.
    """
    torch.manual_seed(seed)
    vae = build_vae()

    def loss_at(step):
        rng = random.Random(f"video vae {seed} {step}")
        pixels = to_pixels(random_clips(rng, batch_size))
        generator = torch.Generator().manual_seed(rng.getrandbits(40))
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(pixels).latent_dist
            decoded = vae.decode(posterior.sample(generator)).sample.float()
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        error, weights = decoded - pixels, 1 + 6 * near_shape(pixels)
        return ((error.abs() + error**2) * weights).mean() / weights.mean() + 5e-4 * kl

    train("vae", vae, loss_at, workdir, VAE_STEPS, lr=4e-3)


def near_shape(pixels):
    """1 where a pixel or one beside it is not paper, else 0: (B, 1, T, H, W)."""
    paper = torch.tensor(world.PAPER).view(1, 3, 1, 1, 1) / 127.5 - 1
    shape = ((pixels - paper).abs().amax(1, keepdim=True) > 0.1).float()
    return F.max_pool3d(shape, (1, 3, 3), stride=1, padding=(0, 1, 1))


# Stage latents


def load_vae(workdir):
    """The trained autoencoder, with the latents' mean and deviation once they are measured."""
    statistics = {}
    if (workdir / "latents.pt").exists():
        data = torch.load(workdir / "latents.pt", mmap=True, weights_only=True)
        statistics = {name: data[name] for name in ("latents_mean", "latents_std")}
    return load_averaged(build_vae(**statistics), workdir / "vae.pt")


@torch.no_grad()
def encode_clips(workdir, seed, batch_size=72):
    """Writes latents.pt: latents (N, 16, 3, 4, 4), each channel of mean 0 and deviation 1, captions
    (N), and the channels' means and deviations before."""
    vae = load_vae(workdir)
    rng = random.Random(f"video latents {seed}")
    scenes = CLIPS_PER_SCENE * world.split_scenes()[0]
    encoded = []
    for first in tqdm(range(0, len(scenes), batch_size), "latents", disable=quiet):
        batch = scenes[first : first + batch_size]
        pixels = to_pixels([world.random_clip(rng, scene) for scene in batch])
        with torch.autocast("cpu", torch.bfloat16):
            encoded.append(vae.encode(pixels).latent_dist.mode().float())
    latents = torch.cat(encoded)
    std, mean = torch.std_mean(latents, dim=(0, 2, 3, 4), keepdim=True)
    rng = random.Random(f"video captions {seed}")
    data = {
        "latents": ((latents - mean) / std).half(),
        "captions": [world.misdescribe(rng, s, WRONG_COLOUR, WRONG_DIRECTION) for s in scenes],
        "latents_mean": mean.flatten().tolist(),
        "latents_std": std.flatten().tolist(),
    }
    write(workdir / "latents.pt", data)


# Stage transformer


def build_tokenizer():
    """One token for each of the world's words, letters for anything else."""
    pieces = ["<pad>", "</s>", "<unk>", *(f"▁{word}" for word in world.WORDS), "▁"]
    letters = "abcdefghijklmnopqrstuvwxyz0123456789,.'\"-"
    scores = [(piece, -1.0) for piece in pieces] + [(letter, -10.0) for letter in letters]
    return T5Tokenizer(vocab=scores, extra_ids=0, model_max_length=LONG_CONTEXT)


def build_text_encoder(tokenizer, width=64):
    """Two layers; its embeddings start large enough to tell the words apart."""
    config = UMT5Config(
        vocab_size=len(tokenizer),
        d_model=width,
        d_ff=2 * width,
        d_kv=16,
        num_heads=width // 16,
        num_layers=2,
        dropout_rate=0.0,
    )
    return UMT5EncoderModel(config)


def build_transformer(text_dim=64):
    """4 layers x 128 on 48 tokens; starts from an output of 0 and a modulation without time."""
    transformer = WanTransformer3DModel(
        patch_size=(1, 1, 1),
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=4,
        num_attention_heads=4,
        attention_head_dim=32,
        ffn_dim=512,
        text_dim=text_dim,
        freq_dim=64,
        rope_max_seq_len=64,
    )
    parts: Any = transformer
    for linear in (parts.condition_embedder.time_proj, parts.proj_out):
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
    return transformer


def build_denoiser():
    """The transformer and its text encoder."""
    text_encoder = build_text_encoder(build_tokenizer())
    return nn.ModuleDict({"transformer": build_transformer(), "text_encoder": text_encoder})


def tokenize(tokenizer, prompts, length):
    """Token ids and mask, (B, L) each, padded as the pipeline does it."""
    arguments = {"padding": "max_length", "max_length": length, "truncation": True}
    tokens = tokenizer(prompts, return_tensors="pt", **arguments)
    return tokens.input_ids, tokens.attention_mask


def encode_prompts(text_encoder, token_ids, mask):
    """Prompt embeddings (B, L, 64), 0 past a prompt's end, as the pipeline's."""
    return text_encoder(token_ids, mask).last_hidden_state * mask[..., None]


def train_transformer(workdir, seed, batch_size=96, sigma_shift=2.0):
    """Flow matching: the velocity from clip to noise, at logit-normal sigmas, shifted.

    On so few tokens plain attention is faster than the fused kernel on a CPU.
    """
    torch.manual_seed(seed)
    data = torch.load(workdir / "latents.pt", weights_only=True)
    latents_all, tokenizer = data["latents"], build_tokenizer()
    token_ids, mask = tokenize(tokenizer, data["captions"], CONTEXT)
    empty_ids, empty_mask = tokenize(tokenizer, [""], CONTEXT)
    denoiser = build_denoiser()

    def loss_at(step):
        generator = torch.Generator().manual_seed(seed + 7919 * (step + 1))
        length = LONG_CONTEXT if step % 32 == 31 else CONTEXT
        size = batch_size // 4 if length > CONTEXT else batch_size
        picked = torch.randint(len(latents_all), (size,), generator=generator)
        dropped = torch.rand(size, 1, generator=generator) < PROMPT_DROPOUT
        ids = torch.where(dropped, empty_ids, token_ids[picked])
        masks = torch.where(dropped, empty_mask, mask[picked])
        sigma = torch.randn(size, generator=generator).sigmoid()
        sigma = sigma_shift * sigma / (1 + (sigma_shift - 1) * sigma)
        latents = latents_all[picked].float()
        noise = torch.randn(latents.shape, generator=generator)
        noisy = torch.lerp(latents, noise, sigma.view(-1, 1, 1, 1, 1))
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            prompt_embeds = encode_prompts(denoiser["text_encoder"], ids, masks)
            prompt_embeds = F.pad(prompt_embeds, (0, 0, 0, length - CONTEXT))
            arguments = (noisy, 1000 * sigma, prompt_embeds)
            velocity = denoiser["transformer"](*arguments, return_dict=False)[0]
        return F.mse_loss(velocity.float(), noise - latents)

    train("transformer", denoiser, loss_at, workdir, TRANSFORMER_STEPS, lr=1e-3)


# Stage prompts


def write_prompts(out):
    """Two files, one prompt a line; each scene is in one of them only."""
    (out / "prompts").mkdir(parents=True, exist_ok=True)
    for split, scenes in zip(("train", "test"), world.split_scenes(), strict=True):
        lines = sorted(world.prompt_of(scene) for scene in scenes)
        (out / "prompts" / f"motions_{split}.txt").write_text("\n".join(lines) + "\n")


def read_prompts(out, split):
    """The lines of one prompt file."""
    return (out / "prompts" / f"motions_{split}.txt").read_text().splitlines()


# Stage export


def build_pipeline(vae, denoiser, shift):
    """The stock pipeline, with the solver of the released models."""
    return WanPipeline(
        vae=vae,
        transformer=denoiser["transformer"],
        text_encoder=denoiser["text_encoder"],
        tokenizer=build_tokenizer(),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
        ),
    )


def sample(pipe, prompts, seed, batch_size=24, num_inference_steps=8, guidance_scale=1.0, **call):
    """One clip, a list of pictures, for each prompt."""
    pipe.set_progress_bar_config(disable=True)
    clips = []
    for first in range(0, len(prompts), batch_size):
        clips += pipe(
            prompts[first : first + batch_size],
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            generator=torch.Generator().manual_seed(1000 * seed + first),
            output_type="pil",
            **(CALL | call),
        ).frames
    return clips


def motion_scores(pipe, prompts, seeds=(0, 1, 2, 3), **call):
    """Scores (seeds, prompts)."""
    return np.array([motion(sample(pipe, prompts, seed, **call), prompts) for seed in seeds])


def export_pipeline(workdir, out):
    """Saves the folder, with the scheduler's shift whose score at 6 and 20 steps is best.

    Half precision on disk, but not the text encoder, see `pretrain_tiny.save_pipeline`.
    """
    denoiser = load_averaged(build_denoiser(), workdir / "transformer.pt")
    vae, prompts = load_vae(workdir), read_prompts(out, "train")
    scores = {}
    for shift in SHIFTS:
        pipe = build_pipeline(vae, denoiser, shift)
        scores[shift] = [
            float(motion_scores(pipe, prompts, num_inference_steps=n).mean()) for n in (6, 20)
        ]
        print(f"shift {shift:g}: motion {scores[shift][0]:.3f}, {scores[shift][1]:.3f}", flush=True)
    shift = max(SHIFTS, key=lambda shift: sum(scores[shift]))
    pipe = build_pipeline(vae, denoiser, shift)
    pipe.vae.half()
    pipe.transformer.half()
    pipe.save_pretrained(out / "tiny-wan")
    write(workdir / "shift.pt", {"shift": shift, "scores": scores})


# Stage scores


@torch.no_grad()
def reconstruction_psnr(vae, prompts, seed=0):
    """Peak signal-to-noise ratio, in dB, of clips after the autoencoder."""
    rng = random.Random(f"video psnr {seed}")
    scenes = [tuple(prompt.split()[i] for i in (1, 2, 4)) for prompt in prompts]
    pixels = to_pixels([world.random_clip(rng, scene) for scene in scenes])
    decoded = vae.decode(vae.encode(pixels).latent_dist.mode()).sample
    return 10 * float(torch.log10(4 / F.mse_loss(decoded, pixels)))


def clips_per_second(pipe, prompt, repeats=5):
    """Rollouts: 16 decoded clips of one prompt, 8 steps, no guidance."""
    call = CALL | {"num_inference_steps": 8, "guidance_scale": 1.0, "num_videos_per_prompt": 16}
    pipe(prompt, output_type="pil", **call)
    started = time.time()
    for _ in range(repeats):
        pipe(prompt, output_type="pil", **call)
    return 16 * repeats / (time.time() - started)


def by_word(scores, prompts, words):
    """Mean of scores (seeds, prompts) for each word, over the prompts that hold it."""
    return {
        word: float(scores[:, [word in prompt.split() for prompt in prompts]].mean())
        for word in words
    }


def draw_sheet(clips, path, zoom=2):
    """A row a clip, its frames from left to right."""
    rows = [np.concatenate([np.asarray(frame) for frame in clip], axis=1) for clip in clips]
    sheet = Image.fromarray(np.concatenate(rows))
    sheet.resize((zoom * sheet.width, zoom * sheet.height), Image.Resampling.NEAREST).save(path)


def measure(workdir, out):
    """Scores of the exported folder, as a user gets it."""
    pipe = WanPipeline.from_pretrained(out / "tiny-wan")
    pipe.set_progress_bar_config(disable=True)
    train_prompts, prompts = read_prompts(out, "train"), read_prompts(out, "test")
    result = {
        "clips_per_second": clips_per_second(pipe, prompts[0]),
        "vae_psnr": reconstruction_psnr(pipe.vae, prompts),
        "shift": torch.load(workdir / "shift.pt", weights_only=True),
        "seconds": {
            name: torch.load(workdir / f"{name}.pt", mmap=True, weights_only=True)["seconds"]
            for name in ("vae", "transformer")
        },
    }
    for steps in (8, 20):
        for guidance in (1.0, 2.0, 4.0):
            call = {"num_inference_steps": steps, "guidance_scale": guidance}
            scores = motion_scores(pipe, prompts, **call)
            result[f"motion, {steps} steps, guidance {guidance:g}"] = float(scores.mean())
            if steps == 8 and guidance != 2:
                words = [*world.DIRECTIONS, *world.COLOURS, *world.SHAPES]
                name = f"motion by word, 8 steps, guidance {guidance:g}"
                result[name] = by_word(scores, prompts, words)
    result["motion, train prompts"] = float(motion_scores(pipe, train_prompts).mean())
    scores = motion_scores(pipe, train_prompts, guidance_scale=4.0)
    result["motion, train prompts, guidance 4"] = float(scores.mean())
    scores = motion_scores(pipe, prompts, (0,), max_sequence_length=LONG_CONTEXT)
    result["motion, 512 tokens"] = float(scores.mean())
    draw_sheet(sample(pipe, prompts[::4], seed=0), out / "tiny_wan_samples.png")
    return result


def run_stage(stage, workdir, out, seed):
    """One stage; the training ones go on from the work folder, the others start over."""
    if stage == "vae":
        train_vae(workdir, seed)
    elif stage == "latents" and not (workdir / "latents.pt").exists():
        encode_clips(workdir, seed)
    elif stage == "transformer":
        train_transformer(workdir, seed)
    elif stage == "prompts":
        write_prompts(out)
    elif stage == "export":
        export_pipeline(workdir, out)
    elif stage == "scores":
        record(out, measure(workdir, out))


def record(out, result):
    """Puts the scores into scores.json under "wan", beside those of the image model."""
    path = out / "scores.json"
    scores = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(scores | {"wan": result}, indent=2) + "\n")
    print(json.dumps(result, indent=2))
