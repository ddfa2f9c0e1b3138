"""Every option, in one place: dataclasses, YAML with inheritance, `key=value` overrides, checks.

Values that depend on another part of the program (placements on a machine's levels, the
vocabulary of a tokenizer) are checked by that part, still before any process group starts.
"""

from megafrontier.config.checks import check
from megafrontier.config.loading import (
    config_from_dict,
    config_to_dict,
    load_config,
    load_machine,
    save_config,
)
from megafrontier.config.schema import (
    CheckpointConfig,
    Config,
    CorpusConfig,
    DataConfig,
    DeviceConfig,
    EvaluateConfig,
    LevelConfig,
    LogConfig,
    MachineConfig,
    ModelConfig,
    OptimizerConfig,
    PartitionConfig,
    RotaryScalingConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
    WireFormat,
    WiresConfig,
)

__all__ = [
    "CheckpointConfig",
    "Config",
    "CorpusConfig",
    "DataConfig",
    "DeviceConfig",
    "EvaluateConfig",
    "LevelConfig",
    "LogConfig",
    "MachineConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PartitionConfig",
    "RotaryScalingConfig",
    "RunConfig",
    "ScheduleConfig",
    "TrainConfig",
    "WireFormat",
    "WiresConfig",
    "check",
    "config_from_dict",
    "config_to_dict",
    "load_config",
    "load_machine",
    "save_config",
]
