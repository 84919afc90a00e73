"""Data parallelism: parameters sharded over data axes, gathered unit by unit and reduced in backward."""
