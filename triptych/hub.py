"""Finds a checkpoint by its name on the Hugging Face hub, in the cache or by download.

`huggingface_hub` reads HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT.
"""

import os
import re
from pathlib import Path

from triptych.stack import StackError

_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_FILES = ["*.json", "*.safetensors", "*.jinja"]
# Copies of the weights in other formats: in subfolders, and Mistral's files beside the others.
_IGNORED = ["*/*", "consolidated*.safetensors"]


def resolve_model(model: Path, revision: str | None = None) -> tuple[Path, str | None]:
    """Returns the directory of a checkpoint and its name on the hub.

    The name is None if `model` is a local directory.

    Raises:
        StackError: the model cannot be downloaded. The message has the reason in one line.
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

    where = f"{name} is not a directory, and the model on the Hugging Face hub"
    try:
        found = snapshot_download(
            name, revision=revision, allow_patterns=_FILES, ignore_patterns=_IGNORED
        )
    except GatedRepoError:
        cause = "requires that you accept its licence there and set a token (HF_TOKEN)"
    except RepositoryNotFoundError:
        cause = "is refused: it does not exist, or the token (HF_TOKEN) may not read it"
    except RevisionNotFoundError:
        cause = f"has no revision {revision}"
    except LocalEntryNotFoundError:
        cause = (
            "cannot be downloaded: it is not in the cache, and the hub is disabled "
            "(HF_HUB_OFFLINE) or unreachable"
        )
    except HfHubHTTPError as error:
        status = error.response.status_code
        refused = "the token (HF_TOKEN) is refused" if status in (401, 403) else "try again"
        cause = f"cannot be downloaded: status {status}, {refused}"
    except OSError as error:
        cause = f"cannot be downloaded: {error}"
    except Exception as error:  # raised by the HTTP library
        cause = (
            f"was not downloaded completely ({type(error).__name__}): try again, complete files "
            "are not downloaded again"
        )
    else:
        return Path(found), name
    raise StackError(f"{where} {cause}", 2)
