"""Reports that open offline: one HTML file with pictures, the figures of each as a table, and conditions."""
