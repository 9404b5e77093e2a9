"""Reports: pages, pictures and colours, and how a browser opens them."""
