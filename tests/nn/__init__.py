"""The networks, beside references written here or kept from the projects that they come from."""
