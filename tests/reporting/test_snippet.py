"""The snippet uses plain diffusers with the scheduler, row and settings of the run."""

from diffusers import StableDiffusion3InpaintPipeline

from flowgrpo.core.config_file import parse_config
from flowgrpo.data.row import Row
from flowgrpo.reporting.snippet import inference_snippet


def test_the_snippet_has_scheduler_media_and_columns_of_the_call(tmp_path):
    config = parse_config(
        {
            "model": {
                "path": "someone/model",
                "dtype": "bfloat16",
                "scheduler": "DDIMScheduler",
                "scheduler_kwargs": {"timestep_spacing": "trailing"},
            },
            "sampling": {"call": {"guidance_scale": 2.0, "negative_prompt": "dull"}},
        }
    )
    columns = {"image": "in/a.png", "mask_image": "in/b.png", "negative_prompt": "grey", "level": 3}
    row = Row(prompt="a cat", columns=columns, source="rows.csv line 2")
    (tmp_path / "lora" / "transformer").mkdir(parents=True)
    (tmp_path / "lora" / "transformer" / "config.json").touch()
    code = inference_snippet(config, StableDiffusion3InpaintPipeline, tmp_path / "lora", row)
    assert code.splitlines() == [
        "import torch",
        "from diffusers import StableDiffusion3InpaintPipeline, DDIMScheduler",
        "from diffusers.utils import load_image",
        "pipe = StableDiffusion3InpaintPipeline.from_pretrained('someone/model', "
        "dtype=torch.bfloat16)",
        "pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, "
        "timestep_spacing='trailing')",
        f"pipe.transformer = type(pipe.transformer).from_pretrained('{tmp_path}/lora/transformer')",
        "image = pipe('a cat', guidance_scale=2.0, negative_prompt='grey', "
        "num_inference_steps=10, image=load_image('in/a.png'), "
        "mask_image=load_image('in/b.png').convert('L')).images[0]",
    ]
