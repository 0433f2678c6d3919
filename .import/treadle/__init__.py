"""Treadle: a compiler that serves language models. Every module of the project is imported below this name."""

__version__ = "0.1.0.dev0"
