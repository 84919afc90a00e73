"""What optimizers need: clipping by a global norm, and steps on local shards."""
