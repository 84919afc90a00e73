"""Changes to modules: parameters become DTensors and forwards local computation, and back.

No other folder changes modules.

May import: lowering, sharding.
"""
