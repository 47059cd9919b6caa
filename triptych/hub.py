"""A checkpoint by its name on the Hugging Face hub: from the cache, or downloaded.

`huggingface_hub` reads HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT.
"""

import os
import re
from pathlib import Path

from triptych.stack import StackError

_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_FILES = ["*.json", "*.safetensors", "*.jinja"]
# Other formats and copies: in folders, and Mistral's own beside the files that are read.
_IGNORED = ["*/*", "consolidated*.safetensors"]


def resolve_model(model: Path, revision: str | None = None) -> tuple[Path, str | None]:
    """The directory of a checkpoint, and the hub's name of it; None: it is a local one.

    Raises:
        StackError: the hub's answer, in a line.
    """
    name = str(model)
    if os.path.exists(model) or not _NAME.fullmatch(name):
        if revision is not None:
            raise StackError("--revision needs a model of the hub, not a directory", 2)
        return model, None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = f"{name} is no directory, and from the hub it"
    try:
        found = snapshot_download(
            name, revision=revision, allow_patterns=_FILES, ignore_patterns=_IGNORED
        )
    except GatedRepoError:
        cause = "needs a licence to be accepted there and a token (HF_TOKEN)"
    except RepositoryNotFoundError:
        cause = "is refused: there is no such model, or the token (HF_TOKEN) may not read it"
    except RevisionNotFoundError:
        cause = f"has no revision {revision}"
    except LocalEntryNotFoundError:
        cause = "cannot be had: it is not in the cache, and the hub is off (HF_HUB_OFFLINE) or away"
    except HfHubHTTPError as error:
        status = error.response.status_code
        refused = "the token (HF_TOKEN) is refused" if status in (401, 403) else "try again"
        cause = f"cannot be had: status {status}, {refused}"
    except OSError as error:
        cause = f"cannot be had: {error}"
    except Exception as error:  # a transport's; files that are whole are kept
        cause = f"did not arrive whole ({type(error).__name__}); try again: whole files are kept"
    else:
        return Path(found), name
    raise StackError(f"{where} {cause}", 2)
