"""Local ranks: processes of this machine that run functions of scripts, notebooks and tests.

May import: _torch, accelerator, argument_types, errors, groups, shared_memory, watch.
"""
