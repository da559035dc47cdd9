"""What a source of a recipe names, on this machine: a file of the Hub or a path, with the content that is pinned."""

import re
from hashlib import sha256
from pathlib import Path

from pipelines.run.text.hub import asked
from trainer.base.store import read_regular, sha256_of
from trainer.config.errors import UserError
from trainer.config.source import Source


def path_of(source: Source) -> Path:
    """The path of a source on this machine."""
    return Path(source.name).expanduser().absolute()


def check_content(source: Source, found: str, field: str) -> Source:
    """The source with the sha256 that was found. UserError if it is pinned to another one."""
    if source.sha256 not in (None, found):
        where = f"{field}: {source.unpinned}"
        raise UserError(
            f"{where}: its sha256 is {found}, and the recipe has {source.sha256}; use what the recipe names"
        )
    return source.pinned(found)


def bytes_of(source: Source, field: str, path: Path, remedy: str) -> bytes:
    """The content of the file that a source names, at its path here. UserError if it cannot be read, or is another one
    than pinned."""
    try:
        body = read_regular(path)
    except OSError as error:
        raise UserError(f"{field}: {source.unpinned}: cannot be read ({error.strerror}); {remedy}") from error
    check_content(source, sha256(body).hexdigest(), field)
    return body


def hub_file(source: Source, name: str, field: str) -> Path:
    """A file of a model of the Hub in the cache of its library, with the sha256 that the Hub names for large ones."""
    import huggingface_hub

    where, api = named(source, field), huggingface_hub.HfApi()
    path = Path(asked(where, lambda: api.hf_hub_download(source.name, name, revision=source.commit)))
    url = huggingface_hub.hf_hub_url(source.name, name, revision=source.commit)
    etag = asked(where, lambda: api.get_hf_file_metadata(url=url)).etag or ""
    if re.fullmatch("[0-9a-f]{64}", etag) and sha256_of(path) != etag:
        path.resolve().unlink()
        raise UserError(f"{where}/{name}: damaged on its way (sha256 differs); run again to fetch it again")
    return path


def named(source: Source, field: str) -> str:
    """A model of the Hub in a message."""
    return f"{field}: {source.place}@{(source.commit or '')[:12]}"
