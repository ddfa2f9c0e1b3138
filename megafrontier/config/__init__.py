"""Every option in one place: dataclasses, YAML with inheritance, `key=value` overrides, checks.

Values that depend on another part of the program (placements on a machine's levels, the
vocabulary of a tokenizer) are checked there, still before any process group starts.
"""

from megafrontier.config.data import CorpusConfig as CorpusConfig
from megafrontier.config.data import DataConfig as DataConfig
from megafrontier.config.data import corpus_labels as corpus_labels
from megafrontier.config.data import refuse_no_corpus as refuse_no_corpus
from megafrontier.config.data import weight_at as weight_at
from megafrontier.config.layout import ExpertsPartitionConfig as ExpertsPartitionConfig
from megafrontier.config.layout import OffloadConfig as OffloadConfig
from megafrontier.config.layout import ParallelConfig as ParallelConfig
from megafrontier.config.layout import PartitionConfig as PartitionConfig
from megafrontier.config.layout import WireFormat as WireFormat
from megafrontier.config.layout import WiresConfig as WiresConfig
from megafrontier.config.loading import config_from_dict as config_from_dict
from megafrontier.config.loading import config_to_dict as config_to_dict
from megafrontier.config.loading import load_config as load_config
from megafrontier.config.loading import load_machine as load_machine
from megafrontier.config.loading import save_config as save_config
from megafrontier.config.machine import DeviceConfig as DeviceConfig
from megafrontier.config.machine import LevelConfig as LevelConfig
from megafrontier.config.machine import MachineConfig as MachineConfig
from megafrontier.config.model.blocks import AttentionConfig as AttentionConfig
from megafrontier.config.model.blocks import DeltaConfig as DeltaConfig
from megafrontier.config.model.blocks import LatentConfig as LatentConfig
from megafrontier.config.model.blocks import MLPConfig as MLPConfig
from megafrontier.config.model.blocks import PredictionConfig as PredictionConfig
from megafrontier.config.model.gpt import ModelConfig as ModelConfig
from megafrontier.config.model.moe import ExpertGroupsConfig as ExpertGroupsConfig
from megafrontier.config.model.moe import MoEConfig as MoEConfig
from megafrontier.config.model.rotary import RotaryScalingConfig as RotaryScalingConfig
from megafrontier.config.model.scaling import ScalingConfig as ScalingConfig
from megafrontier.config.optimizer import OptimizerConfig as OptimizerConfig
from megafrontier.config.optimizer import OptimizerGroupConfig as OptimizerGroupConfig
from megafrontier.config.optimizer import ScheduleConfig as ScheduleConfig
from megafrontier.config.optimizer import SubspaceConfig as SubspaceConfig
from megafrontier.config.schema import BatchWarmupConfig as BatchWarmupConfig
from megafrontier.config.schema import CheckpointConfig as CheckpointConfig
from megafrontier.config.schema import CheckpointingMode as CheckpointingMode
from megafrontier.config.schema import Config as Config
from megafrontier.config.schema import EvaluateConfig as EvaluateConfig
from megafrontier.config.schema import LogConfig as LogConfig
from megafrontier.config.schema import PreflightConfig as PreflightConfig
from megafrontier.config.schema import RunConfig as RunConfig
from megafrontier.config.schema import SnapshotConfig as SnapshotConfig
from megafrontier.config.schema import TrainConfig as TrainConfig
from megafrontier.config.sites import SitesConfig as SitesConfig
from megafrontier.config.validation import check as check
