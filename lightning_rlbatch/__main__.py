"""Run the command line with ``python -m lightning_rlbatch``."""

from lightning_rlbatch.cli import main

main()
