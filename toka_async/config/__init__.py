"""The configuration: sections of typed fields, and how they are read from a file and the command line."""

from toka_async.config.load import ConfigError, load_config
from toka_async.config.sections import (
    AttentionConfig,
    AuthConfig,
    BatchesConfig,
    CacheConfig,
    CompileConfig,
    Config,
    LimitsConfig,
    LogConfig,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
    ServerConfig,
    SimulatedConfig,
    ZmqConfig,
)

__all__ = [
    "AttentionConfig",
    "AuthConfig",
    "BatchesConfig",
    "CacheConfig",
    "CompileConfig",
    "Config",
    "ConfigError",
    "LimitsConfig",
    "LogConfig",
    "ModelConfig",
    "ParallelConfig",
    "ScheduleConfig",
    "ServerConfig",
    "SimulatedConfig",
    "ZmqConfig",
    "load_config",
]
