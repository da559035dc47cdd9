"""`skytrain.yaml`: what holds for every command in a folder. `skytrain init` writes it, and people edit it.

The order, for each value: the option, then the environment variable, then this file, then the default. The file has no
secret: others read it, and it belongs into version control.
"""

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator

from trainer.base.strict_yaml import read_yaml
from trainer.config.config_errors import explain
from trainer.config.errors import UserError
from trainer.config.extensions import TRACKERS, names
from trainer.config.model_config import Section

FILE = "skytrain.yaml"
OFF = "off"
HEAD = """\
# The defaults of every skytrain command in this folder. An option or an environment variable wins. No secrets: they
# stay in the environment.
"""


class Project(Section):
    """The values of `skytrain.yaml`. None: the default of the command."""

    store: str | None = Field(default=None, description="s3://BUCKET/PREFIX, file://FOLDER, or a path")
    tracking: str | None = Field(default=None, description="the URL of an MLflow server, names of trackers, or off")
    infra: str | None = Field(default=None, description="where launch rents: aws, gcp/us-central1, …")
    budget: float | None = Field(default=None, gt=0, description="dollars that a launch may cost")
    image: str | None = Field(default=None, description="the image of launches: REGISTRY/NAME@sha256:…, or none")

    @field_validator("store", "infra", "image")
    @classmethod
    def _is_given(cls, value: str | None) -> str | None:
        if value is not None and (not value or value != value.strip()):
            raise ValueError("empty, or blanks around it; leave the line out for the default")
        return value

    @field_validator("store", "tracking", "image")
    @classmethod
    def _has_no_secret(cls, value: str | None) -> str | None:
        if value and ("@" in urlsplit(value).netloc):
            raise ValueError("has a user or password in it; secrets belong in environment variables")
        return value

    @field_validator("tracking", mode="before")
    @classmethod
    def _is_server_or_off(cls, value: Any) -> Any:
        if value is False or value == OFF:  # `off` is a boolean in YAML
            return OFF
        if isinstance(value, str) and urlsplit(value).scheme not in ("http", "https"):
            known = names(TRACKERS)
            if not {name.strip() for name in value.split(",")} <= {*known}:
                raise ValueError(
                    f"not an http(s) URL of an MLflow server, not off, and no tracker ({', '.join(known)})"
                )
        return value

    def to_yaml(self) -> str:
        """The file's text. Values that are None stay there as comments."""
        import yaml

        lines = []
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            text = yaml.safe_dump({name: value}, allow_unicode=True, width=10_000).strip()
            lines.append(f"# {name}:  # {field.description}" if value is None else text)
        return HEAD + "\n".join(lines) + "\n"

    @classmethod
    def read(cls, path: Path) -> Self:
        """The values of a file; all None where there is none. UserError for an unknown key or a wrong value."""
        if not path.is_file():
            if path.exists():
                raise UserError(f"{path}: not a file; remove it, or write the file with skytrain init")
            return cls()
        values = read_yaml(path)
        if values is not None and not isinstance(values, dict):
            raise UserError(f"{path}: not of the form NAME: VALUE; its names are {', '.join(cls.model_fields)}")
        return cls.of(values or {}, str(path))

    @classmethod
    def of(cls, values: dict[str, Any], where: str) -> Self:
        """The project with these values. UserError for the first that is wrong, in one line."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise UserError(str(explain(error, cls, where)).partition("\n")[0]) from error

    def set_in(self, environment: MutableMapping[str, str]) -> None:
        """Set the variables of store and MLflow that the environment lacks. Child processes inherit them."""
        if self.store and not environment.get("SKYTRAIN_STORE"):
            environment["SKYTRAIN_STORE"] = self.store
        if not self.tracking or environment.get("MLFLOW_TRACKING_URI"):
            return
        if not urlsplit(self.tracking).scheme:
            environment["SKYTRAIN_TRACKING"] = environment.get("SKYTRAIN_TRACKING") or self.tracking
        elif environment.get("SKYTRAIN_TRACKING") != OFF:
            environment["MLFLOW_TRACKING_URI"] = self.tracking


def project() -> Project:
    """The project of this folder."""
    return Project.read(Path(FILE))
