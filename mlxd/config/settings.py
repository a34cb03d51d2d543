"""The settings: strict frozen types, `[defaults]` already merged into every model."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo

from mlxd.config import values
from mlxd.config.secrets import OptionalKeys, OptionalToken
from mlxd.config.values import (
    Alias,
    Duration,
    Host,
    Listen,
    ModelId,
    OptionalDuration,
    OptionalEndpoint,
    OptionalListen,
    OptionalPath,
    Origin,
    Size,
    SizeOrAuto,
    UnixAddress,
    is_local,
    parse_listen,
)
from mlxd.models import sources

#: Smaller log files would be all rotation.
MIN_LOG_SIZE = 64 * 1024

#: Where a policy sends a request with some trait.
Answer = Literal["batch", "serial", "reject"]


def _absolute_source(text: str, info: ValidationInfo) -> str:
    match sources.parse(text):
        case sources.Folder(path) | sources.GgufFile(path):
            return values.resolve(path, info)
        case _:
            return text


def _absolute_unless_auto(text: str, info: ValidationInfo) -> str:
    return text if text == "auto" else values.resolve(text, info)


def _environment(variables: dict[str, str]) -> dict[str, str]:
    for name, value in variables.items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError("expected a table of environment variables, name = 'value'")
    return variables


class Table(BaseModel):
    """A table of the file: unknown keys, wrong types and changes after loading are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _open_only_here(listen: str, info: ValidationInfo) -> str:
    # Absent where it is wrong itself, which is told already.
    no_keys = info.data.get("api_keys_file", ...) is None
    if no_keys and not is_local(parse_listen(listen)):
        raise ValueError(
            "expected a loopback address (127.0.0.1, [::1] or localhost) or a Unix socket: without "
            "api_keys_file every caller is trusted"
        )
    return listen


class ServerSettings(Table):
    """`[server]`. Durations are seconds, sizes are bytes."""

    api_keys_file: OptionalKeys = None  # None = open to every caller
    listen: Annotated[Listen, AfterValidator(_open_only_here)] = "127.0.0.1:8080"
    drain_timeout: Duration = Field(30.0, ge=0)
    max_body: Size = Field(32 * 2**20, ge=1)
    response_store: Size = Field(64 * 2**20, ge=0)
    request_timeout: Duration = Field(1800.0, gt=0)
    receive_timeout: Duration = Field(75.0, gt=0)
    sse_keepalive: OptionalDuration = Field(15.0, gt=0)  # None = off
    hosts: Annotated[tuple[Host, ...], Field(strict=False)] = ()
    origins: Annotated[tuple[Origin, ...], Field(strict=False)] = ()
    cache_dir: Annotated[str, AfterValidator(_absolute_unless_auto)] = Field("auto", min_length=1)


class AdminSettings(Table):
    """`[admin]`."""

    listen: OptionalListen = None  # None = mounted on the public listener
    token_file: OptionalToken = None


class MetricsSettings(Table):
    """`[metrics]`."""

    open: bool = False
    vllm_names: bool = True


def _with_otel(endpoint: str | None) -> str | None:
    if endpoint is None:
        return None
    try:
        found = find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise ValueError("expected the extra otel: pip install 'mlxd[otel]'")
    return endpoint


class TracesSettings(Table):
    """`[traces]`."""

    endpoint: Annotated[OptionalEndpoint, AfterValidator(_with_otel)] = None  # None = no traces


class MemorySettings(Table):
    """`[memory]`."""

    budget: SizeOrAuto = None  # bytes; None = what the device can give


class LogSettings(Table):
    """`[log]`."""

    format: Literal["auto", "json", "console"] = "auto"
    level: Literal["debug", "info", "warning", "error"] = "info"
    file: OptionalPath = None  # None = standard error
    max_size: Size = Field(50_000_000, ge=MIN_LOG_SIZE)
    keep: int = Field(5, ge=1, le=1000)


class SamplingSettings(Table):
    """`[models.X.sampling]`; None = the model's generation_config.json, then a built-in value."""

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    max_tokens: int | None = Field(None, ge=1)


