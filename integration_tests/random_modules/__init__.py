"""Random models with random plans, trained on four ranks as on one device."""

from integration_tests.random_modules.compose import compose
from integration_tests.random_modules.hunt import hunt, on_ranks, shrink
from integration_tests.random_modules.program import Program

__all__ = ["Program", "compose", "hunt", "on_ranks", "shrink"]
