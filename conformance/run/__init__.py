"""The command line, the session, judging, recording, waivers, and the expected verdicts."""
