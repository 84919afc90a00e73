"""Mixtures of experts: tokens sorted by expert, sent to the ranks that hold the experts, and back.

May import: lowering, sharding.
"""
