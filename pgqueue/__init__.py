"""The queue: values, SQL, operations on a connection, the Python API, settings and the command line."""
