"""Public styles: each maps a module to its `ModuleSharding`.

May import: apply, errors, experts, lowering, modules, sharding.
"""
