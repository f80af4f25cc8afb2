"""What is measured and never judged."""
