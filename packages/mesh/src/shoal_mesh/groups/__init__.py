"""Process groups: who makes them, who looks them up, and what the default group agrees on."""
