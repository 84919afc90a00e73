"""Observers of collectives: counts and traces, comparisons of ranks, ranges in profiles.

May import: _torch, argument_types, collectives, errors, events, groups, notebook_html,
shared_memory, transport, watch.
"""
