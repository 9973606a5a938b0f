"""The Hugging Face Hub: the commit of a model's revision, its files, and their contents.

Only this module talks to the Hub, through huggingface_hub, and turns its errors into ours. huggingface_hub reads
``HF_ENDPOINT`` and ``HF_TOKEN``. Its ``hf_hub_download`` loses an unfinished file when the process ends, so this module
calls the function underneath, ``http_get``, with files that it keeps. That function uses plain HTTP, which the Hub
offers for every file up to 50 GB, including those it stores as Xet.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from stages.parts.base.errors import (
    AccessDenied,
    ConfigError,
    DamagedModel,
    HubUnavailable,
    InvalidName,
    ModelNotFound,
    PermanentError,
    RevisionNotFound,
    SlipwayError,
)
from stages.parts.base.log import say
from stages.parts.model.safetensors import LARGEST_SMALL_BYTES, Tensor, damaged

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer
    from huggingface_hub.errors import HfHubHTTPError
    from tenacity import RetryCallState, Retrying

COMMIT: Final = re.compile(r"[0-9a-f]{40}")
TIMEOUT_S: Final = 20.0
"""Timeout of a request about a model. Downloads use huggingface_hub's HF_HUB_DOWNLOAD_TIMEOUT (10 s without a byte)."""
ATTEMPTS: Final = 3
"""Attempts before the Hub counts as unavailable. Then the engine retries the stage."""
FIRST_PAUSE_S: Final = 0.5
"""Pause before the second attempt; doubled before the third."""
LONGEST_PAUSE_S: Final = 60.0
"""If the Hub asks for a longer pause (Retry-After), the stage ends and the engine retries it."""


@dataclass(frozen=True)
class HubFile:
    """A file in a repository. Large (LFS) files have a ``sha256``; ``git_sha1`` identifies the others."""

    path: str
    size_bytes: int
    sha256: str | None
    git_sha1: str | None


@dataclass(frozen=True)
class Listing:
    """The files of a repository at one commit."""

    commit: str
    files: tuple[HubFile, ...]

    @property
    def paths(self) -> list[str]:
        return [file.path for file in self.files]


def endpoint() -> str:
    """Return the Hub's base URL, without a slash at the end."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def describe(model: str, revision: str) -> Listing:
    """Find the current commit of *revision* (a branch, a tag or a commit) and its files, in one request.

    Raises:
        ModelNotFound, RevisionNotFound, AccessDenied, InvalidName, ConfigError: another attempt would fail as well.
        HubUnavailable: several attempts failed.
    """
    from huggingface_hub import HfApi

    for attempt in _retrying():
        with attempt, _our_errors(model, revision):
            info = HfApi().model_info(model, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
    if info.sha is None or not COMMIT.fullmatch(info.sha):
        raise HubUnavailable(f"{_host()} gave no commit for {model}", hint="check that HF_ENDPOINT is a Hub")
    files = (
        HubFile(sibling.rfilename, sibling.size or 0, sibling.lfs.sha256 if sibling.lfs else None, sibling.blob_id)
        for sibling in info.siblings or ()
    )
    return Listing(info.sha, tuple(files))


def download(model: str, commit: str, path: str, partial: BinaryIO) -> None:
    """Append the missing bytes of a file to *partial*, which contains its first bytes or nothing.

    After a lost connection the download continues where it stopped, as long as ``ATTEMPTS`` bring some bytes.

    Raises:
        OSError: *partial* can't be written. The other errors are those of ``describe``.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]
    from huggingface_hub.utils.tqdm import silent_tqdm

    url = hf_hub_url(model, path, revision=commit)
    # A compressed response has another length, and can't be continued in the middle.
    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    while True:
        before = partial.seek(0, os.SEEK_END)
        try:
            for attempt in _retrying():
                with attempt, _our_errors(model, commit, path, partial):
                    have = partial.seek(0, os.SEEK_END)
                    http_get(url, partial, resume_size=have, headers=headers, tqdm_class=silent_tqdm)
            return
        except HubUnavailable:
            if partial.tell() <= before:
                raise


