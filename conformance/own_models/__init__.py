"""Models that a user hands in: taken to the backend, judged, and measured against float."""
