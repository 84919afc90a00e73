"""Emission: the forward of a module as the text of a program of local operators and collectives.

`recorder` runs the module on DTensors and records a `trace`. `constants` finds the operations that
a program computes once. `sides` decides which replicated values are R and which are I. `statements`
makes a statement of each operator and move, with texts from `expressions` and `linear_layers`.
`checked_program` gives values their `names`, and runs each line under the checker. `source` writes
the file, and `emit` calls all of these.

May import: collectives, conversions, runtime.
"""
