"""Keeps the libraries underneath from printing over our own lines."""

import logging
import warnings


def quiet_libraries() -> None:
    """Only errors of diffusers and transformers are printed, and no progress bars of theirs."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for library in (diffusers_logging, transformers_logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning)
