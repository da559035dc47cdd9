"""The choice of an engine: the fastest that works on a device, or the configured one, with the reason."""

import importlib.util
import os

import torch

from trainer.base.parallel import World, device_name, precision_on
from trainer.config.config import RuntimeConfig, TrainConfig
from trainer.config.errors import UserError
from trainer.config.extensions import ENGINES, extension
from trainer.config.model_config import ModelConfig
from trainer.engines.engine import Engine
from trainer.engines.memory import automatic_engine


def make_engine(config: ModelConfig, train: TrainConfig, runtime: RuntimeConfig, world: World) -> Engine:
    """The fastest engine that works here, or the configured one. UserError if it does not work here."""
    name, why = choose_engine(config, train, runtime, world.device, world.world_size)
    engine: Engine = extension(ENGINES, name, "runtime.engine")(config, train, runtime, world, why)
    return engine


def choose_engine(
    config: ModelConfig, train: TrainConfig, runtime: RuntimeConfig, device: torch.device, ranks: int = 1
) -> tuple[str, str]:
    """The name of the engine, and one line with its name, its device and the reason. UserError as in `make_engine`."""
    on = f"on {device_name(device)}"
    obstacle = why_not_fused(config, train, device)
    by_torchao = train.precision == "fp8" and runtime.engine == "sharded"
    if train.precision.startswith("fp8") and not by_torchao and (obstacle or runtime.engine not in ("auto", "fused")):
        reason = obstacle or f"runtime.engine is {runtime.engine}"
        raise UserError(f"train.precision: {train.precision} needs the fused engine: {reason}")
    if runtime.engine == "fused" and obstacle:
        raise UserError(f"runtime.engine: fused cannot run here: {obstacle}; use 'auto'")
    if runtime.engine not in ("auto", "fused"):
        return runtime.engine, f"{runtime.engine}, {on}; as configured"
    if runtime.engine == "auto" and device.type == "cuda":
        memory, precision = torch.cuda.get_device_properties(device).total_memory, precision_on(device, train)
        name, why = automatic_engine(config, runtime, precision, train.optimizer == "muon", ranks, memory, obstacle)
        return name, f"{name}, {on}{why and f'; {why}'}"
    if runtime.engine == "fused" or train.precision.startswith("fp8"):
        return "fused", f"fused, {on}"
    return "eager", f"eager, {on}; no CUDA device was found"


def why_not_fused(config: ModelConfig, train: TrainConfig, device: torch.device) -> str | None:
    """Why the fused engine cannot run here; None if it can."""
    if reason := config.why_not_fused:
        return reason
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it needs a CUDA device, this is {device.type}"
    if torch.version.hip:
        return "its kernels are written for CUDA, this is ROCm"
    if train.precision == "fp32":
        return "it computes in bf16, but train.precision is fp32"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{device_name(device)} has no bf16"
    if train.precision.startswith("fp8"):
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
            return f"{device_name(device)} does not have Hopper's fp8"
        for field in ("n_embd", "block_size"):  # fp8 products need rows of 16, and sum over tokens in groups of 16
            if (value := getattr(config, field)) % 16:
                return f"model.{field} {value} is not a multiple of 16, which fp8 products need"
        if config.attention_width % 16:
            return f"the width of all heads, {config.attention_width}, is not a multiple of 16, which fp8 products need"
    return None
