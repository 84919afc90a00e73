"""What users call beside the class: creation, functions over shards, random state, own rules, explanations."""
