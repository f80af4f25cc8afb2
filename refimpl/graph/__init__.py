"""A traced model, what is known of its values, and what is done to any model's modules."""
