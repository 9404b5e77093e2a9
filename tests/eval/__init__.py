"""The evaluation: harness, LIBERO, statistics, tables, and the jobs that make stored runs."""
