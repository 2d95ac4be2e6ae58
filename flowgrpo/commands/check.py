"""`flowgrpo check`: tests whether a pipeline can be trained."""

from collections.abc import Sequence
from typing import Any

from flowgrpo.commands.libraries import quiet_libraries
from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.config_file import load_config, parse_config, parse_overrides
from flowgrpo.data.columns import is_media
from flowgrpo.data.prompts import load_prompts
from flowgrpo.pipelines.loading import open_pipeline
from flowgrpo.preflight.pipeline_check import PROMPT, check_pipeline


def check(model: str, overrides: Sequence[str]) -> bool:
    """Checks a pipeline and prints a report.

    Args:
        model: name on the hub, folder of a pipeline, or config file.
        overrides: `name=value` for call arguments of the pipeline, `section.key=value` for
            settings.

    Returns:
        Whether the pipeline can be trained.
    """
    config, call = _config_and_call(model, overrides)
    quiet_libraries()
    source = config.prompts.train or [{"prompt": PROMPT}]
    row = load_prompts(source)[0]
    media = {name: call.pop(name) for name in list(call) if is_media(name)}
    if media:
        row = load_prompts([{"prompt": row.prompt, **row.columns, **media}])[0]
    report = check_pipeline(open_pipeline(config.model), settings=config, row=row, **call)
    print("\n".join(report.lines()))
    return report.ok


def _config_and_call(model: str, overrides: Sequence[str]) -> tuple[GRPOConfig, dict[str, Any]]:
    """Settings of a config file, or defaults for a model; and the call arguments."""
    settings = [override for override in overrides if "." in override.partition("=")[0]]
    call = parse_overrides([override for override in overrides if override not in settings])
    if model.endswith((".yaml", ".yml")):
        return load_config(model, settings), call
    return parse_config({"model": {"path": model}}, settings), call
