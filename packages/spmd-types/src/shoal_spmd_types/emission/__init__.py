"""Programs of local operators and typed collectives, written from a run on DTensors.

`recorder` runs the module and records its operators, `sides` decides which replicated values are R
and which are I, `names` and `expressions` make readable text, `statements` runs each line under the
checker, and `emit` puts the file together.

May import: collectives, conversions, runtime.
"""
