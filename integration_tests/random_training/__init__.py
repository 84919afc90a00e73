"""Random training steps under data parallelism on four ranks as on one device.

Data parallelism is alone and with tensor parallelism.
"""

from integration_tests.random_training.compose import Program, compose
from integration_tests.random_training.train import verdict

__all__ = ["Program", "compose", "verdict"]