def upload(folder: Path, model: str, branch: str = "main") -> str:
    """Make the files of *folder* all that a branch has, in one commit, and return that. A repository made for it is
    private. Raises the errors of ``describe``."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api, files = HfApi(), {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    with _our_errors(model, branch):
        model = api.create_repo(model, private=True, exist_ok=True).repo_id  # with the user's name, if it had no other
        api.create_branch(model, branch=branch, exist_ok=True)
        others = {*api.list_repo_files(model, revision=branch)} - {*files, ".gitattributes"}
        changes: list[Any] = [*map(CommitOperationDelete, others), *map(CommitOperationAdd, files, files.values())]
        return api.create_commit(model, changes, commit_message=folder.name, revision=branch).oid


def read_small(model: str, commit: str, path: str) -> bytes:
    """Read a small file. Raises the errors of ``describe``, and DamagedModel if it is too large to be one."""
    content = _SmallFile()
    download(model, commit, path, content)
    return content.getvalue()


class _SmallFile(io.BytesIO):
    """Takes no more than any small file has."""

    def write(self, content: Buffer) -> int:
        if self.tell() + memoryview(content).nbytes > LARGEST_SMALL_BYTES:
            raise damaged("a file besides the weights has gigabytes")
        return super().write(content)


@dataclass(frozen=True)
class DatasetFile:
    """A file of a data set on the Hub, at a commit."""

    dataset: str
    commit: str
    path: str


def dataset_file(file: DatasetFile) -> Path:
    """Find a file in huggingface_hub's cache, or download it. Only the latter needs the Hub.

    Raises:
        HubUnavailable: the Hub does not answer, and the file is not in the cache.
        PermanentError: the Hub refuses.
    """
    from huggingface_hub import errors as hub
    from huggingface_hub import hf_hub_download

    name = f"{file.path} of the data set {file.dataset} at {file.commit[:12]}"
    try:
        return Path(hf_hub_download(file.dataset, file.path, repo_type="dataset", revision=file.commit))
    except hub.LocalEntryNotFoundError as error:
        hint = "check the network and HF_ENDPOINT"
        raise HubUnavailable(f"{_host()} can't be reached, and {name} is not in the cache", hint=hint) from error
    except hub.HfHubHTTPError as error:
        status = error.response.status_code
        kind = HubUnavailable if status in (408, 429) or status >= 500 else PermanentError
        hint = "check HF_ENDPOINT: a mirror may lack it"
        raise kind(f"{_host()} does not give {name} ({status})", hint=hint) from error


def read_tensors(model: str, commit: str, path: str) -> list[Tensor]:
    """Read the header of a safetensors file: two requests for a range of bytes.

    Raises the errors of ``describe``, and DamagedModel if it is not a safetensors file.
    """
    from huggingface_hub import HfApi

    for attempt in _retrying():
        with attempt, _our_errors(model, commit, path):
            metadata = HfApi().parse_safetensors_file_metadata(model, path, revision=commit)
    return [
        Tensor(Path(path), name, str(tensor.dtype), tuple(tensor.shape), *tensor.data_offsets)
        for name, tensor in metadata.tensors.items()
    ]


@contextlib.contextmanager
def _our_errors(model: str, revision: str, path: str = "", partial: BinaryIO | None = None) -> Iterator[None]:
    import httpx2
    from huggingface_hub import errors as hub

    try:
        yield
    except hub.OfflineModeIsEnabled as error:
        raise ConfigError(
            f"{model} at {revision} needs {_host()}, and HF_HUB_OFFLINE forbids requests to it",
            hint="unset HF_HUB_OFFLINE, or give a local directory as the model",
        ) from error
    except hub.HFValidationError as error:
        raise InvalidName(f"{model!r} is not a model's name", hint="use 'org/name' as on the Hub") from error
    except hub.SafetensorsParsingError as error:
        raise damaged(f"{path} of {model} is not a safetensors file") from error
    except hub.HfHubHTTPError as error:
        if partial is not None and error.response.status_code == 416:
            partial.truncate(0)  # it is longer than the Hub's file, so it is not the beginning of that file
        raise _answered(error, model, revision, path) from error
    except (httpx2.TransportError, httpx2.TooManyRedirects, httpx2.InvalidURL, ConnectionError, RuntimeError) as error:
        hint = "check the network, the proxy variables and HF_ENDPOINT; the downloaded part is kept"
        raise HubUnavailable(f"{_host()} can't be reached: {str(error) or type(error).__name__}", hint=hint) from error
    except json.JSONDecodeError as error:
        hint = "check HF_ENDPOINT, and whether a proxy or a login page answers instead"
        raise HubUnavailable(f"{_host()} did not answer as a Hub does", hint=hint) from error


def _answered(error: HfHubHTTPError, model: str, revision: str, path: str) -> SlipwayError:
    """Our error for an HTTP error of the Hub."""
    from huggingface_hub import errors as hub
    from huggingface_hub import get_token

    status, page, has_token = error.response.status_code, f"{endpoint()}/{model}", get_token() is not None
    if isinstance(error, hub.GatedRepoError):
        token = "with the account of your HF_TOKEN" if has_token else "and set HF_TOKEN to a token of your account"
        hint = f"accept it at {page} {token}"
        return AccessDenied(f"{model} is gated: its license must be accepted first", hint=hint)
    if isinstance(error, hub.RevisionNotFoundError):
        return RevisionNotFound(f"{model} has no revision {revision!r}", hint=f"for its branches see {page}/tree/main")
    if isinstance(error, hub.EntryNotFoundError):
        return DamagedModel(f"{model} lists {path} at {revision} but does not have it", hint="tell the publisher")
    if isinstance(error, hub.RepositoryNotFoundError) and not (status == 401 and has_token):
        private = "that your HF_TOKEN can read it" if has_token else "set HF_TOKEN to a token that can read it"
        return ModelNotFound(f"{_host()} has no model {model}", hint=f"check the spelling; if it is private, {private}")
    if status in (401, 403):
        return AccessDenied(
            f"{_host()} refused access to {model} ({status})",
            hint="HF_TOKEN is invalid, expired or lacks the permission for this model" if has_token else "set HF_TOKEN",
        )
    if status in (408, 416, 429) or status >= 500:
        state = "limits the rate of requests" if status == 429 else "has a problem"
        return HubUnavailable(f"{_host()} {state} ({status}) at {path or model}", hint="try again in a few minutes")
    return PermanentError(f"{_host()} refused the request for {path or model} ({status})", hint="check HF_ENDPOINT")


def _host() -> str:
    return endpoint().partition("://")[2] or endpoint()


def _retrying() -> Retrying:
    from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

    def may_pass(error: BaseException) -> bool:
        return isinstance(error, HubUnavailable) and _asked_pause_s(error) <= LONGEST_PAUSE_S

    growing = wait_exponential(FIRST_PAUSE_S)
    return Retrying(
        retry=retry_if_exception(may_pass),
        stop=stop_after_attempt(ATTEMPTS),
        wait=lambda state: max(growing(state), _asked_pause_s(_error(state))),
        before_sleep=lambda state: say(f"{_error(state)}; trying again"),
        reraise=True,
    )


def _error(state: RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome else None


def _asked_pause_s(error: BaseException | None) -> float:
    """Return the pause in seconds for which the Hub asked (Retry-After); 0 if it asked for none."""
    response = getattr(error.__cause__ if error else None, "response", None)
    value = response.headers.get("Retry-After", "") if response is not None else ""
    return float(value) if value.isdigit() else 0.0
