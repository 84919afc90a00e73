"""The user's vocabulary: each style maps a module to its `ModuleSharding`.

May import: apply, errors, experts, lowering, modules, sharding.
"""
