"""The configuration: sections of typed fields, and how they are read from a file and the command line."""

from toka_async.config.load import ConfigError, load_config
from toka_async.config.sections import (
    AttentionConfig,
    AuthConfig,
    BatchesConfig,
    CacheConfig,
    ClusterConfig,
    Config,
    GraphsConfig,
    LimitsConfig,
    LogConfig,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
    ServerConfig,
    SimulatedConfig,
    TuningConfig,
    ZmqConfig,
)

__all__ = [
    "AttentionConfig",
    "AuthConfig",
    "BatchesConfig",
    "CacheConfig",
    "ClusterConfig",
    "Config",
    "ConfigError",
    "GraphsConfig",
    "LimitsConfig",
    "LogConfig",
    "ModelConfig",
    "ParallelConfig",
    "ScheduleConfig",
    "ServerConfig",
    "SimulatedConfig",
    "TuningConfig",
    "ZmqConfig",
    "load_config",
]
