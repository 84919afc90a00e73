"""Local ranks: processes of this machine that run one function after the other, for scripts, notebooks and tests."""
