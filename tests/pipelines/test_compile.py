"""Compiled blocks: what compiling changes in the process, and that it is undone."""

import pytest
import torch
from families import built

from flowgrpo import ConfigError
from flowgrpo.pipelines.compile import MAX_GRAPHS, compiled, is_compiled
from flowgrpo.pipelines.parts import find_denoisers

LIMITS = ("recompile_limit", "fail_on_recompile_limit_hit")


@pytest.fixture
def before():
    """Limits that compiling must change, whatever other tests left behind."""
    with torch._dynamo.config.patch(dict(zip(LIMITS, (3, False), strict=True))):
        yield limits()


def limits():
    return tuple(getattr(torch._dynamo.config, name) for name in LIMITS)


def test_limits_of_dynamo_are_changed_within_the_block_only(before):
    denoisers = find_denoisers(built("flux"))
    with compiled(denoisers, backend="eager"):
        assert is_compiled(denoisers)
        assert limits() == (MAX_GRAPHS, True)
    assert not is_compiled(denoisers)
    assert limits() == before


def test_limits_of_dynamo_are_restored_after_an_error(before):
    with pytest.raises(ConfigError), compiled({"linear": torch.nn.Linear(2, 2)}):
        pass
    with pytest.raises(KeyError), compiled(find_denoisers(built("flux")), backend="eager"):
        raise KeyError
    assert limits() == before
