"""The backend in a process of its own: what it is asked, and what it answers (docs/architecture.md, "Processes")."""
