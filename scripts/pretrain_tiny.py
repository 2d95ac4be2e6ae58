"""Makes everything in assets/ from nothing but rendered scenes, on a CPU.

    python scripts/pretrain_tiny.py                      # every stage, about an hour on two cores
    python scripts/pretrain_tiny.py scores --out assets  # one stage of: vae latents transformer
                                                         # clip prompts export scores
    python scripts/pretrain_tiny.py --model wan          # the video model, see pretrain_video.py

A killed run goes on where it was when started again: each training stage keeps its state in the
work folder. The stages of the image model, in order:

vae          AutoencoderKL on single scenes.
latents      Each scene is encoded once; the transformer never sees pixels.
transformer  SD3 transformer and both CLIP text encoders together, from scratch, by flow matching.
clip         An open_clip model of the same scenes, contrastive.
prompts      The four prompt files; words that the recogniser misreads on a clean picture go.
export       The folders of the averaged weights, and the scheduler's shift.
scores       Measures the exported folders; writes scores.json and pretraining.png.

The transformer's captions are partly wrong, as captions from the web are: a share of the letters on
a sign, and of the counts, colours and kinds of shapes, is random. So the model draws clean letters
and shapes but often not those that were asked for: a base that reinforcement learning can improve.
With right captions, 800 steps spell nine of ten held-out letters and nothing is left to learn.

Where this differs from Stable Diffusion 3: no T5 (its context is one zero token, sometimes 256),
text encoders learned jointly rather than taken from CLIP, a VAE without perceptual or adversarial
loss, and adaLN-Zero initialisation. L = 16 tokens.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import json
import random
import time
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import open_clip
import pretrain_video
import tiny_world as world
import torch
import torch.nn.functional as F
import typer
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from PIL import Image
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm
from training_loop import load_averaged, quiet, train, write
from transformers import AddedToken, CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

STAGES = ("vae", "latents", "transformer", "clip", "prompts", "export", "scores")
VAE_STEPS = 2600
TRANSFORMER_STEPS = 2000
CLIP_STEPS = 2000
NUM_PROMPTS = {"train": 180, "test": 64}
NUM_SIGNS, NUM_SHAPES = 36_000, 18_000  # the transformer's scenes
MISSPELLED = 0.42  # share of random letters in the captions of signs
MISDESCRIBED = 0.35  # share of random counts, colours and kinds in those of shapes
PROMPT_DROPOUT = 0.1
LONG_CONTEXT = 256  # the stock pipeline's default number of zero tokens in T5's place
SHIFTS = (1.0, 2.0, 3.0)  # of the scheduler; the best one is exported


# Stage vae


def to_pixels(images):
    """Pillow pictures as (B, 3, H, W) in [-1, 1]."""
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) / 127.5 - 1


def random_scene(rng, sign_share=2 / 3):
    """One (prompt, picture) that training may see."""
    return world.random_sign(rng) if rng.random() < sign_share else world.random_shapes(rng)


def build_vae():
    """4x down, so that a picture is 8 channels of 8 x 16: 1,024 latent dimensions."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 64),
        layers_per_block=1,
        latent_channels=8,
        norm_num_groups=8,
        sample_size=64,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def train_vae(workdir, seed, batch_size=24):
    """L1 and squared error, and a little KL that keeps the latents smooth."""
    torch.manual_seed(seed)
    vae = build_vae()

    def loss_at(step):
        rng = random.Random(f"vae {seed} {step}")
        pixels = to_pixels([random_scene(rng)[1] for _ in range(batch_size)])
        generator = torch.Generator().manual_seed(rng.getrandbits(40))
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(pixels).latent_dist
            decoded = vae.decode(posterior.sample(generator)).sample.float()
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        return F.l1_loss(decoded, pixels) + F.mse_loss(decoded, pixels) + 5e-4 * kl

    train("vae", vae, loss_at, workdir, VAE_STEPS, lr=2e-3)


# Stage latents


def load_vae(workdir):
    """The trained autoencoder, with the latents' shift and scale once they are measured."""
    vae = load_averaged(build_vae(), workdir / "vae.pt")
    if (workdir / "latents.pt").exists():
        data = torch.load(workdir / "latents.pt", mmap=True, weights_only=True)
        vae.register_to_config(
            shift_factor=data["shift_factor"], scaling_factor=data["scaling_factor"]
        )
    return vae


