"""Log levels of the libraries that flowgrpo uses."""

import logging
import warnings


def quiet_libraries() -> None:
    """Limits diffusers and transformers to errors and turns off their progress bars."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for library in (diffusers_logging, transformers_logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning)
