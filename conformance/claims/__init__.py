"""What a config claims, and the models and inputs on which a claim is tried."""
