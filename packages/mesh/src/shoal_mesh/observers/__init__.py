"""Who observes collectives: counts and traces, comparison of the ranks before each collective, ranges in profiles."""
