"""What committed results say: the generated parts of docs/results.md."""
