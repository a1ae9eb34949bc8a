"""Every setting that an operator can give, read once from the environment.

`PENSTOCK_HOME` holds all state. Without `DATABASE_URL` and `BROKER_URL` the embedded PostgreSQL and Valkey are used;
`penstock up` writes where they listen to `run/services.json`, so that other commands find them.
"""

import json
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import platformdirs
from pydantic import AliasChoices, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from inference.memory.budget import SizeError, parse_size


def _size(value: object) -> object:
    """Sizes may be written as people do: 3GB, 2.5GiB."""
    if not isinstance(value, str):
        return value
    try:
        return parse_size(value)
    except SizeError as error:
        raise ValueError(str(error)) from None


class Config(BaseSettings):
    """Settings by environment variable; names below with `PENSTOCK_` in front, but for the two server addresses.

    PENSTOCK_MEMORY_BUDGET is what a worker may take in all, its engines and itself; by default, what is free when it
    starts, less a reserve.

    PENSTOCK_DEVICE is what engines compute on: auto takes CUDA where there is one, else the processor.

    A variable that is set to nothing counts as not set: an empty home would be the current folder.
    """

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_", env_ignore_empty=True, extra="ignore")

    home: Path = Field(default_factory=lambda: Path(platformdirs.user_data_dir("penstock")))
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    debug: bool = False
    public_url: str = ""
    allowed_hosts: str = "localhost,127.0.0.1,[::1]"
    language: str = "en"
    threads: int | None = Field(default=None, ge=1)
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    memory_budget_bytes: Annotated[int | None, BeforeValidator(_size)] = Field(
        default=None, ge=1, validation_alias=AliasChoices("PENSTOCK_MEMORY_BUDGET", "PENSTOCK_MEMORY_BUDGET_BYTES")
    )
    max_running_requests: int = Field(default=256, ge=1)
    worker_concurrency: int = Field(default=8, ge=1)
    shard_rows: int = Field(default=32, ge=1)
    flush_rows: int = Field(default=8, ge=1)
    lease_seconds: int = Field(default=60, ge=2)
    max_file_bytes: int = 200 * 1024 * 1024
    max_body_bytes: int = 16 * 1024 * 1024
    max_batch_rows: int = 50_000
    checkpoint_leaves: int = 1000
    checkpoint_seconds: int = 10
    ledger_origin: str = "penstock.local/ledger"
    database_url: str = Field(default="", validation_alias="DATABASE_URL")
    broker_url: str = Field(default="", validation_alias="BROKER_URL")

    @property
    def services_file(self) -> Path:
        return self.home / "run" / "services.json"

    @property
    def uses_embedded_database(self) -> bool:
        return not self.database_url

    @property
    def uses_embedded_broker(self) -> bool:
        return not self.broker_url

    def resolved_database_url(self) -> str:
        return self.database_url or str(self._running_services().get("database_url", ""))

    def resolved_broker_url(self) -> str:
        return self.broker_url or str(self._running_services().get("broker_url", ""))

    @property
    def running_port(self) -> int | None:
        """Of the dashboard that `penstock up` has started: another than this terminal's environment may name."""
        port = self._running_services().get("port")
        return port if isinstance(port, int) else None

    def _running_services(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self.services_file.read_text()))
        except (FileNotFoundError, json.JSONDecodeError):
            return {}


class ConfigurationError(Exception):
    """Environment variables that cannot be used; the message names each, what it is, and why it will not do."""


@cache
def config() -> Config:
    """The settings of this process. Raises ConfigurationError."""
    try:
        loaded = Config()
    except ValidationError as error:
        prefix = str(Config.model_config.get("env_prefix", ""))
        lines = [
            f"{prefix}{str(problem['loc'][0]).upper()}={problem['input']!r}: {problem['msg']}"
            for problem in error.errors()
        ]
        raise ConfigurationError("\n".join(lines)) from None
    loaded.home = loaded.home.expanduser().resolve()
    return loaded