def _whole(value: object) -> object:
    # A literal takes what is equal: 8.0, or false for 0.
    if type(value) is not int:
        raise ValueError("expected 0, 8 or 4")
    return value


KvBits = Annotated[Literal[0, 8, 4], BeforeValidator(_whole)]


class BatchSettings(Table):
    """`[models.X.batch]`."""

    width: int = Field(16, ge=1, le=1024)
    prefill_chunk: int = Field(256, ge=16)
    prefill_budget: int = Field(512, ge=16)
    pacing: Literal["balanced", "latency", "throughput"] = "balanced"
    queue: int = Field(256, ge=0)
    kv_bits: KvBits = 0  # of full attention's keys and values; 0 = model precision
    prefix_cache: Size = Field(2**30, ge=0)
    kv_budget: SizeOrAuto = None  # bytes; None = a share of memory.budget


class PolicySettings(Table):
    """`[models.X.policy]`: one answer for each trait of a request or model."""

    seed: Answer = "batch"
    logprobs: Answer = "batch"
    penalties: Answer = "batch"
    logit_bias: Answer = "batch"
    structured: Answer = "batch"
    adapter: Answer = "batch"
    images: Answer = "serial"
    kv_quant: Answer = "batch"
    draft: Answer = "serial"


class ModelSettings(Table):
    """`[models.X]`. Paths in `source` are absolute once loaded."""

    source: Annotated[str, AfterValidator(_absolute_source)] = Field(description=sources.EXPECTED)
    aliases: Annotated[tuple[Alias, ...], Field(strict=False)] = ()
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    context: int | None = Field(None, ge=16)  # None = the model's own
    blas: Literal["auto", "openblas", "mkl", "none"] = "auto"
    kernels: Literal["native", "portable"] = "native"
    attention: Literal["auto", "fused"] = "auto"
    env: Annotated[dict[str, str], AfterValidator(_environment)] = Field(default_factory=dict)
    trust_remote_code: bool = False
    sampling: SamplingSettings = SamplingSettings()
    batch: BatchSettings = BatchSettings()
    policy: PolicySettings = PolicySettings()


class DefaultsSettings(Table):
    """`[defaults]`: what every model's own tables are laid over. Not kept once merged."""

    sampling: SamplingSettings = SamplingSettings()
    batch: BatchSettings = BatchSettings()
    policy: PolicySettings = PolicySettings()


def _at_least_one(models: dict[str, ModelSettings]) -> dict[str, ModelSettings]:
    if not models:
        raise ValueError("expected at least one [models.ID] table")
    return models


def _guarded(admin: AdminSettings, info: ValidationInfo) -> AdminSettings:
    server = info.data.get("server")
    if not isinstance(server, ServerSettings):  # wrong itself, which is told already
        return admin
    keys, token = server.api_keys_file, admin.token_file
    if keys is not None and token is not None and keys.find(token.secret.text) is not None:
        raise ValueError("expected a token_file whose token is none of the API keys")
    if token is None and not _is_private(server, admin):
        raise ValueError(
            "expected token_file, or listen on a Unix socket of its own: without them /admin is "
            "open, which only a daemon that is open as a whole, on loopback, can be"
        )
    return admin


def _is_private(server: ServerSettings, admin: AdminSettings) -> bool:
    own = None if admin.listen is None else parse_listen(admin.listen)
    if isinstance(own, UnixAddress):  # its file's mode keeps others out
        return True
    return server.api_keys_file is None and (own is None or is_local(own))


class Settings(Table):
    """The whole configuration, `[defaults.*]` already merged into every model."""

    server: ServerSettings = ServerSettings()
    admin: Annotated[AdminSettings, AfterValidator(_guarded)] = Field(
        AdminSettings(), validate_default=True
    )
    metrics: MetricsSettings = MetricsSettings()
    traces: TracesSettings = TracesSettings()
    log: LogSettings = LogSettings()
    memory: MemorySettings = MemorySettings()
    models: Annotated[dict[ModelId, ModelSettings], AfterValidator(_at_least_one)] = Field(
        description="at least one [models.ID] table"
    )
