"""One module for each stage of a claim, and what the stages share."""
