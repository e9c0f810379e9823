"""Settings: `settings` lists them all, `checks` refuses what cannot work, `pages` reads config pages and flags."""

from cispo_jax.config.checks import profile_steps, validate
from cispo_jax.config.pages import changed, default_config, from_config_dict, set_from_text, to_dict
from cispo_jax.config.settings import (
    CheckpointSettings,
    Config,
    ConfigError,
    DataSettings,
    EvaluationSettings,
    LoggingSettings,
    MeshSettings,
    ModelSettings,
    ObjectiveSettings,
    OptimizerSettings,
    ProfileSettings,
    RewardSettings,
    SamplingMeshSettings,
    SamplingSettings,
    SftSettings,
    suggest,
)

__all__ = [
    "CheckpointSettings",
    "Config",
    "ConfigError",
    "DataSettings",
    "EvaluationSettings",
    "LoggingSettings",
    "MeshSettings",
    "ModelSettings",
    "ObjectiveSettings",
    "OptimizerSettings",
    "ProfileSettings",
    "RewardSettings",
    "SamplingMeshSettings",
    "SamplingSettings",
    "SftSettings",
    "changed",
    "default_config",
    "from_config_dict",
    "profile_steps",
    "set_from_text",
    "suggest",
    "to_dict",
    "validate",
]
