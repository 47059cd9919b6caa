"""Finds a checkpoint by its name on the Hugging Face hub, in the cache or by download.

`huggingface_hub` reads HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT.
"""

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from triptych.stack import StackError

_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_URL = re.compile(
    r"(?:https?:/+)?(?:www\.)?(?:huggingface\.co|hf\.co)/+([\w.-]+/[\w.-]+).*", re.ASCII
)
# The model card (README.md) says of a reranker that it is one.
_FILES = ["*.json", "*.safetensors", "*.jinja", "README.md"]
# Copies of the weights in other formats: in subfolders, and Mistral's files beside the others. The
# folders of sentence-transformers' modules, such as `1_Pooling`, begin with a digit.
_IGNORED = ["[!0-9]*/*", "*/*.safetensors", "consolidated*.safetensors"]


def resolve_model(model: Path, revision: str | None = None) -> tuple[Path, str | None]:
    """Returns the directory of a checkpoint and its name on the hub.

    The name is None if `model` is a local directory.

    Raises:
        StackError: the model cannot be downloaded. The message has the reason in one line.
    """
    name = str(model)
    if os.path.isdir(model):
        if revision is not None:
            raise StackError("--revision needs a model of the hub, not a directory", 2)
        return model, None
    if not _NAME.fullmatch(name) or os.path.exists(model) or name.lower().endswith(".gguf"):
        raise StackError(_no_model(name), 2)
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        found = snapshot_download(
            name, revision=revision, allow_patterns=_FILES, ignore_patterns=_IGNORED
        )
    except GatedRepoError:
        cause = (
            f"its licence must be accepted first: accept it at {constants.ENDPOINT}/{name}, and "
            "export a token of that account as HF_TOKEN"
        )
    except RepositoryNotFoundError:
        cause = (
            f"{_hub()} has no such model, or it is private and HF_TOKEN does not open it; nor is "
            "there such a directory here"
        )
    except RevisionNotFoundError:
        cause = f"it has no revision {revision}"
    except LocalEntryNotFoundError:
        is_off = constants.HF_HUB_OFFLINE
        why = "HF_HUB_OFFLINE is set" if is_off else f"there is no connection to {_hub()}"
        cause = f"{why}, and the model is not in the local cache ({constants.HF_HUB_CACHE})"
    except HfHubHTTPError as error:
        status = error.response.status_code
        what = "refuses the token (HF_TOKEN)" if status in (401, 403) else "failed, try again later"
        cause = f"{_hub()} {what} (status {status})"
    except OSError as error:
        cause = str(error)
    except Exception as error:  # raised by the HTTP library
        cause = (
            f"the download broke off ({type(error).__name__}): try again, complete files are not "
            "downloaded again"
        )
    else:
        return Path(found), name
    raise StackError(f"cannot download {name}: {cause}", 2)


def _hub() -> str:
    """Host name of the hub."""
    from huggingface_hub import constants

    return urlsplit(constants.ENDPOINT).netloc


def _no_model(given: str) -> str:
    """Returns why something is neither a directory nor the name of a model on the hub."""
    if given.lower().endswith(".gguf"):
        return (
            f"{given} is a GGUF file, which is not served: serve the model in safetensors, by its "
            "name on the hub or its directory (FP8, AWQ, GPTQ and NVFP4 are served)"
        )
    if url := _URL.fullmatch(given):
        return f"models on the hub are served by their names: triptych serve {url[1]}"
    if os.path.exists(given):
        return f"{given} is a file: give the directory of the checkpoint"
    if "/" not in given:
        return (
            f"there is no directory {given} here, and the name of a model on the hub begins with "
            "its organisation: ORG/NAME, such as Qwen/Qwen3-VL-8B-Instruct"
        )
    return f"no model at {given}: there is no such directory"
