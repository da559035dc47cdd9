"""The variables and secrets that a job takes over from the launching shell."""

import pytest
from cloud_support import KEYS

from pipelines.cloud.request import secrets_from_shell, variables_from_shell
from trainer.errors import UserError

pytestmark = pytest.mark.usefixtures("clean_shell")


def test_a_job_takes_over_the_settings_of_the_store_and_hides_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items() | {("AWS_REGION", "eu-west-1"), ("WANDB", "another thing")}:
        monkeypatch.setenv(name, value)
    assert variables_from_shell(["A=b=c"]) == {"AWS_REGION": "eu-west-1", "A": "b=c"}
    assert secrets_from_shell() == KEYS
    assert secrets_from_shell(["WANDB"]) == KEYS | {"WANDB": "another thing"}


@pytest.mark.parametrize("text", ["AWS_SECRET_ACCESS_KEY=x", "MY_API_TOKEN=x", "DB_PASSWORD=x"])
def test_a_secret_is_not_taken_as_a_plain_variable(text: str) -> None:
    with pytest.raises(UserError, match="export it and use --secret") as refused:
        variables_from_shell([text])
    assert "=x" not in str(refused.value)


def test_a_password_in_an_address_is_not_taken_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://somebody:hunter2@mlflow.example.org")
    with pytest.raises(UserError, match="MLFLOW_TRACKING_URI: the value holds a secret") as refused:
        variables_from_shell()
    assert "hunter2" not in str(refused.value)


def test_a_secret_that_is_not_set_is_named() -> None:
    with pytest.raises(UserError, match="--secret HF_TOKEN: not set in this shell"):
        secrets_from_shell(["HF_TOKEN"])
