"""The only folder that changes modules: their parameters become DTensors, their forward local computation, and back.

May import: lowering, sharding.
"""