def random_captions(seed):
    """(prompts that the pictures show, captions that training pairs with them), signs first."""
    rng = random.Random(f"latents {seed}")
    signs = [world.random_sign(rng)[0] for _ in range(NUM_SIGNS)]
    shapes = [world.random_shapes(rng)[0] for _ in range(NUM_SHAPES)]
    rng = random.Random(f"captions {seed}")
    captions = [world.misspell(rng, prompt, MISSPELLED) for prompt in signs]
    captions += [world.misdescribe(rng, prompt, MISDESCRIBED) for prompt in shapes]
    return signs + shapes, captions


@torch.no_grad()
def encode_scenes(workdir, seed, batch_size=200):
    """Encodes each distinct picture once.

    Writes latents.pt: latents (N, 8, 8, 16) scaled to mean 0 and deviation 1, token_ids (N, L),
    and the two factors.
    """
    vae = load_vae(workdir)
    prompts, captions = random_captions(seed)
    rows = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
    distinct = list(rows)
    encoded = []
    for first in tqdm(range(0, len(distinct), batch_size), "latents", disable=quiet):
        images = [world.draw(prompt) for prompt in distinct[first : first + batch_size]]
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(to_pixels(images)).latent_dist
        encoded.append(posterior.mode().float())
    latents = torch.cat(encoded)[[rows[prompt] for prompt in prompts]]
    shift, scale = latents.mean().item(), 1 / latents.std().item()
    data = {
        "latents": ((latents - shift) * scale).half(),
        "token_ids": tokenize(build_tokenizer(), captions),
        "shift_factor": shift,
        "scaling_factor": scale,
    }
    write(workdir / "latents.pt", data)


# Stage transformer


