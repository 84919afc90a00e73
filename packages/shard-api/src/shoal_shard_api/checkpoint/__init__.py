"""State dicts that hold ShardedTensors: saving, loading onto any ranks and sharding, and module hooks.

May import: arguments, errors, ranks, tensor.
"""

from .load_save import load, save
from .state_dict_hooks import pre_load_state_dict_hook, state_dict_hook

__all__ = ["load", "pre_load_state_dict_hook", "save", "state_dict_hook"]
