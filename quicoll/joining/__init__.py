"""`entry` is how a rank comes into a job, `unclosed` what a program has come into and not left."""
