"""Models of the Hugging Face hub, in its own cache (`HF_HOME`), which other programs share."""

from __future__ import annotations

from pathlib import Path

from mlxd.models.sources import Repository, SourceError

# Weights, tokenizer and templates; not the same weights in other formats.
_PATTERNS = [
    *("*.json", "*.jsonl", "*.jinja", "*.txt", "*.py"),
    *("model*.safetensors", "*.model", "*.tiktoken"),
]


def local_path(source: Repository) -> Path | None:
    """The repository's folder, without asking the network.

    None also where the hub's cache knows of files that are not there yet. Of what another
    program began to download, it may know nothing.
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - half a second
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(
            snapshot_download(
                source.repo,
                revision=source.revision,
                allow_patterns=_PATTERNS,
                local_files_only=True,
            )
        )
    except LocalEntryNotFoundError:
        return None


def fetch(source: Repository) -> Path:
    """Download what is not there yet; progress goes to standard error.

    Raises:
        SourceError: the hub does not have it, or cannot be reached.
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - half a second

    try:
        return Path(
            snapshot_download(source.repo, revision=source.revision, allow_patterns=_PATTERNS)
        )
    except OSError as error:  # the base of all that the hub and its cache raise
        reason = str(error).strip().splitlines()[0]
        raise SourceError(f"{source.repo} cannot be fetched: {reason}") from error
