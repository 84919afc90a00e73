"""Who observes collectives: counts and traces, comparison of the ranks before each collective, ranges in profiles.

May import: _torch, argument_types, collectives, errors, events, groups, shared_memory, transport.
"""
