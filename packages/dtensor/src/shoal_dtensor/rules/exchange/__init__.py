"""Moving shards inside an operator: halos, ranges and transposed shards.

May import: language.
"""
