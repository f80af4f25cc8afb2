"""The command line, the session, judging, recording, and waivers."""
