"""Stages of a pipeline: each rank of an axis holds consecutive layers of a model of transformers.

May import: errors.
"""