def build_tokenizer():
    """One token for each of the world's fixed words, one a letter (a byte) for anything else."""
    byte_tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [word for word in world.FIXED_WORDS if len(word) > 1]
    endings = [token + "</w>" for token in byte_tokens]
    vocab = byte_tokens + endings + words + ["<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer({token: i for i, token in enumerate(vocab)}, [], model_max_length=16)
    tokenizer.add_tokens([AddedToken(word, single_word=True, normalized=True) for word in words])
    return tokenizer


def tokenize(tokenizer, prompts):
    """(B, L) token ids, padded and cut as the pipeline does it."""
    arguments = {"padding": "max_length", "max_length": 16, "truncation": True}
    return tokenizer(prompts, return_tensors="pt", **arguments).input_ids


def build_text_encoder(tokenizer, width):
    """Two layers: the first feeds the joint attention, both feed the pooled embedding."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=width // 16,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    encoder = CLIPTextModelWithProjection(config)
    for module in encoder.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.3)
    return encoder


def build_transformer():
    """4 layers x 160 on 32 image tokens; adaLN-Zero, which diffusers leaves to whoever trains."""
    transformer: Any = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=8,
        out_channels=8,
        num_layers=4,
        num_attention_heads=5,
        attention_head_dim=32,
        caption_projection_dim=160,
        joint_attention_dim=160,
        pooled_projection_dim=160,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    norms = [block.norm1 for block in transformer.transformer_blocks]
    norms += [block.norm1_context for block in transformer.transformer_blocks]
    for linear in [norm.linear for norm in [*norms, transformer.norm_out]] + [transformer.proj_out]:
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
    return transformer


def build_denoiser():
    """The transformer and its text encoders, 64 and 96 wide: 160 together."""
    tokenizer = build_tokenizer()
    return nn.ModuleDict(
        {
            "transformer": build_transformer(),
            "text_encoder": build_text_encoder(tokenizer, 64),
            "text_encoder_2": build_text_encoder(tokenizer, 96),
        }
    )


def encode_prompts(denoiser, token_ids, num_zero_tokens):
    """Prompt embeddings (B, L + num_zero_tokens, 160) and pooled (B, 160), as the pipeline's."""
    encoders = (denoiser["text_encoder"], denoiser["text_encoder_2"])
    outputs = [encoder(token_ids, output_hidden_states=True) for encoder in encoders]
    prompt_embeds = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
    pooled = torch.cat([output.text_embeds for output in outputs], dim=-1)
    return F.pad(prompt_embeds, (0, 0, 0, num_zero_tokens)), pooled


def train_transformer(workdir, seed, batch_size=64, sigma_shift=2.0):
    """Flow matching: the velocity from picture to noise, at logit-normal sigmas, shifted.

    On so few tokens plain attention is twice as fast as the fused kernel on a CPU.
    """
    torch.manual_seed(seed)
    data = torch.load(workdir / "latents.pt", weights_only=True)
    empty = tokenize(build_tokenizer(), [""])
    denoiser = build_denoiser()

    def loss_at(step):
        generator = torch.Generator().manual_seed(seed + 7919 * (step + 1))
        num_zero_tokens = LONG_CONTEXT if step % 32 == 31 else 1
        size = batch_size // 4 if num_zero_tokens > 1 else batch_size
        picked = torch.randint(len(data["latents"]), (size,), generator=generator)
        dropped = torch.rand(size, 1, generator=generator) < PROMPT_DROPOUT
        token_ids = torch.where(dropped, empty, data["token_ids"][picked])
        sigma = torch.randn(size, generator=generator).sigmoid()
        sigma = sigma_shift * sigma / (1 + (sigma_shift - 1) * sigma)
        latents = data["latents"][picked].float()
        noise = torch.randn(latents.shape, generator=generator)
        noisy = torch.lerp(latents, noise, sigma.view(-1, 1, 1, 1))
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            prompt_embeds, pooled = encode_prompts(denoiser, token_ids, num_zero_tokens)
            arguments = (noisy, prompt_embeds, pooled, 1000 * sigma)
            velocity = denoiser["transformer"](*arguments, return_dict=False)[0]
        return F.mse_loss(velocity.float(), noise - latents)

    train("transformer", denoiser, loss_at, workdir, TRANSFORMER_STEPS, lr=1e-3)


# Stage clip

CLIP_CONFIG: dict[str, Any] = {
    "model_cfg": {
        "embed_dim": 64,
        "vision_cfg": {
            "image_size": [world.HEIGHT, world.WIDTH],
            "layers": 3,
            "width": 96,
            "head_width": 24,
            "patch_size": 8,
        },
        "text_cfg": {
            "context_length": 16,
            "vocab_size": len(build_tokenizer()),
            "hf_tokenizer_name": "tiny-clip",
            "width": 96,
            "heads": 4,
            "layers": 2,
        },
    },
    "preprocess_cfg": {
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
        "interpolation": "bicubic",
        "resize_mode": "squash",
    },
}


def contrastive_batch(rng, num_pairs):
    """(prompts, pictures), distinct: half shapes, half signs in pairs that are one letter apart."""
    groups = rng.sample(world.split_shapes()[0], num_pairs // 2)
    scenes = {world.shapes_prompt(group): world.draw_shapes(group) for group in groups}
    while len(scenes) < num_pairs:
        colour, word = rng.choice(list(world.COLOURS)), world.random_word(rng)
        for variant in (word, world.change_letter(rng, word)):
            scenes[world.sign_prompt(colour, variant)] = world.draw_sign(colour, variant)
    return list(scenes)[:num_pairs], list(scenes.values())[:num_pairs]


def roughen(pixels, generator):
    """Shifts a batch by up to 2 pixels and adds noise: generated pictures are not clean ones."""
    shift = torch.randint(-2, 3, (2,), generator=generator).tolist()
    level = 0.3 * torch.rand(len(pixels), 1, 1, 1, generator=generator)
    noise = torch.randn(pixels.shape, generator=generator)
    return pixels.roll(shift, dims=(2, 3)) + level * noise


def train_clip(workdir, seed, batch_size=128):
    """The symmetric contrastive loss of CLIP; both towers from scratch."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = open_clip.CLIP(**CLIP_CONFIG["model_cfg"])

    def loss_at(step):
        rng = random.Random(f"clip {seed} {step}")
        prompts, images = contrastive_batch(rng, batch_size)
        generator = torch.Generator().manual_seed(rng.getrandbits(40))
        pixels = roughen(to_pixels(images), generator)
        with torch.autocast("cpu", torch.bfloat16):
            image_features = model.encode_image(pixels, normalize=True)
            text_features = model.encode_text(tokenize(tokenizer, prompts), normalize=True)
        scale = model.logit_scale.exp().clamp(max=100)
        logits = scale * image_features.float() @ text_features.float().T
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    train("clip", model, loss_at, workdir, CLIP_STEPS, lr=1e-3)


def export_clip(workdir, out):
    """The folder that open_clip opens as `local-dir:assets/tiny-clip`."""
    folder = out / "tiny-clip"
    folder.mkdir(parents=True, exist_ok=True)
    model = load_averaged(open_clip.CLIP(**CLIP_CONFIG["model_cfg"]), workdir / "clip.pt")
    weights = {name: weight.half() for name, weight in model.state_dict().items()}
    save_file(weights, folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps(CLIP_CONFIG, indent=2) + "\n")
    build_tokenizer().save_pretrained(folder)


# Stage prompts


@cache
def recogniser():
    """rapidocr; its models come with the package."""
    from rapidocr import RapidOCR

    return RapidOCR(params={"Global.log_level": "error"})


def read(image):
    """What the recogniser sees in the whole picture, in capitals."""
    pixels = np.asarray(image.resize((96, 48), Image.Resampling.BICUBIC))[:, :, ::-1]
    result = recogniser()(np.ascontiguousarray(pixels), use_det=False, use_cls=False)
    return result.txts[0].upper() if result.txts else ""


def write_prompts(out, seed):
    """Four files, one prompt a line; a sign's word is in one of them only, in one colour.

    Test shapes are held out in both orders: "a circle and a square" and the reverse.
    """
    rng = random.Random(f"prompts {seed}")
    (out / "prompts").mkdir(parents=True, exist_ok=True)
    splits = zip(NUM_PROMPTS, world.split_words(), world.split_shapes(), strict=True)
    for split, words, scenes in splits:
        if split == "test":
            scenes = [scene for scene in scenes if scene[::-1] in scenes]
        signs = [(rng.choice(list(world.COLOURS)), word) for word in rng.sample(words, len(words))]
        signs = [sign for sign in signs if read(world.draw_sign(*sign)) == sign[1]]
        prompts = {
            "signs": [world.sign_prompt(*sign) for sign in signs],
            "shapes": [world.shapes_prompt(groups) for groups in rng.sample(scenes, len(scenes))],
        }
        for family, lines in prompts.items():
            lines = sorted(lines[: NUM_PROMPTS[split]])
            (out / "prompts" / f"{family}_{split}.txt").write_text("\n".join(lines) + "\n")


def read_prompts(out, name):
    """The lines of one prompt file."""
    return (out / "prompts" / f"{name}.txt").read_text().splitlines()


# Stage export


def build_pipeline(vae, denoiser, shift):
    """The stock pipeline, without T5."""
    return StableDiffusion3Pipeline(
        vae=vae,
        transformer=denoiser["transformer"],
        text_encoder=denoiser["text_encoder"],
        text_encoder_2=denoiser["text_encoder_2"],
        tokenizer=build_tokenizer(),
        tokenizer_2=build_tokenizer(),
        text_encoder_3=None,
        tokenizer_3=None,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
    )


def sample(pipe, prompts, seed, num_inference_steps=20, guidance_scale=1.0, batch_size=32, **call):
    """One picture for each prompt."""
    pipe.set_progress_bar_config(disable=True)
    call = {"height": world.HEIGHT, "width": world.WIDTH, "max_sequence_length": 1} | call
    images = []
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        images += pipe(
            batch,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            generator=torch.Generator().manual_seed(1000 * seed + first),
            **call,
        ).images
    return images


def edit_similarity(text, target):
    """1 - Levenshtein distance / longer length."""
    row = list(range(len(target) + 1))
    for i, letter in enumerate(text, 1):
        diagonal, row[0] = row[0], i
        for j, wanted in enumerate(target, 1):
            change = diagonal + (letter != wanted)
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, change)
    return 1 - row[-1] / max(len(text), len(target), 1)


def ocr_score(pipe, prompts, seeds=(0,), **call):
    """(mean edit similarity, share of exact readings) over prompts and seeds."""
    pairs = [
        (read(image), prompt.split('"')[1])
        for seed in seeds
        for image, prompt in zip(sample(pipe, prompts, seed, **call), prompts, strict=True)
    ]
    similarity = float(np.mean([edit_similarity(*pair) for pair in pairs]))
    return similarity, float(np.mean([text == word for text, word in pairs]))


def export_pipeline(workdir, out):
    """Saves the folder, with the scheduler's shift whose OCR at 6 and 20 steps is best."""
    vae = load_vae(workdir)
    denoiser = load_averaged(build_denoiser(), workdir / "transformer.pt")
    prompts = read_prompts(out, "signs_test")
    scores = {}
    for shift in SHIFTS:
        pipe = build_pipeline(vae, denoiser, shift)
        scores[shift] = [ocr_score(pipe, prompts, num_inference_steps=n)[0] for n in (6, 20)]
        print(f"shift {shift:g}: OCR {scores[shift][0]:.3f}, {scores[shift][1]:.3f}", flush=True)
    shift = max(SHIFTS, key=lambda shift: sum(scores[shift]))
    save_pipeline(build_pipeline(vae, denoiser, shift), out / "tiny-sd3")
    write(workdir / "shift.pt", {"shift": shift, "scores": scores})


def save_pipeline(pipe, folder):
    """Half precision on disk, but not the text encoders.

    Transformers opens a folder in the precision it was saved in and diffusers in float32, so a
    plain `from_pretrained` would feed half-precision embeddings to a float32 transformer.
    """
    pipe.vae.half()
    pipe.transformer.half()
    pipe.save_pretrained(folder)


# Stage scores


def load_pipeline(out):
    """As a user opens it."""
    pipe = StableDiffusion3Pipeline.from_pretrained(
        out / "tiny-sd3", text_encoder_3=None, tokenizer_3=None
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@torch.no_grad()
def reading_rate(pipe, prompts):
    """Share of clean signs that the recogniser still reads after the autoencoder."""
    pixels = to_pixels([world.draw(prompt) for prompt in prompts])
    decoded = pipe.vae.decode(pipe.vae.encode(pixels).latent_dist.mode()).sample
    texts = [read(image) for image in pipe.image_processor.postprocess(decoded)]
    return float(
        np.mean([f'"{text}"' in prompt for text, prompt in zip(texts, prompts, strict=True)])
    )


def clip_rank(out, prompts, images, num_captions=32):
    """Share of pictures whose caption tiny-clip ranks first among `num_captions` of the file."""
    name = f"local-dir:{out / 'tiny-clip'}"
    model, preprocess = open_clip.create_model_from_pretrained(name)
    tokenizer = open_clip.get_tokenizer(name)
    with torch.no_grad():
        images = model.encode_image(torch.stack([preprocess(i) for i in images]), normalize=True)
        texts = model.encode_text(tokenizer(prompts), normalize=True)
    first = [
        (images[i : i + num_captions] @ texts[i : i + num_captions].T).argmax(1)
        for i in range(0, len(prompts), num_captions)
    ]
    return float(np.mean([(f == torch.arange(len(f))).float().mean().item() for f in first]))


def images_per_second(pipe, prompt, repeats=5):
    """Rollouts: 16 pictures of one prompt, 6 steps, no guidance, latents only."""
    call = {
        "height": world.HEIGHT,
        "width": world.WIDTH,
        "max_sequence_length": 1,
        "num_inference_steps": 6,
        "guidance_scale": 1.0,
        "num_images_per_prompt": 16,
    }
    pipe(prompt, output_type="latent", **call)
    started = time.time()
    for _ in range(repeats):
        pipe(prompt, output_type="latent", **call)
    return 16 * repeats / (time.time() - started)


def measure(workdir, out, seeds=(0, 1, 2)):
    """Scores of the exported folders, as a user gets them; writes scores.json and the curve."""
    pipe = load_pipeline(out)
    names = ("signs_test", "shapes_test", "signs_train")
    prompts = {name: read_prompts(out, name) for name in names}
    scores = {
        "images_per_second": images_per_second(pipe, prompts["signs_test"][0]),
        "vae_reading_rate": reading_rate(pipe, prompts["signs_test"]),
        "shift": torch.load(workdir / "shift.pt", weights_only=True),
        "seconds": {
            name: torch.load(workdir / f"{name}.pt", mmap=True, weights_only=True)["seconds"]
            for name in ("vae", "transformer", "clip")
        },
    }
    for steps in (20, 6):
        for guidance in (1.0, 2.0, 4.0):
            call = {"num_inference_steps": steps, "guidance_scale": guidance}
            name = f"ocr, {steps} steps, guidance {guidance:g}"
            scores[name] = ocr_score(pipe, prompts["signs_test"], seeds, **call)
            print(name, scores[name], flush=True)
    scores["ocr, train words"] = ocr_score(pipe, prompts["signs_train"], seeds[:1])
    call = {"max_sequence_length": LONG_CONTEXT}
    scores["ocr, 256 zero tokens"] = ocr_score(pipe, prompts["signs_test"], seeds[:1], **call)
    for family in ("signs", "shapes"):
        captions = prompts[f"{family}_test"]
        drawn = [world.draw(prompt) for prompt in captions]
        scores[f"clip rank 1, {family} drawn"] = clip_rank(out, captions, drawn)
        images = sample(pipe, captions, seed=0)
        scores[f"clip rank 1, {family} generated"] = clip_rank(out, captions, images)
    path = out / "scores.json"
    video = json.loads(path.read_text()).get("wan") if path.exists() else None
    path.write_text(json.dumps(scores | ({"wan": video} if video else {}), indent=2) + "\n")
    print(json.dumps(scores, indent=2))


def plot_losses(workdir, out):
    """The three loss curves, smoothed, into pretraining.png."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(10, 2.6), layout="constrained")
    for axis, name in zip(axes, ("vae", "transformer", "clip"), strict=True):
        losses = torch.load(workdir / f"{name}.pt", mmap=True, weights_only=True)["losses"]
        smooth = np.convolve(losses, np.ones(50) / 50, "valid")
        axis.semilogy(smooth)
        axis.set(title=name, xlabel="step", ylabel="loss")
    figure.savefig(out / "pretraining.png", dpi=100)


def main(
    stages: Annotated[
        list[str] | None, typer.Argument(help="by default all, in order: " + " ".join(STAGES))
    ] = None,
    model: Annotated[str, typer.Option(help="sd3 or wan")] = "sd3",
    workdir: Annotated[Path, typer.Option(help="keeps a run's state")] = Path("runs/pretraining"),
    out: Annotated[Path, typer.Option(help="gets the finished folders")] = Path("assets"),
    seed: int = 0,
):
    """Makes assets/ from rendered scenes; a killed run goes on when started again."""
    models = {"sd3": (STAGES, run_stage), "wan": (pretrain_video.STAGES, pretrain_video.run_stage)}
    if model not in models:
        raise typer.BadParameter(f'model "{model}" is unknown; known: {", ".join(models)}')
    known, run = models[model]
    for stage in stages or known:
        if stage not in known:
            raise typer.BadParameter(f'stage "{stage}" is unknown; known: {", ".join(known)}')
    workdir = workdir / model
    workdir.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    for stage in stages or known:
        run(stage, workdir, out, seed)


def run_stage(stage, workdir, out, seed):
    """One stage; the training ones go on from the work folder, the others start over."""
    if stage == "vae":
        train_vae(workdir, seed)
    elif stage == "latents" and not (workdir / "latents.pt").exists():
        encode_scenes(workdir, seed)
    elif stage == "transformer":
        train_transformer(workdir, seed)
    elif stage == "clip":
        train_clip(workdir, seed)
    elif stage == "prompts":
        write_prompts(out, seed)
    elif stage == "export":
        export_pipeline(workdir, out)
        export_clip(workdir, out)
    elif stage == "scores":
        measure(workdir, out)
        plot_losses(workdir, out)


if __name__ == "__main__":
    typer.run(main)
