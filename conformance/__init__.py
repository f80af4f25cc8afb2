"""The suite: every claim of a backend's config taken through the flow and judged, as pytest tests."""
