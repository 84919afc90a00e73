"""Process groups: who makes them, who looks them up, and what the default group agrees on.

May import: _torch, accelerator, argument_types, errors, shared_memory, transport.
"""
