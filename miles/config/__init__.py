"""The configuration of a run: frozen models, a loader with one-line errors, and the resolved YAML."""

from miles.config.checks import check_ports
from miles.config.loader import dump_config, load_config
from miles.config.schema import RunConfig

__all__ = ["RunConfig", "check_ports", "dump_config", "load_config"]
