"""What the entry points call: each stage is one question, one run directory."""
