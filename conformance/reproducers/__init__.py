"""Scripts that show a fault with torch and the backend only."""
