"""The configuration: what can be set (`settings`), how a file is read (`file`) and written (`template`)."""

from mediatord.config.file import ConfigError, load
from mediatord.config.settings import Config
from mediatord.config.template import render

__all__ = ["Config", "ConfigError", "load", "render"]
