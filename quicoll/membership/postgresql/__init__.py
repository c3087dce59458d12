"""The coordinator's journal in a PostgreSQL database, which several coordinators share."""
